"""Depths, positions and ancestor bitmasks of a batch of trees, on the device.

What ``method.lay_out.ancestor_masks`` does on the host; its output is what ``paged_tree_attention`` takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gsd.ops.dispatch import check_tensor, use_triton

_MOST_NODES = 4096


class TreeMasks(NamedTuple):
    """How the rows of trees attend and where they stand."""

    mask: torch.Tensor  # int64 [num_rows, words], bit j of word w: the row attends place 64 * w + j of its tree
    depths: torch.Tensor  # int32 [num_rows], 0 for roots
    positions: torch.Tensor  # int64 [num_rows], prefix + depth


def tree_masks(
    parents: torch.Tensor,
    starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    max_nodes: int,
    words: int | None = None,
) -> TreeMasks:
    """Masks, depths and positions of all rows; rows of no tree keep zeros.

    Args:
        parents: int32 ``[num_rows]``, rows of all trees one after the other: place of each row's parent within its own
            tree, negative for a root.
        starts: int32 ``[num_trees + 1]``; tree t has rows ``[starts[t], starts[t + 1])``, maybe none.
        prefix_lens: int32 ``[num_trees]``, position of each root.
        max_depth: of any row, from 0; whoever is deeper gets the depth and the ancestors up to there.
        max_nodes: most rows of a tree, from 1 to 4096.
        words: of a mask; None: as many as max_nodes needs.

    Capture-safe: shapes depend on arguments' shapes and numbers alone, and nothing is read back.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a number is out of range.
    """
    words = _check(parents, starts, prefix_lens, max_depth, max_nodes, words)
    if not use_triton(parents):
        return tree_masks_reference(parents, starts, prefix_lens, max_depth, max_nodes, words)
    from vllm_gsd.ops.attention.masks_triton import tree_masks_kernel, triton

    masks = _zeros(len(parents), words, parents.device)
    if len(starts) > 1:
        tree_masks_kernel[(len(starts) - 1, words)](
            *masks, parents, starts, prefix_lens, masks.mask.stride(0), max_depth, WORDS=words,
            BLOCK=triton.next_power_of_2(max_nodes), num_warps=1,
        )  # fmt: skip
    return masks


def tree_masks_reference(
    parents: torch.Tensor,
    starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    max_nodes: int,
    words: int | None = None,
) -> TreeMasks:
    """:func:`tree_masks` in plain Python."""
    words = _check(parents, starts, prefix_lens, max_depth, max_nodes, words)
    masks = _zeros(len(parents), words, parents.device)
    bounds, parent = starts.tolist(), parents.tolist()
    attends = torch.zeros(len(parents), words, 64, dtype=torch.int64)
    for first, end, prefix in zip(bounds[:-1], bounds[1:], prefix_lens.tolist(), strict=False):
        for line in range(first, end):
            depth, place = -1, line - first
            while place >= 0 and depth < max_depth:
                attends[line, place // 64, place % 64] = 1
                depth, place = depth + 1, parent[first + place]
            masks.depths[line], masks.positions[line] = depth, prefix + depth
    # The sum wraps where bit 63 is set, which is what two's complement wants.
    masks.mask.copy_((attends << torch.arange(64)).sum(2))
    return masks


def _zeros(rows: int, words: int, device: torch.device) -> TreeMasks:
    return TreeMasks(
        torch.zeros(rows, words, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )


def _check(parents, starts, prefix_lens, max_depth, max_nodes, words) -> int:
    check_tensor("parents", parents, parents.device, 1, torch.int32)
    check_tensor("starts", starts, parents.device, 1, torch.int32, rows=1)
    check_tensor("prefix_lens", prefix_lens, parents.device, 1, torch.int32, rows=len(starts) - 1)
    if max_depth < 0 or not 1 <= max_nodes <= _MOST_NODES:
        raise ValueError(
            f"max_depth is {max_depth} and max_nodes {max_nodes}, but must be at least 0 and from 1 to {_MOST_NODES}"
        )
    words = -(-max_nodes // 64) if words is None else words
    if words * 64 < max_nodes:
        raise ValueError(f"masks of {words} words have no bits for {max_nodes} rows")
    return words
