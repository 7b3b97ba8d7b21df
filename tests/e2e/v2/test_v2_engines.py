"""Other engines on Model Runner V2: several in a process, without our kernels, without a graph, for long prompts."""

import contextlib

import pytest
from engine_process import run
from request_features import assert_same
from test_long_context import build
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


def test_long_prompts(tmp_path, random_prompts):
    """A prompt of many chunks, and then one that begins with it and ends as it goes on near its beginning."""
    pair, length = build(tmp_path), 8192
    (text,) = random_prompts(1, length, length)
    options = {"max_model_len": length + 256, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1 << 26}
    answers = []
    for gsd in (None, {**GSD, "method": "gsd", "model": str(pair.draft)}):
        with contextlib.closing(V2Engine(pair.target, gsd, **options)) as engine:
            answers.append([engine.generate([prompt], GREEDY)[0] for prompt in (text, text + text[100:130])])
            counts = engine.metrics()
    assert [one.tokens for one in answers[1]] == [one.tokens for one in answers[0]]
    assert answers[1][1].num_cached_tokens > 0.9 * length
    assert counts["gsd_draft_rows"] > length and counts["gsd_nodes_accepted_native"] > 0
