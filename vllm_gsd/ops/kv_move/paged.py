"""Compaction on GPUs: move the KV of accepted nodes to contiguous slots, in all layers with one launch."""

from collections.abc import Sequence

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MOST_MOVES = 512
_MOST_ELEMENTS = 8192  # of a program, which holds them in registers


class PagedCaches:
    """The KV caches of all layers, with a table of their addresses for :func:`move_paged_kv`.

    Args:
        kv_caches: one per layer, ``[num_blocks, kv_heads, block_size, width]`` as in vLLM's GPU backends. The width is
            ``2 * head_size`` plus what quantisation stores inline; the last stride is 1; the dtype has 1, 2 or 4 bytes.
            All caches have one device, shape, dtype and strides, and share no memory.

    Raises:
        ValueError: the caches differ, there are none, or their elements have another size.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]):
        if not kv_caches:
            raise ValueError("there are no KV caches to move rows in")
        first = kv_caches[0]
        if first.element_size() not in _INTEGERS:
            raise ValueError(f"the KV caches are {first.dtype}, but must have elements of 1, 2 or 4 bytes")
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError(
                f"the KV caches must be [num_blocks, kv_heads, block_size, width] with stride 1 in the last dimension, "
                f"not {list(first.shape)} with strides {list(first.stride())}"
            )
        for cache in kv_caches:
            if (cache.shape, cache.stride(), cache.dtype, cache.device) != (
                first.shape, first.stride(), first.dtype, first.device,
            ):  # fmt: skip
                raise ValueError("the KV caches must be alike in shape, strides, dtype and device")
        #: The same memory as integers, since rows are only moved.
        self.tensors = [cache.view(_INTEGERS[first.element_size()]) for cache in kv_caches]
        addresses = [cache.data_ptr() for cache in kv_caches]
        self.addresses = torch.tensor(addresses, device=first.device)
        self.aligned = all(address % 16 == 0 for address in addresses)


def move_paged_kv(caches: PagedCaches, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy the key and the value of slot ``src_slots[r, i]`` to slot ``dst_slots[r, i]``, in every cache.

    A row r holds one request's moves. Within a row, all reads come before all writes. Rows run concurrently: no row may
    read or write a slot that another row writes.

    Args:
        src_slots, dst_slots: int64 ``[num_reqs, moves]``, each ``block * block_size + offset``, at most 512 moves. A
            move is skipped if either slot is negative.

    The call is safe to capture: shapes are fixed, nothing is read back, and the caches keep their addresses. Therefore
    slots are not checked against the caches' size.
    """
    check_moves(caches, src_slots, dst_slots)
    require_triton("move_paged_kv", src_slots)
    from vllm_gsd.ops.kv_move.triton import kv_move_kernel, triton

    first = caches.tensors[0]
    _, kv_heads, block_size, width = first.shape
    num_reqs, num_moves = src_slots.shape
    if not src_slots.numel():
        return
    block_m = triton.next_power_of_2(max(16, num_moves))
    block_w = min(triton.next_power_of_2(width), _MOST_ELEMENTS // block_m)
    kv_move_kernel[(len(caches.tensors), kv_heads * triton.cdiv(width, block_w), num_reqs)](
        caches.addresses, src_slots, dst_slots, first, num_moves, src_slots.stride(0), first.stride(0),
        first.stride(1), first.stride(2), BLOCK_SIZE=block_size, WIDTH=width, BLOCK_M=block_m, BLOCK_W=block_w,
        ALIGNED=caches.aligned, num_warps=4,
    )  # fmt: skip


def check_moves(caches: PagedCaches, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Raise ValueError if the slots of ``move_paged_kv`` do not fit."""
    device = caches.addresses.device
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        check_tensor(name, slots, device, 2, torch.int64)
    if src_slots.shape != dst_slots.shape or src_slots.stride() != dst_slots.stride():
        raise ValueError(
            f"src_slots and dst_slots must have one shape and strides, not {list(src_slots.shape)} and "
            f"{list(dst_slots.shape)}"
        )
    if src_slots.shape[1] > _MOST_MOVES:
        raise ValueError(f"a request moves {src_slots.shape[1]} slots, but at most {_MOST_MOVES} are possible")
