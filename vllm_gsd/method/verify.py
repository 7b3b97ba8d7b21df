"""The verification walk: which path of a flattened tree the target model's own samples follow.

Sample x at the root; if a child carries x, step into it and go on; else x is the bonus token. Each
sample is drawn exactly as plain decoding draws it at that place, and the candidates were fixed before,
so the output has the target's distribution (exact enumeration: tests/property/test_lossless.py).

Trees of a batch are rows one after the other, the first row of each its root. Tree t has the rows
``starts[t]:starts[t + 1]``; ``parents`` are places within the own tree, NONE for roots, and come before their children.
"""

import numpy as np

from vllm_gsd.method.constants import NONE


def child_carrying(tokens: np.ndarray, parents: np.ndarray, place: int, token: int) -> int:
    """The first child of ``place`` that carries ``token``, or NONE.

    Args:
        tokens, parents: int [rows], of one tree.
    """
    children = np.flatnonzero((parents == place) & (tokens == token))
    return int(children[0]) if len(children) else NONE


def step_into(
    tokens: np.ndarray,
    parents: np.ndarray,
    starts: np.ndarray,
    places: np.ndarray,
    sampled: np.ndarray,
    active: np.ndarray,
) -> None:
    """Move each active walk into the child that carries its sampled token; end the walks that have none.

    Args:
        tokens, parents: int64 / int32 [num_rows], of all trees.
        starts: int32 [num_trees + 1].
        places: int32 [num_trees], where each walk stands; updated.
        sampled: int64 [num_trees], token sampled there.
        active: bool [num_trees], which walks go on; updated.
    """
    for tree in np.flatnonzero(active):
        rows = slice(starts[tree], starts[tree + 1])
        child = child_carrying(tokens[rows], parents[rows], places[tree], sampled[tree])
        active[tree] = child != NONE
        if active[tree]:
            places[tree] = child


def follow(
    tokens: np.ndarray,
    parents: np.ndarray,
    starts: np.ndarray,
    sampled: np.ndarray,
    places: np.ndarray,
    path: np.ndarray,
) -> int:
    """Walk every tree to its end where all rows are sampled already: ``step_into`` until no walk goes on.

    Args:
        tokens, parents, starts: as for ``step_into``.
        places: output, int32 [num_trees], where each walk ends.
        sampled: int64 [num_rows], token sampled at each row.
        path: int32 [num_trees, deepest + 1], filled with the sampled tokens of each walk, behind its end left alone.

    Returns:
        columns of ``path`` in use: the longest walk's tokens.
    """
    columns = 0
    for tree in range(len(places)):
        rows = slice(starts[tree], starts[tree + 1])
        length, place = 0, 0
        while place != NONE:
            places[tree] = place
            token = path[tree, length] = sampled[rows][place]
            length += 1
            place = child_carrying(tokens[rows], parents[rows], place, token)
        columns = max(columns, length)
    return columns


def is_chain(parents: np.ndarray, start: int, end: int) -> bool:
    """Whether the rows ``start:end`` of a tree (root first) are one path: plain causal attention serves it."""
    return bool((parents[start:end] == np.arange(NONE, end - start + NONE)).all())
