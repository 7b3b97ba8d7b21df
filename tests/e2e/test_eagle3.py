"""EAGLE-3 heads: chains equal those of vLLM's own method, and more candidates accept no fewer tokens."""

import pytest
from engine_probes import drafts_of_steps, forget_prefixes
from engine_process import Engine, run
from tiny_eagle3 import HEADS

LENGTH = 3
CHAIN = {
    "sources": ["draft"], "top_k": 1, "max_depth": LENGTH, "num_speculative_tokens": LENGTH, "budget": LENGTH,
    "theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0,
}  # fmt: skip
GRAPH = {**CHAIN, "top_k": 4, "num_speculative_tokens": 16, "budget": 16}
ENGINE = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "block_size": 32}  # no prompt is chunked


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(12, 5, 150, seed=31)[:5]


@pytest.fixture(scope="module", params=HEADS)
def head(request, tiny_eagle3):
    return str(tiny_eagle3 / request.param)


def test_chains_are_those_of_vllm(start_engine, tiny_pair, prompts, head):
    """Every step has the same drafts and the same accepted tokens.

    Prompts are not chunked: for the last row of a chunk, vLLM 0.32's method uses the last token of the whole prompt as
    the next token.
    """
    own = {"method": "eagle3", "model": head, "num_speculative_tokens": LENGTH}
    theirs = Engine(tiny_pair.target, own, skip_tokenizer_init=True, **ENGINE)
    try:
        expected = [theirs.call(drafts_of_steps, prompt, 40) for prompt in prompts]
    finally:
        theirs.close()
    engine = start_engine({"model": head, **CHAIN}, **ENGINE)
    accepted = 0
    for prompt, (tokens, steps) in zip(prompts, expected, strict=True):
        got, chains = engine.call(drafts_of_steps, prompt, 40)
        assert got == tokens
        # Our drafts near the end are no longer than the remaining text.
        theirs_cut = [(count, drafts[: 40 - count - 1]) for count, drafts in steps if 0 < count < 40]
        assert theirs_cut == [(count, drafts) for count, drafts in chains if 0 < count < 40]
        accepted += len(tokens) - 1 - len(theirs_cut)
    assert accepted > 10


def test_more_candidates_accept_no_less(start_engine, prompts, head):
    """Without pruning, the graph contains the chain's nodes."""
    steps = []
    for config in (CHAIN, GRAPH):
        engine = start_engine({"model": head, **config}, **ENGINE)
        engine.call(forget_prefixes)
        before = engine.metrics()["gsd_target_steps"]
        for prompt in prompts:
            run(engine, [prompt], {"temperature": 0, "max_tokens": 40, "ignore_eos": True})
        steps.append(engine.metrics()["gsd_target_steps"] - before)
    assert steps[1] <= steps[0]
