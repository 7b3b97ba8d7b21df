"""The rows that verify flattened graphs: their place in the batch and their attention masks."""

import numpy as np

from vllm_gsd.method.constants import NONE


def lay_tree(
    token: np.ndarray,
    parent: np.ndarray,
    depth: np.ndarray,
    origin: np.ndarray,
    via_merge: np.ndarray,
    survival: np.ndarray,
    sources: np.ndarray,
    first: int,
    count: int,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Write the rows of a flattened graph, the root's first.

    Args:
        token, parent, depth, origin, via_merge, survival: [nodes], one row of ``FlatTrees``.
        sources: int8 [2, NUM_ORIGINS], a node's source by whether its path crosses a merged edge, and by its origin.
        first, count: row of the root, and number of rows to write.
        rows: outputs [num_rows]: token int64, parent int32 (place in the tree), depth int32, source int8 and survival
            float32.
    """
    all_tokens, all_parents, all_depths, all_sources, all_survival = rows
    written = slice(first, first + count)
    all_tokens[written] = token[:count]
    all_parents[written] = parent[:count]
    all_depths[written] = depth[:count]
    all_sources[written] = sources[via_merge[:count].astype(np.int64), origin[:count]]
    all_survival[written] = survival[:count]


def ancestor_masks(parent: np.ndarray, starts: np.ndarray, masks: np.ndarray) -> None:
    """Compute the attention masks among the rows of each tree: a row attends itself and its ancestors.

    Args:
        parent: int32 [num_rows], place of each row's parent within its own tree, NONE for a root.
        starts: int32 [num_trees + 1]; tree t has the rows ``starts[t]:starts[t + 1]``.
        masks: output, int64 [num_rows, words]; bit j of word w stands for place 64 * w + j of the same tree.

    Raises:
        ValueError: a tree has more rows than the masks have bits.
    """
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        _check_width(end - first, masks)
        for row in range(first, end):
            above = NONE if parent[row] == NONE else first + parent[row]
            _see(masks, row, above, row - first)


def batch_masks(
    parents: np.ndarray,
    starts: np.ndarray,
    depth: np.ndarray,
    has_tree: np.ndarray,
    first_rows: np.ndarray,
    batch_starts: np.ndarray,
    positions: np.ndarray,
    prefix: np.ndarray,
    masks: np.ndarray,
) -> None:
    """Compute the attention masks and positions of a batch's rows: each request's text, then its tree.

    Rows of text need no mask: they attend the prefix up to their own position.

    Args:
        parents, depth: int32 [num_rows of trees]; parents are NONE for roots, and below NONE for rows that attend
            only themselves.
        starts: int32 [num_requests + 1], request r's tree has the rows ``starts[r]:starts[r + 1]``, root first.
        has_tree: bool [num_requests]; requests without a tree have rows of text only.
        first_rows: int64 [num_requests], the batch's row of each root.
        batch_starts: int32 [num_requests + 1], start of each request in the batch.
        positions: int64 [at least num_rows of the batch], by row; updated for nodes, by depth.
        prefix: output, int64 [num_requests], number of positions before each request's root; all positions without a
            tree.
        masks: output, int64 [num_rows of the batch, words]; bit j of word w is set if the row attends place
            64 * w + j of the request's tree.

    Raises:
        ValueError: a tree has more rows than the masks have bits.
    """
    for request, root in enumerate(first_rows.tolist()):
        begin, end = batch_starts[request : request + 2].tolist()
        if begin == end:
            continue
        masks[begin:end] = 0
        if not has_tree[request]:
            prefix[request] = positions[end - 1] + 1
            continue
        _check_width(end - root, masks)
        prefix[request] = positions[root]
        for row in range(root, end):
            node = starts[request] + row - root
            positions[row] = positions[root] + depth[node]
            above = root + parents[node] if parents[node] >= 0 else NONE
            _see(masks, row, above, row - root)


def _check_width(rows: int, masks: np.ndarray) -> None:
    if rows > 64 * masks.shape[1]:
        raise ValueError("a tree has more rows than its attention mask has bits")


def _see(masks: np.ndarray, row: int, above: int, place: int) -> None:
    """Let a row attend itself (bit ``place``) and what the row ``above`` attends, unless that is NONE."""
    words = masks[row].view(np.uint64)
    words[:] = 0 if above == NONE else masks[above].view(np.uint64)
    words[place // 64] |= np.uint64(1 << place % 64)
