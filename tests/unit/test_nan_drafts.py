"""A row of draft logits with a NaN adds no nodes, and other rows are not affected.

``tests/kernels/drafting`` tests the same on the device.
"""

import numpy as np
import pytest
import torch

from vllm_gsd.method.graph import new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier
from vllm_gsd.ops.topk.api import topk_softmax
from vllm_gsd.planner.planner import Planner

K, NODES, CAPACITY = 4, 8, 64


def drafted(logits):
    """Graphs of two texts after one drafted level, and the candidates' probabilities."""
    probs, tokens = topk_softmax(logits, K)
    texts = np.array([[3, 4, 5], [6, 7, 8]], np.int64)
    graphs = new_graphs(2, CAPACITY)
    for row, text in enumerate(texts):
        reset(graphs, row, text)
    frontier, ones = np.zeros((2, NODES), np.int32), np.ones(2, np.int32)
    budgets = np.full(2, NODES, np.int32)
    merge_ngram = np.full(2, 2, np.int32)
    add_candidates(graphs, frontier, ones, tokens.numpy(), probs.numpy(), budgets, 0.0, merge_ngram)
    next_frontier(graphs, np.zeros(2, np.int32), budgets, budgets, np.float32(0), frontier, ones)
    return graphs, probs.numpy()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("where", [0, 17, slice(None)], ids=str)
def test_rows_with_nan_add_no_nodes(bad, where):
    torch.manual_seed(0)
    logits = torch.randn(2, 50)
    healthy, _ = drafted(logits)
    logits[0, where] = bad
    graphs, probs = drafted(logits)
    assert graphs.size.tolist() == [1, healthy.size[1]]
    assert np.array_equal(graphs.survival[1], healthy.survival[1])
    assert np.isfinite(graphs.survival[1]).all() and healthy.size[1] > 1
    planner = Planner(K, 6, NODES)
    planner.drafted(probs)
    assert np.isfinite(planner.children).all()
