"""Engines of other settings on Model Runner V2: several in a process, without our CPU kernels, without speculation."""

import contextlib

import pytest
from engine_process import run
from request_features import assert_same
from test_one_process import in_turn
from v2_engine import OPTIONS, V2Engine

GSD = {"num_speculative_tokens": 6, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
PARAMS = [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 5, "logprobs": 2}]


@pytest.fixture(scope="module")
def asked(random_prompts):
    return random_prompts(2, 5, 20, seed=3)


@pytest.fixture(scope="module")
def plain(start_v2):
    return start_v2(None)


def test_engines_in_turn(tiny_pair, asked, plain):
    """Plain, with a graph, plain: each attends its own way."""
    config = {**GSD, "method": "gsd", "model": str(tiny_pair.draft)}
    expected = run(plain, asked, GREEDY)
    with contextlib.closing(V2Engine(tiny_pair.target)) as engine:
        told = engine.call(in_turn, tiny_pair.target, [None, config, None], asked, GREEDY, OPTIONS)
    for ours, (tokens, attention, (_, accepted)) in zip([False, True, False], told, strict=True):
        assert attention == {"TreeCPUAttentionImpl" if ours else "CPUAttentionBackendImpl"}
        assert tokens == expected
        assert not ours or accepted > 0


@pytest.mark.parametrize("gsd", [{**GSD, "cpu_kernels": "off"}, {"model": None, "sources": []}], ids=["off", "only"])
def test_cpu_kernels(start_v2, asked, plain, gsd):
    """Without them vLLM's own multiply and attend; with them alone there is no graph."""
    engine = start_v2(gsd)
    answers, expected = engine.generate(asked, PARAMS), plain.generate(asked, PARAMS)
    assert_same(answers, expected, 1e-3)
    counts = engine.metrics()
    if "sources" in gsd:
        assert not [name for name in counts if "gsd" in name or "spec_decode" in name]
    else:
        assert counts["spec_decode_num_accepted_tokens"] > 0
