"""The target's own MTP module as a draft: chains equal those of vLLM's method, and texts equal plain vLLM's."""

import pytest
from engine_probes import drafts_of_steps
from engine_process import Engine, run
from tiny_mtp import FAMILIES, build_tiny_mtp

LENGTH = 3
CHAIN = {
    "sources": ["draft"], "top_k": 1, "max_depth": LENGTH, "num_speculative_tokens": LENGTH, "budget": LENGTH,
    "theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0,
}  # fmt: skip
GRAPH = {"sources": ["draft", "ngram"], "budget": 16}
ENGINE = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "block_size": 32, "skip_tokenizer_init": True}
SAMPLING = [
    {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "max_tokens": 40, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(12, 5, 150, seed=31)[:5]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, prompts, tmp_path_factory):
    return build_tiny_mtp(tmp_path_factory.mktemp("mtp"), request.param, prompts)


def outcome(target, speculative, prompts):
    """Texts of all prompts at once, greedy and seeded, and the drafts of the first three alone."""
    engine = Engine(target, speculative, **ENGINE)
    try:
        texts = [run(engine, prompts, sampling) for sampling in SAMPLING]
        steps = [engine.call(drafts_of_steps, prompt, 40) for prompt in prompts[:3]] if speculative else []
        return texts, steps
    finally:
        engine.close()


def test_texts_and_chains(target, prompts):
    """Our last drafts are no longer than the remaining text. A graph never needs more steps."""
    texts, _ = outcome(target, None, prompts)
    _, expected = outcome(target, {"method": "mtp", "num_speculative_tokens": LENGTH}, prompts)
    chain_texts, chains = outcome(target, {"method": "gsd", "model": str(target), **CHAIN}, prompts)
    graph_texts, graphs = outcome(target, {"method": "gsd", "model": str(target), **GRAPH}, prompts)
    assert chain_texts == graph_texts == texts
    accepted = 0
    for (tokens, theirs), (got, ours), (_, more) in zip(expected, chains, graphs, strict=True):
        assert got == tokens
        cut = [(count, drafts[: 40 - count - 1]) for count, drafts in theirs if 0 < count < 40]
        assert [(count, drafts) for count, drafts in ours if 0 < count < 40] == cut
        assert len(more) <= len(ours)
        accepted += len(tokens) - 1 - len(cut)
    assert accepted > 10
