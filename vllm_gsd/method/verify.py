"""The verification walk: which path of a flattened tree the target model's own samples follow.

Sample x at the root; if a child carries x, step into it and go on; else x is the bonus token. Each
sample is drawn exactly as plain decoding draws it at that place, and the candidates were fixed before,
so the output has the target's distribution (exact enumeration: tests/property/test_lossless.py).
"""

from vllm_gsd.method.compiled import compiled
from vllm_gsd.method.graph import NONE


@compiled
def step_into(tokens, parents, starts, places, sampled, active):
    """Move each active walk into the child that carries its sampled token; end the walks that have none.

    Args:
        tokens, parents: int64 / int32 [num_rows], rows of all trees one after the other; the first row of a
            tree is its root, ``parents`` are places within the own tree.
        starts: int32 [num_trees + 1], rows of tree t are ``starts[t]:starts[t + 1]``.
        places: int32 [num_trees], where each walk stands; updated.
        sampled: int64 [num_trees], token sampled there.
        active: bool [num_trees], which walks go on; updated.
    """
    for tree in range(len(places)):
        if not active[tree]:
            continue
        active[tree] = False
        first = starts[tree]
        # Children come after their parent in the list.
        for line in range(first + places[tree] + 1, starts[tree + 1]):
            if parents[line] == places[tree] and tokens[line] == sampled[tree]:
                places[tree] = line - first
                active[tree] = True
                break


@compiled
def follow(tokens, parents, starts, sampled, places, path):
    """Walk every tree to its end where all rows are sampled already: ``step_into`` until no walk goes on.

    Args:
        tokens, parents, starts, places: as for ``step_into``.
        sampled: int64 [num_rows], token sampled at each row.
        path: int32 [num_trees, deepest + 1], filled with the sampled tokens of each walk, behind its end left alone.

    Returns:
        columns of ``path`` in use: the longest walk's tokens.
    """
    columns = 0
    for tree in range(len(places)):
        first, place, length = starts[tree], 0, 1
        path[tree, 0] = sampled[first]
        for line in range(first + 1, starts[tree + 1]):
            if parents[line] == place and tokens[line] == path[tree, length - 1]:
                place = line - first
                path[tree, length] = sampled[line]
                length += 1
        places[tree] = place
        columns = max(columns, length)
    return columns


@compiled
def is_chain(parents, start, end):
    """Whether the rows ``start:end`` of a tree (root first) are one path: plain causal attention serves it."""
    for line in range(start + 1, end):
        if parents[line] != line - start - 1:
            return False
    return parents[start] == NONE
