"""Layers with sliding windows, capped scores or attention sinks on Model Runner V2."""

import pytest
from engine_process import run
from tiny_windows import FAMILIES, NODES, build
from v2_engine import V2Engine

GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "seed": 5}


@pytest.mark.parametrize(
    ("family", "gpu_attention"),
    [
        ("every other layer, capped", False),
        ("every other layer, capped", True),
        ("every other layer, with sinks", True),
    ],
)
def test_equals_plain_v2(engine_pool, tmp_path_factory, random_prompts, family, gpu_attention):
    """Prompts are longer than the window; one part of the batch is greedy, the other seeded."""
    folder = tmp_path_factory.getbasetemp() / f"windows of {family}"
    target, draft = (folder / "target", folder / "draft") if folder.exists() else build(folder, *FAMILIES[family])
    config = {"method": "gsd", "model": str(draft), "num_speculative_tokens": NODES // 2, "max_depth": 3}
    prompts, params = random_prompts(4, 30, 60), [GREEDY, SEEDED, SEEDED, GREEDY]
    plain = engine_pool.engine(f"plain V2, {family}", lambda: V2Engine(target, None))
    expected = run(plain, prompts, params)
    engine = engine_pool.engine(
        f"V2, {family}, {gpu_attention}", lambda: V2Engine(target, config, gpu_attention=gpu_attention)
    )
    assert run(engine, prompts, params) == expected
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0
    assert metrics["gsd_kv_rows_moved"] > 0
