"""Depths, positions and ancestor bitmasks of a batch of trees, on the device.

Equal to ``method.lay_out.ancestor_masks`` on the host. ``paged_tree_attention`` takes the masks and positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton

_MOST_NODES = 4096


class TreeMasks(NamedTuple):
    """Which rows of its tree each row attends, and where it stands."""

    # int64 [num_rows, words]; bit j of word w is set if the row attends place 64 * w + j of its tree
    mask: torch.Tensor
    depths: torch.Tensor  # int32 [num_rows], 0 for roots
    positions: torch.Tensor  # int64 [num_rows], prefix + depth

    @classmethod
    def zeros(cls, rows: int, words: int, device: torch.device) -> TreeMasks:
        """Masks of rows that belong to no tree."""
        return cls(
            torch.zeros(rows, words, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )


def tree_masks(
    parents: torch.Tensor,
    starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    max_nodes: int,
    words: int | None = None,
) -> TreeMasks:
    """Compute masks, depths and positions of all rows; rows outside the trees get zeros.

    Args:
        parents: int32 ``[num_rows]``, the rows of all trees in sequence: the place of each row's parent within its own
            tree, negative for a root.
        starts: int32 ``[num_trees + 1]``; tree t has the rows ``[starts[t], starts[t + 1])``, possibly none.
        prefix_lens: int32 ``[num_trees]``, position of each root.
        max_depth: bound on a row's depth, at least 0. A deeper row gets this depth and its nearest ancestors.
        max_nodes: bound on the rows of a tree, from 1 to 4096.
        words: words of a mask; None for as many as max_nodes needs.

    The call is safe to capture: shapes depend on the arguments' shapes and numbers only, and nothing is read back.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a number is out of range.
        RuntimeError: Triton cannot run on these tensors.
    """
    words = check_trees(parents, starts, prefix_lens, max_depth, max_nodes, words)
    require_triton("tree_masks", parents)
    from vllm_gsd.ops.attention.masks_triton import tree_masks_kernel, triton

    masks = TreeMasks.zeros(len(parents), words, parents.device)
    if len(starts) > 1:
        tree_masks_kernel[(len(starts) - 1, words)](
            *masks, parents, starts, prefix_lens, masks.mask.stride(0), max_depth, WORDS=words,
            BLOCK=triton.next_power_of_2(max_nodes), num_warps=1,
        )  # fmt: skip
    return masks


def check_trees(
    parents: torch.Tensor,
    starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    max_nodes: int,
    words: int | None,
) -> int:
    """Return the words of a mask; raise ValueError for the first argument of ``tree_masks`` that does not fit."""
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
