"""The outcome of a step: the accepted nodes, and the KV rows that must move.

``method.verify`` describes the layout of the trees' rows.
"""

import numpy as np

from vllm_gsd.method.constants import ACCEPTED, GRAMMAR, MOVED, NUM_SOURCES, VERIFIED


def accepted_path(parents: np.ndarray, place: int) -> list[int]:
    """Places of the walk that ended at ``place``, without the root."""
    path: list[int] = []
    while place > 0:
        path.append(int(place))
        place = parents[place]
    return path[::-1]


def kv_moves(
    parents: np.ndarray, starts: np.ndarray, places: np.ndarray, first_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the batch whose keys and values must move to where plain decoding would have put them.

    Args:
        parents, starts: int32 [num_rows] and [num_trees + 1], the rows of all trees.
        places: int32 [num_trees], place at which each walk ended.
        first_rows: int64 [num_trees], row of each root in the batch.

    Returns:
        sources and destinations of the moves, int64 [n] each.
    """
    moves: list[tuple[int, int]] = []
    for tree, root in enumerate(first_rows):
        path = accepted_path(parents[starts[tree] : starts[tree + 1]], places[tree])
        moves += [(root + place, root + depth) for depth, place in enumerate(path, 1) if place != depth][::-1]
    sources, destinations = np.array(moves, np.int64).reshape(-1, 2).T.copy()
    return sources, destinations


def tally(
    parents: np.ndarray,
    starts: np.ndarray,
    places: np.ndarray,
    counted: np.ndarray,
    depth: np.ndarray,
    source: np.ndarray,
    survival: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Count the accepted nodes, and select the nodes from which calibration learns.

    Args:
        parents, starts, places: as for ``kv_moves``.
        counted: bool [num_trees], trees to include.
        depth, source, survival: int32, int8 and float32 [num_rows], of a ``VerifyStep``.

    Returns:
        int64 [3 + sources] counts, indexed by VERIFIED, MOVED, GRAMMAR and ACCEPTED; int64 [num_trees] accepted nodes
        of each tree; int64 [num_trees] depth of each tree; and for the n verified nodes that have a source, [n] each:
        index among the counted trees int64, source int8, depth int32, survival float32, and accepted bool.
    """
    counts = np.zeros(ACCEPTED + NUM_SOURCES, np.int64)
    length, deepest = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    accepted = np.zeros(len(parents), np.bool_)
    ordinal = np.full(len(parents), -1)  # index of a node's tree among the counted ones
    for number, tree in enumerate(np.flatnonzero(counted)):
        first, end = starts[tree : tree + 2]
        path = accepted_path(parents[first:end], places[tree])
        accepted[first + np.array(path, np.int64)] = True
        length[tree] = len(path)
        counts[MOVED] += sum(depth[first + place] != place for place in path)
        nodes = first + np.flatnonzero(parents[first:end] >= 0)  # neither the root nor a row without a node
        ordinal[nodes] = number
        deepest[tree] = depth[nodes].max(initial=0)
    (verified,) = np.nonzero(ordinal >= 0)
    own = verified[source[verified] >= 0]
    counts[VERIFIED] = len(verified)
    counts[GRAMMAR] = accepted[verified].sum() - accepted[own].sum()
    counts[ACCEPTED:] = np.bincount(source[own], accepted[own], NUM_SOURCES)
    return counts, length, deepest, (ordinal[own], source[own], depth[own], survival[own], accepted[own])
