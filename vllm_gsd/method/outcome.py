"""What became of a step's graphs: what was accepted of them, and what has to move."""

import numpy as np

from vllm_gsd.method.calibration import NUM_SOURCES
from vllm_gsd.method.compiled import compiled

# Places of ``tally``'s counts; accepted nodes of source s are at ACCEPTED + s, sources as of ``calibration``.
VERIFIED, MOVED, GRAMMAR, ACCEPTED = 0, 1, 2, 3


@compiled
def kv_moves(parents, starts, places, first_rows):
    """Rows of the batch whose keys and values have to move, for what was accepted to lie as plain decoding lays it.

    Args:
        parents, starts: int32 [num_rows], [num_trees + 1], rows of all trees one after the other (``core.verify``).
        places: int32 [num_trees], where each walk has ended.
        first_rows: int64 [num_trees], the batch's row of each root.

    Returns:
        rows that move and rows that they move to, int64 [n] each.
    """
    sources, destinations = np.empty(len(parents), np.int64), np.empty(len(parents), np.int64)
    count = 0
    for tree in range(len(places)):
        node, depth = places[tree], 0
        while node > 0:
            depth += 1
            node = parents[starts[tree] + node]
        node = places[tree]
        while node > 0:
            if node != depth:
                sources[count] = first_rows[tree] + node
                destinations[count] = first_rows[tree] + depth
                count += 1
            node = parents[starts[tree] + node]
            depth -= 1
    return sources[:count], destinations[:count]


@compiled
def tally(parents, starts, places, counted, depth, source, survival):
    """Count what was accepted, and pick out the nodes that sources are to learn from.

    Args:
        parents, starts, places: as for ``kv_moves``.
        counted: bool [num_trees], trees to look at.
        depth, source, survival: int32, int8, float32 [num_rows] of a ``VerifyStep``.

    Returns:
        int64 [3 + sources] counts (see VERIFIED and the rest); int64 [num_trees] twice: accepted nodes of each tree,
        and how deep it reaches; and of the n nodes verified that a source has proposed: which of the trees counted
        int64, source int8, depth int32, survival float32 and whether they were accepted, bool, [n] each.
    """
    counts = np.zeros(ACCEPTED + NUM_SOURCES, np.int64)
    length, deepest = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    accepted = np.zeros(len(parents), np.bool_)
    line_of, tree_of = np.empty(len(parents), np.int64), np.empty(len(parents), np.int64)
    own, ordinal = 0, -1
    for tree in range(len(places)):
        if not counted[tree]:
            continue
        ordinal += 1
        first = starts[tree]
        node = places[tree]
        while node > 0:
            accepted[first + node] = True
            length[tree] += 1
            counts[MOVED] += depth[first + node] != node
            node = parents[first + node]
        for line in range(first + 1, starts[tree + 1]):
            if parents[line] < 0:
                continue  # a row without a node
            counts[VERIFIED] += 1
            deepest[tree] = max(deepest[tree], depth[line])
            if source[line] < 0:
                counts[GRAMMAR] += accepted[line]
                continue
            counts[ACCEPTED + source[line]] += accepted[line]
            line_of[own], tree_of[own] = line, ordinal
            own += 1
    lines = line_of[:own]
    return counts, length, deepest, (tree_of[:own], source[lines], depth[lines], survival[lines], accepted[lines])
