"""Reference of ``vllm_gsd.ops.lay_out``: the host's specification."""

import numpy as np
import torch

from vllm_gsd.method.constants import NONE
from vllm_gsd.method.lay_out import ancestor_masks
from vllm_gsd.ops.flatten.api import DeviceTrees


def lay_out_rows_reference(
    kept: DeviceTrees,
    slots: torch.Tensor,
    valid: torch.Tensor,
    starts: torch.Tensor,
    batch_starts: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> DeviceTrees:
    """``lay_out_rows`` by ``method.lay_out``, request by request."""
    trees = DeviceTrees(*(values.new_zeros((len(slots), *values.shape[1:])) for values in kept))
    trees.parent.fill_(NONE)
    for request, slot in enumerate(slots.tolist()):
        first, end = starts[request : request + 2].tolist()
        root = int(batch_starts[request + 1]) - (end - first)
        size = min(int(kept.size[slot]), end - first - 1) if valid[request] else 0
        for values, of in zip(trees[:-1], kept[:-1], strict=True):
            values[request, : 1 + size] = of[slot, : 1 + size]
        trees.size[request] = size
        prefix_lens[request] = positions[root]
        positions[root : root + end - first] = positions[root].clone()
        positions[root : root + 1 + size] += trees.depth[request, : 1 + size]
        # Rows without a node are children of the root.
        parent = np.zeros(end - first, np.int32)
        parent[: 1 + size] = trees.parent[request, : 1 + size].numpy(force=True)
        masks = np.zeros((end - first, mask.shape[1]), np.int64)
        ancestor_masks(parent, np.array([0, end - first], np.int32), masks)
        mask[first:end] = torch.from_numpy(masks).to(mask.device)
    return trees
