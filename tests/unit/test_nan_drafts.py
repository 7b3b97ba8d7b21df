"""A draft whose logits hold a NaN proposes nothing there, on the host and on devices; the rest goes on as before."""

import numpy as np
import pytest
import torch

from vllm_gsd.method.graph import new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier
from vllm_gsd.ops.growth import api as graph_growth
from vllm_gsd.ops.growth import state as graph_state
from vllm_gsd.ops.topk.api import _topk_softmax_selecting, topk_softmax
from vllm_gsd.planner.planner import Planner

K, NODES, CAPACITY = 4, 8, 64


def drafted(select, logits):
    """Graphs of two texts after one level, on the host and on the device, and the candidates."""
    probs, tokens = select(logits, K)
    texts = np.array([[3, 4, 5], [6, 7, 8]], np.int64)
    graphs = new_graphs(2, CAPACITY)
    for row, text in enumerate(texts):
        reset(graphs, row, text)
    frontier, ones = np.zeros((2, NODES), np.int32), np.ones(2, np.int32)
    budgets = np.full(2, NODES, np.int32)
    merge_ngram = np.full(2, 2, np.int32)
    add_candidates(graphs, frontier, ones, tokens.numpy(), probs.numpy(), budgets, 0.0, merge_ngram)
    next_frontier(graphs, np.zeros(2, np.int32), budgets, budgets, np.float32(0), frontier, ones)
    device = graph_state.start_graphs(torch.from_numpy(texts), torch.full((2,), 3), CAPACITY, True)
    shape, lone = (2, 1, K), torch.zeros(2, 1, dtype=torch.int64)
    nodes, merge = torch.full((2,), NODES), torch.full((2,), 2)
    once = torch.ones(2, dtype=torch.int64)
    graph_growth.add_candidates(device, lone, once, tokens.view(shape), probs.view(shape), nodes, 0.0, merge, 2)
    return graphs, device, probs.numpy()


@pytest.mark.parametrize("select", [topk_softmax, _topk_softmax_selecting])
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("where", [0, 17, slice(None)], ids=str)
def test_rows_with_nan_add_no_nodes(select, bad, where):
    torch.manual_seed(0)
    logits = torch.randn(2, 50)
    healthy, _, _ = drafted(select, logits)
    logits[0, where] = bad
    graphs, device, probs = drafted(select, logits)
    assert graphs.size.tolist() == device.size.tolist() == [1, healthy.size[1]]
    assert np.array_equal(graphs.survival[1], healthy.survival[1])
    assert np.isfinite(device.survival[:, :CAPACITY].numpy()).all() and healthy.size[1] > 1
    planner = Planner(K, 6, NODES)
    planner.drafted(probs)
    assert np.isfinite(planner.children).all()
