"""Reference of ``vllm_gsd.ops.kv_move.paged``."""

import torch

from vllm_gsd.ops.kv_move.paged import PagedCaches, check_moves


def move_paged_kv_reference(caches: PagedCaches, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """``move_paged_kv`` in plain PyTorch.

    Raises:
        ValueError: as there, and if a slot does not lie in the caches.
    """
    check_moves(caches, src_slots, dst_slots)
    moves = (src_slots >= 0) & (dst_slots >= 0)
    src, dst = src_slots[moves], dst_slots[moves]
    num_slots = caches.tensors[0].shape[0] * caches.tensors[0].shape[2]
    if (torch.cat([src, dst]) >= num_slots).any():
        raise ValueError(f"a slot is not below the {num_slots} of the KV caches")
    for cache in caches.tensors:
        size = cache.shape[2]
        cache[dst // size, :, dst % size] = cache[src // size, :, src % size].clone()
