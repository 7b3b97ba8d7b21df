"""Bookkeeping of one draft level: which rows the draft model runs, where their keys and values go."""

from typing import NamedTuple

import numpy as np

from vllm_gsd.method.cells import calibrated
from vllm_gsd.method.constants import NATIVE
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.method.growth import each_node


class DraftSlots(NamedTuple):
    """Draft KV slots of the nodes of a batch of graphs. Slots are counted per request, from 0."""

    used: np.ndarray  # int32 [num_graphs], slots given out so far
    mask: np.ndarray  # int64 [num_graphs, capacity, words], slots of a node and its ancestors


def new_draft_slots(num_graphs: int, capacity: int, max_slots: int) -> DraftSlots:
    """Allocate bookkeeping for ``max_slots`` draft KV slots per request."""
    words = (max_slots + 63) // 64
    return DraftSlots(np.zeros(num_graphs, np.int32), np.zeros((num_graphs, capacity, words), np.int64))


def frontier_chances(
    graphs: GraphBatch, frontier: np.ndarray, frontier_len: np.ndarray, factor: np.ndarray, trust: np.ndarray
) -> np.ndarray:
    """Chances that the target accepts the frontier's nodes, float64 [sum(frontier_len)], graph by graph.

    Args:
        graphs, frontier, frontier_len: as of ``level_rows``.
        factor: of a ``Calibration``; trust: of ``SourceTrust``, float32 [num_graphs, sources].
    """
    chances = [
        trust[row, NATIVE] * calibrated(factor, NATIVE, graphs.depth[row, node], graphs.survival[row, node])
        for row, node in each_node(frontier, frontier_len)
    ]
    return np.minimum(1.0, np.array(chances, np.float64))


def keep_best(frontier: np.ndarray, frontier_len: np.ndarray, chances: np.ndarray, count: int) -> None:
    """Leave only the ``count`` nodes with the best ``chances`` in the frontier; it is updated, the order stays."""
    kept = np.sort(np.argsort(-chances, kind="stable")[:count])
    nodes = each_node(frontier, frontier_len)
    frontier_len[:] = 0
    for row, node in (nodes[line] for line in kept):
        frontier[row, frontier_len[row]] = node
        frontier_len[row] += 1


def parent_lines(graphs: GraphBatch, frontier: np.ndarray, frontier_len: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Where the frontier's parents were in the forwards that ran them, int64 [sum(frontier_len)].

    Args:
        graphs, frontier, frontier_len: as of ``level_rows``.
        lines: int64 [num_graphs, capacity], each node's row in the forward that ran it; those of the frontier are set.
    """
    nodes = each_node(frontier, frontier_len)
    parents = np.array([lines[row, graphs.parent[row, node]] for row, node in nodes], np.int64)
    for line, (row, node) in enumerate(nodes):
        lines[row, node] = line
    return parents


def level_rows(
    graphs: GraphBatch,
    slots: DraftSlots,
    frontier: np.ndarray,
    frontier_len: np.ndarray,
    token: np.ndarray,
    depth: np.ndarray,
    slot: np.ndarray,
    mask: np.ndarray,
) -> None:
    """Give every frontier node a slot and write its row of the draft model's next forward.

    Args:
        graphs, slots: GraphBatch and DraftSlots; ``slots`` is updated.
        frontier, frontier_len: int32 [num_graphs, width], [num_graphs]; nodes to run.
        token, depth, slot: outputs, int64 / int32 / int32 [sum(frontier_len)].
        mask: output, int64 [sum(frontier_len), words]: slots each row attends (its own included).
    """
    for line, (row, node) in enumerate(each_node(frontier, frontier_len)):
        parent, own = graphs.parent[row, node], slots.used[row]
        slots.used[row] += 1
        seen = slots.mask[row, node].view(np.uint64)
        # The root's key and value lie in the committed part, so depth-1 nodes start from no slot.
        seen[:] = 0 if parent == 0 else slots.mask[row, parent].view(np.uint64)
        seen[own // 64] |= np.uint64(1) << np.uint64(own % 64)
        token[line] = graphs.token[row, node]
        depth[line] = graphs.depth[row, node]
        slot[line] = own
        mask[line] = slots.mask[row, node]
