"""Bookkeeping of one draft level: which rows the draft model runs, where their keys and values go."""

from typing import NamedTuple

import numpy as np

from vllm_gsd.method.calibration import NATIVE, calibrated
from vllm_gsd.method.compiled import compiled


class DraftSlots(NamedTuple):
    """Draft KV slots of the nodes of a batch of graphs. Slots are counted per request, from 0."""

    used: np.ndarray  # int32 [num_graphs], slots given out so far
    mask: np.ndarray  # int64 [num_graphs, capacity, words], slots of a node and its ancestors


def new_draft_slots(num_graphs: int, capacity: int, max_slots: int) -> DraftSlots:
    """Allocate bookkeeping for ``max_slots`` draft KV slots per request."""
    words = (max_slots + 63) // 64
    return DraftSlots(np.zeros(num_graphs, np.int32), np.zeros((num_graphs, capacity, words), np.int64))


@compiled
def frontier_chances(graphs, frontier, frontier_len, factor, trust):
    """Chances that the target accepts the frontier's nodes, float64 [sum(frontier_len)], graph by graph.

    Args:
        graphs, frontier, frontier_len: as of ``level_rows``.
        factor: of a ``Calibration``; trust: of ``SourceTrust``, float32 [num_graphs, sources].
    """
    chances = np.empty(frontier_len.sum(), np.float64)
    line = 0
    for row in range(len(frontier_len)):
        for place in range(frontier_len[row]):
            node = frontier[row, place]
            chance = calibrated(factor, NATIVE, graphs.depth[row, node], graphs.survival[row, node])
            chances[line] = min(1.0, chance * trust[row, NATIVE])
            line += 1
    return chances


@compiled
def keep_best(frontier, frontier_len, chances, count):
    """Leave only the ``count`` nodes with the best ``chances`` in the frontier; it is updated, the order stays."""
    if count >= len(chances):
        return
    kept = np.zeros(len(chances), np.bool_)
    kept[np.argsort(-chances, kind="mergesort")[:count]] = True
    line = 0
    for row in range(len(frontier_len)):
        left = 0
        for place in range(frontier_len[row]):
            if kept[line]:
                frontier[row, left] = frontier[row, place]
                left += 1
            line += 1
        frontier_len[row] = left


@compiled
def parent_lines(graphs, frontier, frontier_len, lines):
    """Where the frontier's parents were in the forwards that ran them, int64 [sum(frontier_len)].

    Args:
        graphs, frontier, frontier_len: as of ``level_rows``.
        lines: int64 [num_graphs, capacity], each node's row in the forward that ran it; those of the frontier are set.
    """
    parents = np.empty(frontier_len.sum(), np.int64)
    line = 0
    for row in range(len(frontier_len)):
        for place in range(frontier_len[row]):
            node = frontier[row, place]
            parents[line] = lines[row, graphs.parent[row, node]]
            lines[row, node] = line
            line += 1
    return parents


@compiled
def level_rows(graphs, slots, frontier, frontier_len, token, depth, slot, mask):
    """Give every frontier node a slot and write its row of the draft model's next forward.

    Args:
        graphs, slots: GraphBatch and DraftSlots; ``slots`` is updated.
        frontier, frontier_len: int32 [num_graphs, width], [num_graphs]; nodes to run.
        token, depth, slot: outputs, int64 / int32 / int32 [sum(frontier_len)].
        mask: output, int64 [sum(frontier_len), words]: slots each row attends (its own included).
    """
    line = 0
    for row in range(len(frontier_len)):
        for place in range(frontier_len[row]):
            node = frontier[row, place]
            parent = graphs.parent[row, node]
            own = slots.used[row]
            slots.used[row] += 1
            # The root's key and value lie in the committed part, so depth-1 nodes start from no slot.
            if parent == 0:
                slots.mask[row, node, :] = 0
            else:
                slots.mask[row, node, :] = slots.mask[row, parent]
            slots.mask[row, node, own // 64] |= np.int64(np.uint64(1) << np.uint64(own % 64))
            token[line] = graphs.token[row, node]
            depth[line] = graphs.depth[row, node]
            slot[line] = own
            mask[line] = slots.mask[row, node]
            line += 1
