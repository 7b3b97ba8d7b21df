"""Flattening: unroll a token graph into the tree of at most N nodes that the target model verifies.

A node with two paths appears twice in the tree: its key and value depend on all tokens before it, so sharing them would
not be lossless. Nodes are laid out best first by calibrated survival. Thus parents come before children, and every
prefix of the list is a valid tree, so the scheduler may cut the list.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from vllm_gsd.method.cells import calibrated
from vllm_gsd.method.constants import (
    AGREED,
    MERGED,
    NATIVE,
    NGRAM,
    NONE,
    NUM_BINS,
    NUM_DEPTHS,
    NUM_SOURCES,
    ORIGIN_AGREED,
    ORIGIN_NGRAM,
    ORIGIN_SHARED,
    SHARED,
)
from vllm_gsd.method.graph import GraphBatch, beyond, children


class FlatTrees(NamedTuple):
    """Flattened graphs of a batch. As in the graphs, place 0 is the root; the nodes follow, best first.

    Shapes: ``[num_graphs, 1 + max_nodes]``; ``size`` is int32 [num_graphs].
    """

    token: np.ndarray  # int64
    parent: np.ndarray  # int32, place of the parent, NONE for the root
    depth: np.ndarray  # int32, root is 0
    node: np.ndarray  # int32, the graph's node
    origin: np.ndarray  # int8, ORIGIN_* of the node
    via_merge: np.ndarray  # bool, whether the path to this place uses a merged edge
    survival: np.ndarray  # float32, product of conditional probabilities along the path
    value: np.ndarray  # float32, calibrated survival, never above the parent's
    size: np.ndarray  # nodes without the root, so the last one has this place


class _Place(NamedTuple):
    """A path of the graph that may be laid out next. Places compare by their fields in order."""

    minus_value: np.float32  # negative, so that the best place is the smallest
    discovered: int  # breaks ties
    node: int  # where the path ends
    parent: int  # place of the parent
    depth: int
    crossed: bool  # whether the path crosses a merged edge before its last node
    survival: np.float32


# The sources of nodes that are copied from texts, by their origin.
SOURCE_OF_COPIES = {ORIGIN_NGRAM: NGRAM, ORIGIN_SHARED: SHARED, ORIGIN_AGREED: AGREED}


def best_first(
    graphs: GraphBatch, row: int, num_nodes: int, max_depth: int, factor: np.ndarray, trust: np.ndarray
) -> Iterator[_Place]:
    """Yield the places of one graph's flattened tree, the root first; arguments as for ``flatten``, for that graph."""
    order = count(1)
    waiting = [_Place(np.float32(-1.0), 0, 0, NONE, 0, False, np.float32(1.0))]

    def discover(above: _Place, place: int) -> None:
        """Add the children of ``above``, which is laid out at ``place``, to the waiting places."""
        crossed = above.crossed or graphs.merged[row, above.node] != NONE
        for child in children(graphs, row, beyond(graphs, row, above.node)):
            survival = above.survival * graphs.prob[row, child]
            drafted = MERGED if crossed or graphs.merged[row, child] != NONE else NATIVE
            source = SOURCE_OF_COPIES.get(graphs.origin[row, child], drafted)
            own = trust[source] * calibrated(factor, source, above.depth + 1, survival)
            value = min(-above.minus_value, own)
            heapq.heappush(waiting, _Place(-value, next(order), child, place, above.depth + 1, crossed, survival))

    for place in range(1 + num_nodes):
        if not waiting:
            return
        best = heapq.heappop(waiting)
        yield best
        if best.depth < max_depth:
            discover(best, place)


def flatten(
    graphs: GraphBatch,
    num_nodes: np.ndarray,
    max_depth: np.ndarray,
    factor: np.ndarray | None = None,
    trust: np.ndarray | None = None,
) -> FlatTrees:
    """Unroll every graph of the batch, best first.

    Args:
        num_nodes: int32 [num_graphs], maximum number of nodes of each tree.
        max_depth: int32 [num_graphs], maximum depth, from max_tokens and max_model_len.
        factor: factors of a ``Calibration``, float32 [sources, depths, bins]; None for no calibration.
        trust: result of ``SourceTrust.of``, float32 [num_graphs, sources]; None for equal trust in all sources.
    """
    shape = (len(num_nodes), 1 + max(num_nodes.tolist(), default=0))
    if factor is None:
        factor = np.ones((NUM_SOURCES, NUM_DEPTHS, NUM_BINS), np.float32)
    if trust is None:
        trust = np.ones((len(num_nodes), NUM_SOURCES), np.float32)
    trees = FlatTrees(
        token=np.zeros(shape, np.int64),
        parent=np.full(shape, NONE, np.int32),
        depth=np.zeros(shape, np.int32),
        node=np.zeros(shape, np.int32),
        origin=np.zeros(shape, np.int8),
        via_merge=np.zeros(shape, np.bool_),
        survival=np.zeros(shape, np.float32),
        value=np.zeros(shape, np.float32),
        size=np.zeros(len(num_nodes), np.int32),
    )
    for row in range(len(num_nodes)):
        for place, best in enumerate(best_first(graphs, row, num_nodes[row], max_depth[row], factor, trust[row])):
            trees.token[row, place] = graphs.token[row, best.node]
            trees.parent[row, place] = best.parent
            trees.depth[row, place] = best.depth
            trees.node[row, place] = best.node
            trees.origin[row, place] = graphs.origin[row, best.node]
            trees.via_merge[row, place] = best.crossed or graphs.merged[row, best.node] != NONE
            trees.survival[row, place] = best.survival
            trees.value[row, place] = -best.minus_value
            trees.size[row] = place
    return trees
