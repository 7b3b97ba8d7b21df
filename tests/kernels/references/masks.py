"""Reference of ``vllm_gsd.ops.attention.masks``."""

import torch

from vllm_gsd.ops.attention.masks import TreeMasks, check_trees


def tree_masks_reference(
    parents: torch.Tensor,
    starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    max_nodes: int,
    words: int | None = None,
) -> TreeMasks:
    """``tree_masks`` in plain Python."""
    words = check_trees(parents, starts, prefix_lens, max_depth, max_nodes, words)
    masks = TreeMasks.zeros(len(parents), words, parents.device)
    bounds, parent = starts.tolist(), parents.tolist()
    attends = torch.zeros(len(parents), words, 64, dtype=torch.int64)
    for first, end, prefix in zip(bounds[:-1], bounds[1:], prefix_lens.tolist(), strict=False):
        for line in range(first, end):
            depth, place = -1, line - first
            while place >= 0 and depth < max_depth:
                attends[line, place // 64, place % 64] = 1
                depth, place = depth + 1, parent[first + place]
            masks.depths[line], masks.positions[line] = depth, prefix + depth
    # If bit 63 is set, the sum wraps to the two's complement.
    masks.mask.copy_((attends << torch.arange(64)).sum(2))
    return masks
