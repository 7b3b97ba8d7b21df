"""Keys and values of rows on CPUs: write them to their slots, and move those of accepted nodes to contiguous ones."""

from collections.abc import Sequence

import torch

from vllm_gsd.ops import use_kernel
from vllm_gsd.ops.kv_move.layout import KVLayout


def move_kv(
    kv_caches: Sequence[torch.Tensor],
    layouts: KVLayout | Sequence[KVLayout],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """Copy the key and the value of slot ``src_slots[i]`` to slot ``dst_slots[i]``, in every cache.

    The result is as if all reads came before all writes, so sources and destinations may overlap.

    Args:
        kv_caches: one cache per layer, ``[num_blocks, kv_heads, block_size, 2 * head_size]`` of any 2- or
            4-byte dtype. The caches must not share memory.
        layouts: the layouts of the caches' pages: one for all caches, or one per cache.
        src_slots, dst_slots: int64 ``[m]``, each ``block * block_size + offset``; m may be 0. Destinations
            must be distinct.

    Raises:
        ValueError: shapes or dtypes do not fit, or a slot lies outside of a cache.
    """
    if isinstance(layouts, KVLayout):
        layouts = [layouts]
    if not kv_caches or not use_kernel(kv_caches[0]):
        move_kv_reference(kv_caches, layouts, src_slots, dst_slots)
        return
    torch.ops.vllm_gsd.move_kv(list(kv_caches), [layout.tables for layout in layouts], src_slots, dst_slots)


def move_kv_reference(
    kv_caches: Sequence[torch.Tensor],
    layouts: KVLayout | Sequence[KVLayout],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """:func:`move_kv` in plain PyTorch."""
    if isinstance(layouts, KVLayout):
        layouts = [layouts]
    if len(layouts) == 1:
        layouts = list(layouts) * len(kv_caches)
    if len(layouts) != len(kv_caches):
        raise ValueError(f"there are {len(kv_caches)} KV caches, but {len(layouts)} layouts")
    if src_slots.shape != dst_slots.shape or src_slots.dim() != 1:
        raise ValueError("src_slots and dst_slots must be vectors of one length")
    if src_slots.dtype != torch.int64 or dst_slots.dtype != torch.int64:
        raise ValueError("src_slots and dst_slots must be int64")
    for kv_cache, layout in zip(kv_caches, layouts, strict=True):
        slots = torch.cat([src_slots, dst_slots])
        if ((slots < 0) | (slots >= kv_cache.shape[0] * kv_cache.shape[2])).any():
            raise ValueError("a slot does not lie in the KV cache")
        layout.write(kv_cache, dst_slots, *layout.read(kv_cache, src_slots))


def write_kv(
    kv_cache: torch.Tensor, layout: KVLayout, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the key and the value of row i in slot ``slots[i]``, as vLLM's ``cpu_attn_reshape_and_cache`` does.

    Where keys are transposed, the rows of a graph lie in the same cache lines. vLLM divides rows among threads, which
    then take these lines from each other. Here one thread writes up to 64 rows of a KV head.

    Args:
        kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]`` of any 2- or 4-byte dtype.
        layout: the layout of its pages.
        key, value: ``[num_rows, kv_heads, head_size]``, dtype of ``kv_cache``; any row and head stride.
        slots: int64 ``[>= num_rows]``, each ``block * block_size + offset``; rows with a negative one are not stored.

    Raises:
        ValueError: shapes or dtypes do not fit, or a slot lies outside of the cache.
    """
    if use_kernel(kv_cache):
        torch.ops.vllm_gsd.write_kv(kv_cache, layout.tables, key, value, slots)
        return
    stored = slots[: len(key)] >= 0
    layout.write(kv_cache, slots[: len(key)][stored], key[stored], value[stored])
