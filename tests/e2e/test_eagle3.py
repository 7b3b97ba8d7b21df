"""EAGLE-3 heads: the chain that vLLM's own method drafts."""

import pytest
from engine_probes import drafts_of_steps
from engine_process import Engine
from tiny_eagle3 import HEADS

LENGTH = 3
CHAIN = {
    "sources": ["draft"], "top_k": 1, "max_depth": LENGTH, "num_speculative_tokens": LENGTH, "budget": LENGTH,
    "theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0,
}  # fmt: skip
GRAPH = {**CHAIN, "top_k": 4, "num_speculative_tokens": 16, "budget": 16}
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(4, 40, 100, seed=3)  # some in pieces, and longer than the heads' own positions


@pytest.fixture(scope="module", params=HEADS)
def head(request, tiny_eagle3):
    return str(tiny_eagle3 / request.param)


def test_chains_are_those_of_vllm(start_engine, tiny_pair, prompts, head):
    """The same drafts and the same accepted tokens in every step."""
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
        ends = len(steps) - 1  # its drafts are never verified, and ours are no longer than what is left
        assert [(count, drafts[: 40 - count - 1]) for count, drafts in steps[:ends]] == chains[:ends]
        accepted += len(tokens) - len(steps)
    assert accepted > 10
