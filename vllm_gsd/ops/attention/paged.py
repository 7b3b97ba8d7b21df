"""Attention of tree rows over vLLM's paged KV cache on GPUs.

The method and the arguments are those of :mod:`vllm_gsd.ops.attention.cpu`, which serves the CPU's cache, but keys and
values are two tensors, as in all of vLLM's GPU backends, and may be fp8:

    s[key] = scale * k_scale * q . k[key];  with softcap: s = softcap * tanh(s / softcap)
    out = v_scale * sum(e^s[key] * v[key]) / (sum(e^s[key]) + e^sink)      over the keys that the row attends
    lse = log(sum(e^s[key]) + e^sink)

``xformers_tree_attention`` and the reference take the same arguments. What differs from the CPU's:

    query: as there, head_size at most 256.
    key_cache, value_cache: ``[num_blocks, block_size, kv_heads, head_size]``, last stride 1; dtype of ``query``,
        float8_e5m2, or float8_e4m3fn from compute capability 8.9. vLLM's ``kv_cache`` of ``[num_blocks, kv_heads,
        block_size, 2 * head_size]`` gives them by ``kv_cache.transpose(1, 2).split(head_size, -1)``.
    rows: only sliding windows read the positions. All rows attend the whole prefix otherwise.
    k_scale, v_scale: float32 of 1 or ``kv_heads`` elements, factors of the stored keys and values.
    lse: float32 ``[num_rows, num_heads]``, receives the natural log-sum-exp of each row's scores; -inf for no key.
    include_prefix: False to attend slots only, for ``merge_attention`` with attention over the prefix.
    max_rows: bound on the rows of a request; rows beyond it are not written. None for ``num_rows``.
    num_splits: number of spans of the prefix that separate programs read, 1 to 32. None to fill the GPU.
    by_row: whether a row's result has the same bits in a tree, alone, and beside any other rows. Each row then reads
        the whole prefix by itself, in one span. Needs ``include_prefix``.
    tiles: None to choose by shape.
"""

import functools
from typing import Any

import torch

from vllm_gsd.ops.attention.merge import merge_attention
from vllm_gsd.ops.attention.paged_checks import FP8_DTYPES, MAX_SPLITS, TreeTiles, check_inputs
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.dispatch import interpreted, registers_for, require_triton

__all__ = ["FP8_DTYPES", "TreeTiles", "paged_tree_attention"]


def paged_tree_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: AttendingRows,
    scale: float,
    *,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    include_prefix: bool = True,
    max_rows: int | None = None,
    num_splits: int | None = None,
    by_row: bool = False,
    tiles: TreeTiles | None = None,
) -> None:
    """Write the attention of every row into ``output``. The module describes the formula and the arguments.

    Arithmetic is in float32; products of bfloat16 and float16 run on tensor cores. Keys that no row attends are not
    read, and slots that a row does not attend may hold NaN. The call is safe to capture: grid and memory depend on
    shapes, ``max_rows`` and ``num_splits`` only. Nothing is read back, so the contents of ``rows`` are not checked.
    """
    inputs = (query, key_cache, value_cache, rows)
    extras = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    check_inputs(output, query, key_cache, value_cache, rows, **extras, lse=lse, num_splits=num_splits, tiles=tiles)
    require_triton("paged_tree_attention", query)
    num_reqs, group = len(rows.query_start_loc) - 1, query.shape[1] // key_cache.shape[2]
    max_rows = max_rows or len(query)
    if not (len(query) and num_reqs):
        return
    roomy = _capability(query.device) >= (9, 0) and not (softcap or sliding_window > 0 or sinks is not None)
    if by_row:
        tiles = TreeTiles.of(1, group, query.shape[2], query.element_size())
        num_splits, m_tiles = 1, max_rows * -(-group // tiles.rows)
    else:
        tiles = tiles or TreeTiles.of(max_rows, group, query.shape[2], query.element_size(), roomy)
        m_tiles = -(-max_rows * group // tiles.rows)
    launch: dict[str, Any] = {
        "inputs": inputs, "scale": scale, "m_tiles": m_tiles, "tiles": tiles, "sliding_window": sliding_window,
        "softcap": softcap, "include_prefix": include_prefix, "by_row": by_row, **extras,
    }  # fmt: skip
    if num_splits is None:
        longest = rows.block_table.shape[1] * key_cache.shape[1] if include_prefix else 0
        num_splits = _splits(m_tiles * key_cache.shape[2] * num_reqs, longest, query.device)
        given = tuple(tensor is not None for tensor in (lse, *extras.values()))
        strides = (tensor.stride() for tensor in (output, query, key_cache))
        kind = tiles, query.device, query.dtype, key_cache.dtype, *strides, sliding_window > 0, softcap != 0, given
        for spans in () if kind in _compiled else (1, 2):
            # A later batch may have spans where this one has none. A launch without programs only compiles.
            _attend(output, lse, num_reqs=0, num_splits=spans, **launch)
        _compiled.add(kind)
    _attend(output, lse, num_reqs=num_reqs, num_splits=num_splits, **launch)


_compiled: set[tuple[Any, ...]] = set()  # the kinds of launches that this process has compiled


def _attend(output: torch.Tensor, lse: torch.Tensor | None, *, num_splits: int, **launch: Any) -> None:
    """Attend in one span, or in several, and merge these."""
    if num_splits == 1:
        _launch(output, lse, num_splits=1, **launch)
        return
    parts = output.new_empty((num_splits, *output.shape), dtype=torch.float32)
    lses = parts.new_empty(parts.shape[:3])
    _launch(parts, lses, num_splits=num_splits, **launch)
    starts = launch["inputs"][3].query_start_loc
    # Without requests, row 0 is the end.
    merge_attention(output, parts, lses, lse, end_row=starts[-1:] if launch["num_reqs"] else starts[:1])


def _launch(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttendingRows],
    scale: float,
    num_reqs: int,
    m_tiles: int,
    num_splits: int,
    tiles: TreeTiles,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sliding_window: int,
    softcap: float,
    include_prefix: bool,
    by_row: bool,
) -> None:
    """Launch the kernel. With several splits ``output`` and ``lse`` have a leading dimension of that size."""
    from vllm_gsd.ops.attention.paged_triton import tree_attention_kernel, triton

    query, key_cache, value_cache, rows = inputs
    _, num_heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    # ptxas spills in some variants with tensor cores to run more programs at once.
    spills = query.dtype != torch.float32
    lse_strides = (0, 0, 0) if lse is None else (0, *lse.stride())
    tree_attention_kernel[(m_tiles * num_splits, kv_heads, num_reqs)](
        output, lse, query, key_cache, value_cache, rows.block_table, rows.query_start_loc, rows.prefix_lens,
        rows.positions, rows.mask, sinks, k_scale, v_scale, float(scale), float(softcap), sliding_window,
        rows.mask.shape[1], *(0, *output.stride())[-4:-1], *lse_strides[-3:-1],
        *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], rows.block_table.stride(0),
        rows.mask.stride(0), _per_head(k_scale), _per_head(v_scale), m_tiles, num_splits, GROUP=num_heads // kv_heads,
        BLOCK_SIZE=block_size, HEAD_SIZE=head_size, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)), PREFIX=include_prefix, WINDOW=sliding_window > 0,
        SOFTCAP=softcap != 0, SINKS=sinks is not None, K_SCALE=k_scale is not None, V_SCALE=v_scale is not None,
        STORE_LSE=lse is not None, DOT_DTYPE=_dot_dtype(query.dtype), BY_ROW=by_row,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=registers_for(tiles.warps) if spills else None,
    )  # fmt: skip


def _dot_dtype(dtype: torch.dtype) -> Any:
    """Triton's dtype of matrix products: float32 in the interpreter, which cannot multiply bfloat16; else ``dtype``."""
    from vllm_gsd.ops.attention.paged_triton import tl

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if interpreted() else names[dtype]


def _per_head(factor: torch.Tensor | None) -> int:
    """Step from one KV head's factor to the next; 0 if all heads share one."""
    return int(factor is not None and factor.numel() > 1)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Number of spans of the prefix: two programs per multiprocessor, but at least 256 keys per span."""
    return max(1, min(MAX_SPLITS, -(-2 * _processors(device) // programs), -(-longest // 256)))
