"""Various engines on Model Runner V2: several in a process, without our kernels, without graphs, with long prompts."""

import contextlib

import pytest
from engine_process import run
from test_cpu_kernels import BFLOAT16, count_rows, ours_are_faster, rows_of
from test_long_context import build
from test_one_process import in_turn
from v2_engine import OPTIONS, V2Engine

GSD = {"num_speculative_tokens": 6, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
PARAMS = [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 5, "logprobs": 2}]
ONLY = {"model": None, "sources": []}


@pytest.fixture(scope="module")
def two_prompts(random_prompts):
    return random_prompts(2, 5, 20, seed=3)


@pytest.fixture(scope="module")
def plain(start_v2):
    return start_v2(None)


def test_engines_in_turn(tiny_pair, two_prompts, plain):
    """Engines without, with and again without gsd in one process: each uses its own attention."""
    config = {**GSD, "method": "gsd", "model": str(tiny_pair.draft)}
    expected = run(plain, two_prompts, GREEDY)
    with contextlib.closing(V2Engine(tiny_pair.target)) as engine:
        results = engine.call(in_turn, tiny_pair.target, [None, config, None], two_prompts, GREEDY, OPTIONS)
    for ours, (tokens, attention, (_, accepted)) in zip([False, True, False], results, strict=True):
        assert attention == {"TreeCPUAttentionImpl" if ours else "CPUAttentionBackendImpl"}
        assert tokens == expected
        assert not ours or accepted > 0


def test_without_our_cpu_kernels(start_v2, two_prompts):
    """vLLM's own kernels are used where rows do not branch. Without graphs, answers equal plain V2's bit for bit."""
    engine, plain = start_v2({**GSD, "cpu_kernels": "off"}, **BFLOAT16), start_v2(None, **BFLOAT16)
    engine.call(count_rows)
    without = [{**keys, "extra_args": {"gsd": False}} for keys in PARAMS]
    assert engine.generate(two_prompts, without) == plain.generate(two_prompts, PARAMS)
    assert engine.call(rows_of)["ours"] == 0
    engine.generate(two_prompts, PARAMS)
    rows = engine.call(rows_of)
    assert rows["ours"] > 0 and rows["ours without a branch"] == 0 and rows["upstream"] > sum(map(len, two_prompts))


def test_our_cpu_kernels_only(start_v2, two_prompts, plain):
    """With our kernels but without speculation, float32 answers equal plain V2's."""
    engine = start_v2(ONLY)
    assert engine.generate(two_prompts, PARAMS) == plain.generate(two_prompts, PARAMS)
    assert not [name for name in engine.metrics() if "gsd" in name or "spec_decode" in name]


@ours_are_faster
def test_our_cpu_kernels_only_in_bfloat16(start_v2, two_prompts):
    engine = start_v2(ONLY, **BFLOAT16)
    engine.call(count_rows)
    engine.generate(two_prompts, PARAMS)
    rows = engine.call(rows_of)
    assert rows["ours"] > rows["upstream"]


def test_long_prompts(tmp_path, random_prompts):
    """A prompt of several chunks, then one that repeats it and appends a copy from near its start."""
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
