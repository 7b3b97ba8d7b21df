"""Layers with sliding windows, capped scores or attention sinks on Model Runner V2."""

import pytest
from engine_process import run
from tiny_windows import FAMILIES, NODES, build
from v2_engine import V2Engine

GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "seed": 5}


@pytest.mark.parametrize(
    ("family", "gpu_attention"), [("every other layer, capped", True), ("every other layer, with sinks", False)]
)
def test_equals_plain_v2(engine_pool, tmp_path_factory, random_prompts, family, gpu_attention):
    """Prompts are longer than the window; one request is greedy, the other seeded. Then half of them is cached."""
    target, draft = build(tmp_path_factory.mktemp("windowed"), *FAMILIES[family])
    config = {"method": "gsd", "model": str(draft), "num_speculative_tokens": NODES // 2, "max_depth": 3}
    prompts, params = random_prompts(2, 50, 60), [GREEDY, SEEDED]
    plain = engine_pool.engine(f"plain V2, {family}", lambda: V2Engine(target, None))
    expected = run(plain, prompts, params)
    options = {"gpu_attention": gpu_attention, "block_size": 32}
    engine = engine_pool.engine(f"V2, {family}, {gpu_attention}", lambda: V2Engine(target, config, **options))
    assert run(engine, prompts, params) == expected
    again = engine.generate(prompts, [{**keys, "max_tokens": 5} for keys in params])
    assert [answer.tokens for answer in again] == [tokens[:5] for tokens in expected]
    assert [answer.num_cached_tokens for answer in again] == [32, 32]  # more than the window
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0
    assert metrics["gsd_kv_rows_moved"] > 0
