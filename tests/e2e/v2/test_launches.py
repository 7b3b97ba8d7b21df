"""What a decode step launches, with the kernels and (emulated) CUDA graphs of GPUs; see ``scripts/count_launches``."""

import pytest
from engine_process import run
from step_watch import report, watch_steps

GSD = {"num_speculative_tokens": 8, "max_depth": 2}


@pytest.fixture(scope="module")
def found(start_v2, random_prompts):
    engine = start_v2(GSD, gpu_attention=True, cuda_graphs=True, async_scheduling=True)
    engine.call(watch_steps, False)
    run(engine, random_prompts(1, 5, 20, seed=4), {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    return engine.call(report)


def test_verification(found):
    """Inputs, slots, lay-out, walk, KV moves and late copies."""
    assert found["decode_steps"] >= 2
    assert found["outside_graphs_beside_draft_phase"] <= 45
    assert found["by_phase"]["lay-out"] <= 2 and found["by_phase"]["walk"] <= 8 and found["by_phase"]["KV moves"] <= 1


def test_drafting(found):
    assert found["outside_graphs"] <= 60
    assert found["draft_phase_beside_model"] <= 60
    assert found["per_level_beside_model"] <= 6
