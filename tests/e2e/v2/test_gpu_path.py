"""What engines on GPUs run, under the interpreter: Triton's tree attention and KV moves, CUDA graphs' fixed buffers."""

import pytest
from engine_process import run
from start_probes import start_of

GSD = {"num_speculative_tokens": 8, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def asked(random_prompts):
    """Prompts of four requests, and what they want: not all end together, so that batches shrink."""
    prompts = random_prompts(4, 5, 20, seed=4)
    return prompts, [GREEDY, SEEDED, {**GREEDY, "max_tokens": 5}, SEEDED]


@pytest.fixture(scope="module")
def expected(start_v2, asked):
    return run(start_v2(None), *asked)


def test_a_start_as_on_gpus(start_v2):
    """vLLM profiles the largest step, and warms up with requests of its own, of which nothing is left."""
    seen, left = start_v2(GSD, gpu_attention=True).call(start_of)
    # Four requests, each with a root and eight nodes: all are verified, and drafted for after as many were accepted.
    assert seen["rows_sampled"] == seen["rows_drafted"] == 4 * 9
    assert seen["verified"] >= 7 and seen["_grow_on_device"] >= 7
    assert not any(left.values()), left


def test_kernels_of_gpus(start_v2, asked, expected):
    engine = start_v2(GSD, gpu_attention=True)
    assert run(engine, *asked) == expected
    metrics = engine.metrics()
    assert metrics["gsd_kv_rows_moved"] > 0
    assert metrics.get("gsd_cudagraph_hits", 0) == metrics.get("gsd_cudagraph_misses", 0) == 0
    # Blocks of the prompt before are taken again, with the draft's KV in them.
    again = [asked[0][0] + expected[0] + expected[1], asked[0][0] + expected[0] + expected[3]]
    assert run(engine, again, GREEDY) == run(start_v2(None), again, GREEDY)


def test_cuda_graphs_and_async_scheduling(start_v2, asked, expected):
    engine = start_v2(GSD, gpu_attention=True, cuda_graphs=True, async_scheduling=True)
    assert run(engine, *asked) == expected
    metrics = engine.metrics()
    # Of the target for batches of 1, 2 and 4 requests with 9 rows each; of the draft phase for 1, 2, 3 and 4 requests.
    assert metrics["gsd_cudagraphs_captured"] == 3 + 4
    assert metrics["gsd_cudagraph_hits"] > metrics["gsd_target_steps"] / 4
