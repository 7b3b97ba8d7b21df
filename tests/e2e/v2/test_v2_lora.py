"""LoRA adapters on Model Runner V2: texts equal plain V2's with the same adapters."""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Params, model_runner
from planted import plant_costs

GSD = {"num_speculative_tokens": 6, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5}
PARAMS = [GREEDY, GREEDY, SEEDED, GREEDY]
# One adapter slot stays free; see ``test_lora``.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "block_size": 32}


def note_adapters_of_timed_runs() -> None:
    """Count the dummy adapters that are added during each timed forward of the target."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    from vllm_gsd.engine.observe import measure_phases

    forward, add, added = measure_phases._target_forward, WorkerLoRAManager.add_dummy_lora, []

    def adding(self, *args, **kwargs):
        added.append(add(self, *args, **kwargs))
        return added[-1]

    def noted(runner, num_rows):
        before = sum(added)
        forward(runner, num_rows)
        runner.added_in_timed_runs = [*getattr(runner, "added_in_timed_runs", []), sum(added) - before]

    measure_phases._target_forward, WorkerLoRAManager.add_dummy_lora = noted, adding


def added_in_timed_runs(llm) -> list[int]:
    return model_runner(llm).added_in_timed_runs


@pytest.fixture(scope="module")
def adapters(tiny_pair, tmp_path_factory):
    """Two adapters, of which the second also changes the LM head, and None."""
    folder = tmp_path_factory.mktemp("adapters")
    return [*(build_adapter(folder / f"adapter{index}", tiny_pair.target, index) for index in range(2)), None]


@pytest.fixture(scope="module")
def plain(start_v2):
    return start_v2(None, **LORA)


@pytest.fixture(scope="module")
def engine(start_v2):
    """An engine that measured costs at start, but drafts and verifies everything unless a test plants costs."""
    engine = start_v2(GSD, **LORA, async_scheduling=True, costs=True, first=(note_adapters_of_timed_runs,))
    engine.call(plant_costs, None)
    return engine


@pytest.fixture(scope="module")
def prompts(random_prompts):
    """Two equal prompts that fill a block, and two short ones."""
    (long,) = random_prompts(1, 40, 41, seed=31)
    return [long, long, *random_prompts(2, 5, 20, seed=32)]


def ask(engine, prompts, adapters):
    return engine.call(generate_adapted, prompts, [Params(keys) for keys in PARAMS], adapters)


def test_equals_plain_v2(plain, engine, prompts, adapters):
    """One batch mixes greedy and seeded requests, with and without adapters. Then each prompt gets another adapter."""
    first = [adapters[0], None, adapters[1], adapters[0]]
    for chosen, cached in ((first, 0), ([adapters[1], adapters[0], None, adapters[1]], 32)):
        answers, expected = ask(engine, prompts, chosen), ask(plain, prompts, chosen)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        # The long prompt was read with the first adapter and without one, so the second adapter finds no cached block.
        assert [answer.num_cached_tokens for answer in answers[:2]] == [0, cached]
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0 and metrics["gsd_kv_rows_moved"] > 0
    assert not any(name.startswith("gsd_fallbacks") for name in metrics)


def test_plans_cut_rows_of_mixed_batches(plain, engine, prompts, adapters):
    """When rows have a cost, plans cut nodes in batches with different adapters and none."""
    chosen, before = [adapters[1], None, adapters[1], adapters[0]], engine.metrics()
    engine.call(plant_costs, 0.6)
    try:
        answers, expected = ask(engine, prompts, chosen), ask(plain, prompts, chosen)
    finally:
        engine.call(plant_costs, None)
    after = engine.metrics()
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for name in ("gsd_nodes_cut", "gsd_nodes_verified", "gsd_nodes_accepted_native"):
        assert after[name] > before.get(name, 0)


def test_costs_leave_out_what_sets_adapters_up(engine):
    counts = engine.call(added_in_timed_runs)
    assert len(counts) >= 2 and not any(counts)
