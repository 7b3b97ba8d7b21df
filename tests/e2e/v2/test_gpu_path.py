"""The code paths of GPUs in the interpreter: Triton kernels for tree attention and KV moves, and CUDA graphs."""

import json

import pytest
from engine_process import run
from invariance import be_batch_invariant, record_calls, take_calls
from launch_keys import launch_keys, record_launch_keys
from planted import cost_rows, plant_costs
from replays import not_replayed, record_replays, replayed
from request_tables import end_requests, tables
from start_probes import start_of
from step_watch import report, start_again, watch_steps
from v2_engine import OPTIONS

GSD = {"num_speculative_tokens": 8, "max_depth": 2}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5}
# Four requests that need two blocks each share six usable blocks.
SCARCE = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 96}
GRAPHS = {"gpu_attention": True, "cuda_graphs": True, "async_scheduling": True, **SCARCE}


@pytest.fixture(scope="module")
def requests(random_prompts):
    """Prompts and parameters of four requests. They end at different times, so that batches shrink."""
    prompts = random_prompts(4, 5, 20, seed=4)
    return prompts, [GREEDY, SEEDED, {**GREEDY, "max_tokens": 5}, SEEDED]


@pytest.fixture(scope="module")
def expected(start_v2, requests):
    return run(start_v2(None), *requests)


def test_a_start_as_on_gpus(start_v2):
    """vLLM profiles the largest step and warms up with dummy requests, which leave no state behind.

    Sleep mode discards the pool "weights" at level 2, and vLLM restores those of the target only.
    """
    engine = start_v2(GSD, gpu_attention=True, costs=True)
    seen, pools, left = engine.call(start_of)
    assert pools == {name: ["runtime"] for name in ("DraftModel", "DeviceDrafting", "RowBuffers")}
    # Four requests, each with a root and eight nodes: all rows are verified, and the draft may have to read them all.
    assert seen["rows_sampled"] == seen["rows_drafted"] == 4 * 9
    assert seen["rows_kept"] == OPTIONS["max_num_batched_tokens"]
    assert seen["verified"] >= 7 and seen["_grow_on_device"] >= 7
    assert not any(left.values()), left
    costs = engine.call(cost_rows)
    assert costs["rows"] == [1, 2] and min(costs["target"] + costs["draft"][0]) > 0
    assert [len(level) for level in costs["draft"]] == [2] * GSD["max_depth"]


def test_kernels_of_gpus(start_v2, requests, expected):
    engine = start_v2(GSD, gpu_attention=True, costs=True)
    engine.call(plant_costs, None)
    assert run(engine, *requests) == expected
    metrics = engine.metrics()
    assert metrics["gsd_kv_rows_moved"] > 0
    assert metrics.get("gsd_cudagraph_hits", 0) == metrics.get("gsd_cudagraph_misses", 0) == 0
    # Cached blocks of the first prompt are reused, with the draft's KV in them.
    again = [requests[0][0] + expected[0] + expected[1], requests[0][0] + expected[0] + expected[3]]
    assert run(engine, again, GREEDY) == run(start_v2(None), again, GREEDY)


@pytest.mark.parametrize("more", [{}, {"cuda_graphs": True}], ids=["eager", "CUDA graphs"])
def test_batch_invariance(start_v2, requests, expected, more):
    """Each row of a decode is attended by itself, with a graph and opted out. vLLM's kernel attends prompts only."""
    engine = start_v2(GSD, first=(be_batch_invariant,), gpu_attention=True, block_size=32, **more)
    engine.call(record_calls)
    prompts, params = requests
    opted_out = [{**of, "extra_args": {"gsd": False}} for of in params]
    for of in params, opted_out:
        assert run(engine, prompts, of) == expected
        ours, theirs = engine.call(take_calls)
        assert (more or ours) and all(by_row for by_row, _ in ours)
        assert theirs and min(theirs) > 1  # no prompt has one token
    # Of a prompt that is cached but for its last token, too, since how many tokens a step reads depends on the batch.
    for left in 33, 1:
        run(engine, [[*range(33)]], {**opted_out[0], "max_tokens": 1})
        ours, theirs = engine.call(take_calls)
        assert not ours and set(theirs) == {left}


@pytest.fixture(scope="module")
def graphs(start_v2):
    return start_v2(GSD, first=(record_launch_keys,), **GRAPHS)


def test_cuda_graphs_and_async_scheduling(start_v2, graphs, requests, expected):
    """With preemption, cached prompts and aborts, every kernel launched was already compiled at the start."""
    compiled = json.loads(graphs.call(launch_keys))
    graphs.call(record_replays)
    assert run(graphs, *requests) == expected
    metrics = graphs.metrics()
    assert metrics["num_preemptions"] > 0
    # Graphs of the target: 1, 2 and 4 requests with 9 rows each, 1, 2 and 3 requests with 3 rows, 2 and 4 with one row.
    # Graphs of the draft phase: 1, 2, 3 and 4 requests, each with 1 and 2 levels.
    assert metrics["gsd_cudagraphs_captured"] == 3 + 3 + 2 + 4 * 2
    assert metrics["gsd_cudagraph_hits"] > metrics["gsd_target_steps"] / 4
    long = [[token for prompt in requests[0] for token in prompt][:49]]
    texts = run(start_v2(None), long, GREEDY)
    for cached in (0, 32):
        (answer,) = graphs.generate(long, GREEDY)
        assert [answer.tokens] == texts and answer.num_cached_tokens == cached
    graphs.call(end_requests, [(2 * prompt)[:30] for prompt in requests[0]], "preempt and abort")
    assert not any(graphs.call(tables).values())
    graphs.call(plant_costs, 0.8)  # plans cut nodes, and smaller graphs are replayed
    assert run(graphs, *requests) == expected
    graphs.call(plant_costs, None)
    print(graphs.call(not_replayed))
    # Of the graphs with three tokens or more, those with the fewest have three rows per request.
    graphs.call(record_replays)
    opted_out = {**GREEDY, "extra_args": {"gsd": False}}
    assert run(graphs, requests[0][:3], opted_out) == run(start_v2(None), requests[0][:3], GREEDY)
    assert ("target", 4, 1) in graphs.call(replayed)
    planned = graphs.metrics()
    assert planned["gsd_nodes_cut"] > 0
    for kernel, keys in json.loads(graphs.call(launch_keys)).items():
        later = set(keys) - set(compiled.get(kernel, []))
        assert not later, f"{kernel} compiles while requests wait: {later}; compiled before: {compiled.get(kernel)}"


@pytest.fixture(scope="module")
def watched(graphs, random_prompts):
    """A report on decode steps in which unstaged copies, reads from the device and synchronizations raise.

    For the first request, all nodes are verified. For the second, a plan leaves out nodes and levels.
    """
    graphs.call(watch_steps, True)
    for row_ms in None, 0.8:
        graphs.call(plant_costs, row_ms)
        run(graphs, random_prompts(1, 5, 20, seed=4), {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    graphs.call(plant_costs, None)
    return graphs.call(report)


def test_launches_of_verification(watched):
    """Launches outside the draft phase are limited: inputs, slots, layout, walk, KV moves and late copies."""
    assert watched["decode_steps"] >= 2
    assert watched["outside_graphs_beside_draft_phase"] <= 45
    assert watched["by_phase"]["lay-out"] <= 2 and watched["by_phase"]["walk"] <= 8
    assert watched["by_phase"]["KV moves"] <= 1


def test_launches_of_drafting(watched):
    assert watched["outside_graphs"] <= 60
    assert watched["draft_phase_beside_model"] <= 60
    assert watched["per_level_beside_model"] <= 6


def test_launches_of_requests_that_opt_out(graphs, watched, random_prompts):
    """Steps of requests that opt out are counted, but launch nothing for verification or drafting."""
    graphs.call(start_again)
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "extra_args": {"gsd": False}}
    before = graphs.metrics()["gsd_target_steps"]
    run(graphs, random_prompts(2, 5, 20, seed=4), params)
    assert graphs.metrics()["gsd_target_steps"] == before + 16
    counts = graphs.call(report)
    assert counts["decode_steps"] >= 7
    assert not counts["by_phase"].keys() & {"lay-out", "walk", "KV moves", "late copies", "draft phase"}, counts
    assert counts["outside_graphs"] <= 30
