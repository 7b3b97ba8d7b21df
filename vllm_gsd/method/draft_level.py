"""One draft level: the rows that the draft model runs, and the KV slots of their keys and values."""

from typing import NamedTuple

import numpy as np

from vllm_gsd.method.cells import calibrated
from vllm_gsd.method.constants import NATIVE
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.method.growth import each_node


class DraftSlots(NamedTuple):
    """Draft KV slots of the nodes of a batch of graphs, counted per request from 0."""

    used: np.ndarray  # int32 [num_graphs], slots allocated so far
    mask: np.ndarray  # int64 [num_graphs, capacity, words], slots of a node and its ancestors


def new_draft_slots(num_graphs: int, capacity: int, max_slots: int) -> DraftSlots:
    """Allocate bookkeeping for ``max_slots`` draft KV slots per request."""
    words = (max_slots + 63) // 64
    return DraftSlots(np.zeros(num_graphs, np.int32), np.zeros((num_graphs, capacity, words), np.int64))


def frontier_chances(
    graphs: GraphBatch, frontier: np.ndarray, frontier_len: np.ndarray, factor: np.ndarray, trust: np.ndarray
) -> np.ndarray:
    """Probabilities that the target accepts the frontier's nodes, float64 [sum(frontier_len)], graph by graph.

    Args:
        graphs, frontier, frontier_len: as for ``level_rows``.
        factor: the factors of a ``Calibration``; trust: the result of ``SourceTrust.of``, float32 [num_graphs,
            sources].
    """
    chances = [
        trust[row, NATIVE] * calibrated(factor, NATIVE, graphs.depth[row, node], graphs.survival[row, node])
        for row, node in each_node(frontier, frontier_len)
    ]
    return np.minimum(1.0, np.array(chances, np.float64))


def keep_best(frontier: np.ndarray, frontier_len: np.ndarray, chances: np.ndarray, count: int) -> None:
    """Keep only the ``count`` nodes with the highest ``chances`` in the frontier, in their order; updates it."""
    kept = np.sort(np.argsort(-chances, kind="stable")[:count])
    nodes = each_node(frontier, frontier_len)
    frontier_len[:] = 0
    for row, node in (nodes[line] for line in kept):
        frontier[row, frontier_len[row]] = node
        frontier_len[row] += 1


def parent_lines(graphs: GraphBatch, frontier: np.ndarray, frontier_len: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """The rows of the frontier's parents in the forwards that ran them, int64 [sum(frontier_len)].

    Args:
        graphs, frontier, frontier_len: as for ``level_rows``.
        lines: int64 [num_graphs, capacity], each node's row in the forward that ran it; updated for the frontier.
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
        frontier, frontier_len: int32 [num_graphs, width] and [num_graphs], nodes to run and their number.
        token, depth, slot: outputs, int64, int32 and int32 [sum(frontier_len)].
        mask: output, int64 [sum(frontier_len), words], slots that each row attends, including its own.
    """
    for line, (row, node) in enumerate(each_node(frontier, frontier_len)):
        parent, own = graphs.parent[row, node], slots.used[row]
        slots.used[row] += 1
        seen = slots.mask[row, node].view(np.uint64)
        # The root's key and value are in the committed text, so its children inherit no slot.
        seen[:] = 0 if parent == 0 else slots.mask[row, parent].view(np.uint64)
        seen[own // 64] |= np.uint64(1) << np.uint64(own % 64)
        token[line] = graphs.token[row, node]
        depth[line] = graphs.depth[row, node]
        slot[line] = own
        mask[line] = slots.mask[row, node]
