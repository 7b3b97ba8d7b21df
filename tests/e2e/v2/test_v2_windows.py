"""Layers with sliding windows, capped scores or attention sinks on Model Runner V2: tokens equal plain V2's."""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Params
from tiny_windows import FAMILIES, NODES, build
from v2_engine import V2Engine

GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "seed": 5}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def ask(engine, prompts, params, adapters):
    return engine.call(generate_adapted, prompts, [Params(keys) for keys in params], adapters)


@pytest.mark.parametrize(
    ("family", "gpu_attention", "lora"),
    [("every other layer, capped", True, LORA), ("every other layer, with sinks", False, {})],
)
def test_equals_plain_v2(engine_pool, tmp_path_factory, random_prompts, family, gpu_attention, lora):
    """Prompts are longer than the window, first uncached, then with half of them cached.

    One request is greedy. The other is seeded and has an adapter if the engine supports LoRA.
    """
    folder = tmp_path_factory.mktemp("windowed")
    target, draft = build(folder, *FAMILIES[family])
    adapters = [None, build_adapter(folder / "adapter0", target, 0) if lora else None]
    config = {"method": "gsd", "model": str(draft), "num_speculative_tokens": NODES // 2, "max_depth": 3}
    prompts, params = random_prompts(2, 50, 60), [GREEDY, SEEDED]
    plain = engine_pool.engine(f"plain V2, {family}", lambda: V2Engine(target, None, **lora))
    expected = ask(plain, prompts, params, adapters)
    options = {"gpu_attention": gpu_attention, "block_size": 32, **lora}
    engine = engine_pool.engine(f"V2, {family}, {gpu_attention}", lambda: V2Engine(target, config, **options))
    answers = ask(engine, prompts, params, adapters)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    again = ask(engine, prompts, [{**keys, "max_tokens": 5} for keys in params], adapters)
    assert [answer.tokens for answer in again] == [answer.tokens[:5] for answer in expected]
    assert [answer.num_cached_tokens for answer in again] == [32, 32]  # more than the window
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0
    assert metrics["gsd_kv_rows_moved"] > 0
