"""The checks of :mod:`vllm_gsd.ops.attention.paged`'s arguments. They read nothing from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.dispatch import check_tensor

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_SIZE = 256
MAX_SPLITS = 32


@dataclass(frozen=True)
class TreeTiles:
    """How the kernel cuts its work: rows and keys of a tile, warps and stages of a program."""

    rows: int  # pairs of (row, query head of one KV head): a power of two from 16
    keys: int  # 16, 32 or 64
    warps: int = 4
    stages: int = 2

    @classmethod
    def of(cls, max_rows: int, group: int, head_size: int, element_size: int, roomy: bool = False) -> TreeTiles:
        """The most rows with which the kernel spills no registers and fits 99 KiB; not yet timed.

        Args:
            max_rows: bound on the rows of a request; group: query heads of a KV head.
            head_size, element_size: of the query; element_size in bytes.
            roomy: whether the GPU is SM90 or newer and attention has no options, which take registers.
        """
        wide = head_size > 128 or element_size > 2
        widest = head_size > 128 and element_size > 2
        rows = min(
            16 if widest else 32 if wide else 128 if roomy else 64, max(16, 1 << (max_rows * group - 1).bit_length())
        )
        return cls(rows=rows, keys=16 if widest else 32, warps=8 if wide or rows > (64 if roomy else 32) else 4)


def check_inputs(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: AttendingRows,
    *,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    tiles: TreeTiles | None = None,
    compute: torch.dtype | None = None,
) -> None:
    """Raise ValueError for the first argument that does not fit. ``output`` and ``lse`` may be of type ``compute``."""
    device = query.device
    check_tensor("query", query, device, 3, *QUERY_DTYPES)
    check_tensor("output", output, device, 3, *{query.dtype: 0, compute or query.dtype: 0})
    if output.shape != query.shape:
        raise ValueError(f"output is {list(output.shape)}, but must be {list(query.shape)} as query")
    _check_caches(query, key_cache, value_cache)
    num_rows = rows.check(device, len(query))
    if sinks is not None:
        check_tensor("sinks", sinks, device, 1, *QUERY_DTYPES, rows=query.shape[1])
    _check_scale("k_scale", k_scale, key_cache)
    _check_scale("v_scale", v_scale, key_cache)
    if lse is not None:
        check_tensor("lse", lse, device, 2, torch.float32, *([compute] if compute else []), rows=num_rows)
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}, but must be from 1 to {MAX_SPLITS}")
    if tiles is not None and (tiles.keys not in (16, 32, 64) or tiles.rows < 16 or tiles.rows & (tiles.rows - 1)):
        raise ValueError(f"tiles are {tiles}, but rows must be a power of two from 16 and keys 16, 32 or 64")


def _check_caches(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    device = query.device
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(name, cache, device, 4, query.dtype, *FP8_DTYPES)
        if cache.is_cuda and cache.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(f"{name} is float8_e4m3fn, which takes a GPU of compute capability 8.9 or newer")
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache and value_cache must have one shape and dtype, not {list(key_cache.shape)} {key_cache.dtype} "
            f"and {list(value_cache.shape)} {value_cache.dtype}"
        )
    _, num_heads, head_size = query.shape
    kv_heads = key_cache.shape[2]
    if head_size != key_cache.shape[3] or not 1 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"head_size is {head_size} in query and {key_cache.shape[3]} in key_cache, but both must be the same "
            f"number from 1 to {MAX_HEAD_SIZE}"
        )
    if num_heads % kv_heads:
        raise ValueError(f"the {num_heads} query heads cannot share {kv_heads} KV heads evenly")


def _check_scale(name: str, scale: torch.Tensor | None, key_cache: torch.Tensor) -> None:
    if scale is None:
        return
    check_tensor(name, scale, key_cache.device, scale.dim(), torch.float32)
    if scale.numel() not in (1, key_cache.shape[2]):
        raise ValueError(f"{name} has {scale.numel()} elements, but must have 1 or {key_cache.shape[2]}")
