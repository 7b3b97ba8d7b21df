"""Flattening: unroll a token graph into the tree of at most N nodes that the target model verifies.

A node that is reachable over two paths is laid out twice: its key and value depend on all tokens before
it, so sharing them would not be lossless. Best first by (calibrated) survival, hence parents come before
children and every prefix of the list is itself a valid tree (the scheduler may cut the list).
"""

import heapq
from typing import NamedTuple

import numpy as np

from vllm_gsd.core.calibration import AGREED, MERGED, NATIVE, NGRAM, NUM_SOURCES, SHARED, Calibration, calibrated
from vllm_gsd.core.compiled import compiled
from vllm_gsd.core.graph import NONE, ORIGIN_AGREED, ORIGIN_NGRAM, ORIGIN_SHARED, GraphBatch


class FlatTrees(NamedTuple):
    """Flattened graphs of a batch; place 0 is the root's first chosen descendant, not the root.

    Shapes: ``[num_graphs, max_nodes]``; ``size`` is int32 [num_graphs].
    """

    token: np.ndarray  # int64
    parent: np.ndarray  # int32, place of the parent in the list, NONE for children of the root
    depth: np.ndarray  # int32, children of the root are 1
    node: np.ndarray  # int32, node of the graph
    origin: np.ndarray  # int8, ORIGIN_* of it
    via_merge: np.ndarray  # bool, whether the path to this place uses a merged edge
    survival: np.ndarray  # float32, product of conditional probabilities along the path
    value: np.ndarray  # float32, calibrated survival, never above the parent's
    size: np.ndarray

    def path_tokens(self, row: int, place: int) -> list[int]:
        """Tokens from below the root to ``place``."""
        path: list[int] = []
        while place != NONE:
            path.append(int(self.token[row, place]))
            place = int(self.parent[row, place])
        return path[::-1]


@compiled
def _flatten(
    graphs, num_nodes, max_depth, factor, trust, token, parent, depth, node_of, origin, via_merge, survival, value, size
):
    for row in range(len(num_nodes)):
        # Entries: (-value, order of discovery, node, place of the parent, depth, via a merged edge, survival).
        heap = [(np.float32(0.0), 0, np.int32(0), np.int32(NONE), np.int32(0), False, np.float32(0.0))]
        heap.pop()
        likely, chance, source = np.float32(1.0), np.float32(1.0), np.int32(0)
        place, level, crossed = np.int32(NONE), np.int32(0), False
        count, order = 0, 0
        while True:
            if level < max_depth[row]:
                target = graphs.merged[row, source]
                crossed = crossed or target != NONE
                child = graphs.first_child[row, source if target == NONE else target]
                while child != NONE:
                    order += 1
                    below = likely * graphs.prob[row, child]
                    kind = NATIVE
                    if graphs.origin[row, child] == ORIGIN_NGRAM:
                        kind = NGRAM
                    elif graphs.origin[row, child] == ORIGIN_SHARED:
                        kind = SHARED
                    elif graphs.origin[row, child] == ORIGIN_AGREED:
                        kind = AGREED
                    elif crossed or graphs.merged[row, child] != NONE:
                        kind = MERGED
                    worth = min(chance, trust[row, kind] * calibrated(factor, kind, level + 1, below))
                    heapq.heappush(heap, (-worth, order, child, place, np.int32(level + 1), crossed, below))
                    child = graphs.next_sibling[row, child]
            if count >= num_nodes[row] or len(heap) == 0:
                break
            negative, _, source, above, level, crossed, likely = heapq.heappop(heap)
            chance = -negative
            place = np.int32(count)
            token[row, place] = graphs.token[row, source]
            parent[row, place] = above
            depth[row, place] = level
            node_of[row, place] = source
            origin[row, place] = graphs.origin[row, source]
            via_merge[row, place] = crossed or graphs.merged[row, source] != NONE
            survival[row, place] = likely
            value[row, place] = chance
            count += 1
        size[row] = count


# Factors of a calibration that has seen nothing.
_UNCALIBRATED = Calibration().factor


def flatten(
    graphs: GraphBatch,
    num_nodes: np.ndarray,
    max_depth: np.ndarray,
    factor: np.ndarray = _UNCALIBRATED,
    trust: np.ndarray | None = None,
) -> FlatTrees:
    """Unroll every graph of the batch, best first.

    Args:
        graphs: GraphBatch of ``num_graphs`` graphs.
        num_nodes: int32 [num_graphs], most nodes of each flattened graph.
        max_depth: int32 [num_graphs], deepest place allowed (limits of max_tokens and max_model_len).
        factor: of a ``Calibration``.
        trust: of ``SourceTrust``, float32 [num_graphs, sources]; None: none is trusted more or less than calibrated.
    """
    shape = (len(num_nodes), max(1, max(num_nodes.tolist(), default=1)))
    parent = np.empty(shape, np.int32)
    parent.fill(NONE)
    trees = FlatTrees(
        token=np.zeros(shape, np.int64),
        parent=parent,
        depth=np.zeros(shape, np.int32),
        node=np.zeros(shape, np.int32),
        origin=np.zeros(shape, np.int8),
        via_merge=np.zeros(shape, np.bool_),
        survival=np.zeros(shape, np.float32),
        value=np.zeros(shape, np.float32),
        size=np.zeros(len(num_nodes), np.int32),
    )
    if trust is None:
        trust = np.ones((len(num_nodes), NUM_SOURCES), np.float32)
    _flatten(graphs, num_nodes, max_depth, factor, trust, *trees)
    return trees


@compiled
def lay_tree(token, parent, depth, origin, via_merge, survival, sources, first, count, rows):
    """Write the rows of a flattened graph's nodes behind its root's.

    Args:
        token, parent, depth, origin, via_merge, survival: [nodes], of a row of ``FlatTrees``.
        sources: int8 [2, NUM_ORIGINS], a node's source by whether it lies behind a merged edge, and by its origin.
        first, count: the first node's row; how many nodes are written.
        rows: outputs, token int64, parent int32 (place in the tree, the root's is 0), depth int32, source int8 and
            survival float32, [num_rows] each.
    """
    all_tokens, all_parents, all_depths, all_sources, all_survival = rows
    for node in range(count):
        line = first + node
        all_tokens[line] = token[node]
        all_parents[line] = parent[node] + 1
        all_depths[line] = depth[node]
        all_sources[line] = sources[int(via_merge[node]), origin[node]]
        all_survival[line] = survival[node]


@compiled
def ancestor_masks(parent, starts, masks):
    """Attention mask among the rows of each tree: a row sees itself and its ancestors.

    Args:
        parent: int32 [num_rows], for each row the place of its parent row within its own tree, NONE for a root.
        starts: int32 [num_trees + 1], rows of tree t are ``starts[t]:starts[t + 1]``.
        masks: output, int64 [num_rows, words]; bit j of word w stands for place 64 * w + j of the same tree.

    Raises:
        ValueError: a tree has more rows than the masks have bits.
    """
    for tree in range(len(starts) - 1):
        first = starts[tree]
        if starts[tree + 1] - first > 64 * masks.shape[1]:
            raise ValueError("a tree has more rows than its attention mask has bits")
        for line in range(first, starts[tree + 1]):
            if parent[line] == NONE:
                masks[line, :] = 0
            else:
                masks[line, :] = masks[first + parent[line]]
            place = line - first
            masks[line, place // 64] |= np.int64(np.uint64(1) << np.uint64(place % 64))


@compiled
def batch_masks(parents, starts, depth, has_tree, first_rows, batch_starts, positions, prefix, masks):
    """Attention masks and positions of a batch's rows: texts, and behind each its graph.

    Rows of text need no mask, however many they are: they attend the prefix up to their own position.

    Args:
        parents, depth: int32 [num_rows of trees], NONE for roots, below it rows that see nothing but themselves.
        starts: int32 [num_requests + 1], rows of request r's tree are ``starts[r]:starts[r + 1]``, its root the first.
        has_tree: bool [num_requests]; the rows of others are text.
        first_rows: int64 [num_requests], the batch's row of each root.
        batch_starts: int32 [num_requests + 1], where requests begin in the batch.
        positions: int64 [at least num_rows of the batch], by place; nodes get theirs by depth.
        prefix: output, int64 [num_requests], positions before each request's root; where it has no tree, all of them.
        masks: output, int64 [num_rows of the batch, words]; bit j of word w: place 64 * w + j of the request's tree is
            seen.

    Raises:
        ValueError: a tree has more rows than the masks have bits.
    """
    for request in range(len(first_rows)):
        begin, end, root = batch_starts[request], batch_starts[request + 1], first_rows[request]
        if begin == end:
            continue
        masks[begin:end, :] = 0
        if not has_tree[request]:
            prefix[request] = positions[end - 1] + 1
            continue
        if end - root > 64 * masks.shape[1]:
            raise ValueError("a tree has more rows than its attention mask has bits")
        prefix[request] = positions[root]
        for row in range(root, end):
            place = row - root
            line = starts[request] + place
            positions[row] = positions[root] + depth[line]
            if parents[line] >= 0:
                masks[row, :] = masks[root + parents[line]]
            masks[row, place // 64] |= np.int64(np.uint64(1) << np.uint64(place % 64))
