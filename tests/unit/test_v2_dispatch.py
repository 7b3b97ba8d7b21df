"""Which CUDA graph Model Runner V2 replays for a batch. Upstream's manager is real, but nothing was captured."""

from functools import partial
from unittest.mock import MagicMock

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.v2.model_runner import GraphModelRunner

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # as vLLM chooses them


@pytest.fixture(params=[(16, 256), (16, 8), (7, 64)], ids=str)
def runner(request):
    """A runner whose full graphs hold up to ``nodes`` nodes of each request, a quarter of them, or none."""
    nodes, num_requests = request.param
    config = MagicMock(num_speculative_tokens=nodes)
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 1, nodes), (2, 2, nodes // 4), (3, 3, 0)]
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.compilation_config.cudagraph_capture_sizes = SIZES
    manager.compilation_config.max_cudagraph_capture_size = SIZES[-1]
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.max_num_reqs, manager.decode_query_len, manager.varlen_decode = num_requests, 1 + nodes, False
    manager.lora_capture_cases, manager.ubatch_runner, manager._lora_dispatch_map = [0], None, {}
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    manager.graphs = dict.fromkeys(manager._capture_descs[CUDAGraphMode.FULL])
    manager._graphs_captured = True
    runner = GraphModelRunner.__new__(GraphModelRunner)
    runner.cudagraph_manager, runner.speculator = manager, MagicMock()
    runner.speculator.speculation.stats = GraphStats()
    return runner


def test_every_batch_finds_the_smallest_full_graph_that_holds_it(runner):
    manager = runner.cudagraph_manager
    dispatch = partial(runner._dispatch, manager.dispatch, num_active_loras=0)
    for rows in {graph.uniform_token_count for graph in manager.graphs}:
        sizes = sorted(graph.num_reqs for graph in manager.graphs if graph.uniform_token_count == rows)
        for num_requests in range(1, sizes[-1] + 1):
            graph = dispatch(num_requests, rows * num_requests, rows)
            assert graph in manager.graphs
            assert graph.num_reqs == next(size for size in sizes if size >= num_requests)


def test_other_batches_get_no_full_graph(runner):
    """Those of different numbers of rows per request, those of other numbers, and those that are too large."""
    dispatch = partial(runner._dispatch, runner.cudagraph_manager.dispatch, num_active_loras=0)
    for uniform, num_tokens in (None, 6), (3, 6):
        assert dispatch(2, num_tokens, uniform).cg_mode == CUDAGraphMode.PIECEWISE
    assert dispatch(600, 600, 1).cg_mode == CUDAGraphMode.NONE
    assert runner.speculation.stats.counts == {"cudagraph_hits": 2, "cudagraph_misses": 1}
