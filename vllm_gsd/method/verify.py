"""The verification walk: the path of a flattened tree that the target model's own samples follow.

Sample a token x at the root. If a child carries x, step into it and repeat; otherwise x is the bonus token. Each sample
is drawn exactly as in plain decoding, and the candidates are fixed before, so the output has the target's distribution.
tests/property/test_lossless.py shows this by exact enumeration.

The rows of all trees of a batch are in sequence, and each tree's first row is its root. Tree t has the rows
``starts[t]:starts[t + 1]``. ``parents`` are places within the row's own tree, NONE for roots; parents come before their
children.
"""

import numpy as np

from vllm_gsd.method.constants import NONE


def child_carrying(tokens: np.ndarray, parents: np.ndarray, place: int, token: int) -> int:
    """The first child of ``place`` that carries ``token``, or NONE; arrays are int [rows of the tree]."""
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
    """Move each active walk into the child that carries its sampled token; end the walks without such a child.

    Args:
        tokens, parents: int64 and int32 [num_rows], of all trees.
        starts: int32 [num_trees + 1].
        places: int32 [num_trees], current place of each walk; updated.
        sampled: int64 [num_trees], token sampled there.
        active: bool [num_trees], walks that have not ended; updated.
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
    """Walk every tree to its end when all rows are already sampled: repeat ``step_into`` until no walk is active.

    Args:
        tokens, parents, starts: as for ``step_into``.
        places: output, int32 [num_trees], place at which each walk ends.
        sampled: int64 [num_rows], token sampled at each row.
        path: output, int32 [num_trees, max_depth + 1], sampled tokens of each walk; unchanged after its end.

    Returns:
        number of columns of ``path`` in use, the length of the longest walk.
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
    """Whether the rows ``start:end`` of a tree, root first, form one path, so that causal attention serves them."""
    return bool((parents[start:end] == np.arange(NONE, end - start + NONE)).all())
