"""The choice of nodes that a draft level expands, with two small graphs; the second has nodes of two levels."""

import numpy as np
import pytest

from vllm_gsd.method.constants import NATIVE, NUM_SOURCES, ORIGIN_DRAFT
from vllm_gsd.method.draft_level import frontier_chances, keep_best, parent_lines
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.planner.calibration import Calibration


@pytest.fixture
def graphs():
    graphs = new_graphs(2, 8)
    for row in range(2):
        reset(graphs, row, np.array([1], np.int64))
        for token, prob in ((5, 0.5), (6, 0.4)):
            add_child(graphs, row, 0, token, np.float32(prob), ORIGIN_DRAFT)
    add_child(graphs, 1, 1, 7, np.float32(0.8), ORIGIN_DRAFT)  # node 3, a child of node 1, also with 0.4
    return graphs


FRONTIER = np.array([[1, 2, 0], [1, 2, 3]], np.int32)
LENGTH = np.array([2, 3], np.int32)


def test_chances_are_calibrated_and_trusted(graphs):
    calibration = Calibration()
    calibration.factor[NATIVE, 1] = 0.5  # at depth 2
    trust = np.ones((2, NUM_SOURCES), np.float32)
    trust[0, NATIVE] = 3
    chances = frontier_chances(graphs, FRONTIER, LENGTH, calibration.factor, trust)
    np.testing.assert_allclose(chances, [1, 1, 0.5, 0.4, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(9, [[1, 2], [1, 2, 3]]), (5, [[1, 2], [1, 2, 3]]), (3, [[2], [1, 3]]), (2, [[2], [1]]), (1, [[2], []])],
)
def test_the_best_stay_in_their_order(count, expected):
    """Of equally probable nodes, the first ones stay."""
    frontier, length = FRONTIER.copy(), LENGTH.copy()
    keep_best(frontier, length, np.array([0.1, 0.9, 0.5, 0.2, 0.5]), count)
    assert [frontier[row, : length[row]].tolist() for row in range(2)] == expected


def test_nodes_remember_where_they_were_run(graphs):
    lines = np.array([[3, 0, 0, 0], [1, 0, 0, 0]])
    above = np.array([[1, 2], [2, 1]], np.int32)
    assert parent_lines(graphs, above, np.array([2, 2], np.int32), lines).tolist() == [3, 3, 1, 1]
    assert parent_lines(graphs, np.array([[0], [3]], np.int32), np.array([0, 1], np.int32), lines).tolist() == [3]
