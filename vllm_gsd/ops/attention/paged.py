"""Attention of the rows of token trees over vLLM's paged KV cache on GPUs.

Same method and names as ``ops.tree_attention``, which serves the CPU's cache; here keys and values are two tensors, as
every GPU backend of vLLM sees them, and may be fp8. A request's keys are its committed tokens (the *prefix*, logical
indices ``[0, prefix)``) and the nodes of its tree (*slots* 0, 1... at logical indices ``prefix + slot``):

    s[key] = scale * k_scale * q . k[key];  with softcap: s = softcap * tanh(s / softcap)
    out = v_scale * sum(e^s[key] * v[key]) / (sum(e^s[key]) + e^sink)      over the keys that the row attends
    lse = log(sum(e^s[key]) + e^sink)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm_gsd.ops.attention.merge import merge_attention
from vllm_gsd.ops.dispatch import check_tensor, interpreted, use_triton

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_SIZE = 256
_MOST_SPLITS = 32


@dataclass(frozen=True)
class TreeTiles:
    """How the kernel cuts its work: rows and keys of a tile, warps and stages of a program."""

    rows: int  # pairs of (row, query head of one KV head): a power of two from 16
    keys: int  # 16, 32 or 64
    warps: int = 4
    stages: int = 2

    @classmethod
    def of(cls, max_rows: int, group: int, head_size: int, element_size: int) -> TreeTiles:
        """The widest rows whose kernel spills (nearly) no registers on SM90 and fits 99 KiB; speed not yet measured."""
        wide = head_size > 128 or element_size > 2
        rows = min(32 if wide else 128, max(16, 1 << (max_rows * group - 1).bit_length()))
        return cls(rows=rows, keys=32 if wide else 64, warps=8 if rows > 64 else 4)


def paged_tree_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    positions: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
    *,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    slot_positions: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    include_prefix: bool = True,
    max_rows: int | None = None,
    num_splits: int | None = None,
    tiles: TreeTiles | None = None,
) -> None:
    """Write the attention of every row into ``output``; see the module's formula.

    Args:
        output: ``[num_rows, num_heads, head_size]``, dtype of ``query``. Rows behind the last request's are
            left alone. A row that attends no key becomes 0.
        query: ``[num_rows, num_heads, head_size]`` float32, bfloat16 or float16, head_size at most 256.
        key_cache, value_cache: ``[num_blocks, block_size, kv_heads, head_size]``, any strides but the last; dtype of
            ``query``, or float8_e5m2, or from compute capability 8.9 float8_e4m3fn. With vLLM's ``kv_cache`` of
            ``[num_blocks, kv_heads, block_size, 2 * head_size]`` they are
            ``kv_cache.transpose(1, 2).split(head_size, -1)``. Query head h uses KV head
            ``h // (num_heads // kv_heads)``.
        block_table: int32 ``[num_reqs, max_blocks]``; logical index i of request r lies in block
            ``block_table[r, i // block_size]`` at ``i % block_size``.
        query_start_loc: int32 ``[num_reqs + 1]``; request r has rows ``[start[r], start[r + 1])``, maybe none.
        prefix_lens: int32 ``[num_reqs]``.
        positions: int64 ``[num_rows]``, each row's position in its sequence (for a node at depth d,
            ``prefix + d``); read only for a sliding window.
        tree_mask: int64 ``[num_rows, words]``; bit j of word w: the row attends slot ``64 * w + j``. Any number of
            words, hence of nodes.
        scale: factor of the scores.
        sliding_window: a row at position p attends the prefix's keys i with ``p - i < sliding_window``; -1 or
            0: all.
        softcap: 0: none.
        sinks: float32, bfloat16 or float16 ``[num_heads]``, a logit that takes part in each head's softmax without
            a value.
        k_scale, v_scale: float32 of 1 or ``kv_heads`` elements, what a stored key or value is multiplied with.
        slot_positions: int64 ``[num_reqs, slots]``, at least as many slots as masks name: with a sliding window,
            slots are left out as keys of the prefix are, by their position. None: they are not windowed.
        lse: float32 ``[num_rows, num_heads]``; natural log-sum-exp of each row's scores is written, -inf for none.
        include_prefix: False: the slots alone, to be merged with attention over the prefix (``merge_attention``).
        max_rows: most rows of a request, a bound on the launch: rows beyond it are not written. None: ``num_rows``.
        num_splits: spans of the prefix that different programs read, 1 to 32; None: enough to fill the GPU.
        tiles: None: chosen by shape.

    Arithmetic is in float32, products of bfloat16 and float16 on tensor cores. A request's prefix is read once for up
    to ``tiles.rows`` pairs of row and query head, and by neighbouring programs (through L2) for more. Keys that no row
    attends are not read. Capture-safe: grid and memory depend on shapes, ``max_rows`` and ``num_splits`` alone, and
    nothing is read back. For the same reason the *contents* of block_table, prefix_lens and tree_mask are not checked:
    the reference does that.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit.
    """
    check_inputs(
        output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
        sinks, k_scale, v_scale, slot_positions, lse, num_splits, tiles,
    )  # fmt: skip
    if not use_triton(query):
        paged_tree_attention_reference(
            output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
            scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            slot_positions=slot_positions, lse=lse, include_prefix=include_prefix,
        )  # fmt: skip
        return
    from vllm_gsd.ops.attention.paged_triton import tree_attention_kernel, triton

    num_rows, num_heads, head_size = query.shape
    num_reqs, kv_heads, block_size = len(query_start_loc) - 1, key_cache.shape[2], key_cache.shape[1]
    if not num_rows or not num_reqs:
        return
    group = num_heads // kv_heads
    max_rows = num_rows if max_rows is None else min(max_rows, num_rows)
    tiles = tiles or TreeTiles.of(max_rows, group, head_size, query.element_size())
    m_tiles = triton.cdiv(max_rows * group, tiles.rows)
    if num_splits is None:
        longest = block_table.shape[1] * block_size if include_prefix else 0
        num_splits = _splits(m_tiles * kv_heads * num_reqs, longest, query.device)
    target, target_lse, store_lse = output, lse, lse is not None
    if num_splits > 1:
        target = output.new_empty((num_splits, num_rows, num_heads, head_size), dtype=torch.float32)
        target_lse, store_lse = target.new_empty((num_splits, num_rows, num_heads)), True
    windowed = sliding_window > 0
    tree_attention_kernel[(m_tiles * num_splits, kv_heads, num_reqs)](
        target, target_lse, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions,
        tree_mask, slot_positions, sinks, k_scale, v_scale, float(scale), float(softcap), sliding_window,
        tree_mask.shape[1], target.stride(0) if num_splits > 1 else 0, *target.stride()[-3:-1],
        target_lse.stride(0) if target_lse is not None and num_splits > 1 else 0,
        target_lse.stride(-2) if target_lse is not None else 0, *query.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], block_table.stride(0), tree_mask.stride(0),
        0 if slot_positions is None else slot_positions.stride(0), _per_head(k_scale), _per_head(v_scale),
        m_tiles, NUM_SPLITS=num_splits, GROUP=group, BLOCK_SIZE=block_size, HEAD_SIZE=head_size, BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys, BLOCK_D=max(16, triton.next_power_of_2(head_size)), PREFIX=include_prefix,
        WINDOW=windowed, SLOT_WINDOW=windowed and slot_positions is not None, SOFTCAP=softcap != 0,
        SINKS=sinks is not None, K_SCALE=k_scale is not None,
        V_SCALE=v_scale is not None, STORE_LSE=store_lse, DOT_DTYPE=_dot_dtype(query.dtype), num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if num_splits > 1:
        # Rows behind the last request have nothing to merge.
        merge_attention(output, target, target_lse, lse, end_row=query_start_loc[-1:])


def paged_tree_attention_reference(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    positions: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
    *,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    slot_positions: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    include_prefix: bool = True,
    compute: torch.dtype = torch.float64,
) -> None:
    """:func:`paged_tree_attention` in plain PyTorch, computed in ``compute``; ``output`` may have that dtype too.

    Raises:
        ValueError: as there, and where a row attends a key that its request's block table has no block for.
    """
    check_inputs(
        output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
        sinks, k_scale, v_scale, slot_positions, lse, None, None, compute,
    )  # fmt: skip
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    group = query.shape[1] // kv_heads
    start = query_start_loc.tolist()
    for request, prefix in enumerate(prefix_lens[: len(start) - 1].tolist()):
        rows = slice(start[request], start[request + 1])
        attends = _attended(
            prefix, positions[rows], tree_mask[rows], sliding_window, include_prefix,
            None if slot_positions is None else slot_positions[request],
        )  # fmt: skip
        keys = attends.any(0).nonzero().squeeze(1)
        if (keys >= block_table.shape[1] * block_size).any():
            raise ValueError(f"request {request} attends keys that its block_table has no blocks for")
        blocks = block_table[request, keys // block_size].long()
        if (blocks < 0).any() or (blocks >= num_blocks).any():
            raise ValueError(f"block_table of request {request} names a block that does not exist")
        key, value = (
            _scaled(cache[blocks, keys % block_size].to(compute), factor).repeat_interleave(group, 1)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = torch.einsum("rhd,khd->hrk", query[rows].to(compute), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~attends[:, keys], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(compute).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], 2)
        total = torch.logsumexp(scores, 2) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(2))[:, :, : len(keys)]
        output[rows] = torch.einsum("hrk,khd->rhd", weights, value).to(output.dtype)
        if lse is not None:
            lse[rows] = total.T.to(lse.dtype)


def _attended(prefix, positions, tree_mask, sliding_window, include_prefix, slot_positions) -> torch.Tensor:
    """Booleans ``[rows, prefix + 64 * words]``: which logical index each row attends."""
    index = torch.arange(prefix, device=positions.device)
    in_prefix = torch.full((len(positions), prefix), include_prefix, device=positions.device)
    bits = torch.arange(64, device=positions.device)
    in_tree = (tree_mask.unsqueeze(2) >> bits & 1).bool().flatten(1)
    if sliding_window > 0:
        in_prefix &= positions.unsqueeze(1) - index < sliding_window
        if slot_positions is not None:
            near = positions.unsqueeze(1) - slot_positions < sliding_window
            width = min(near.shape[1], in_tree.shape[1])
            in_tree[:, :width] &= near[:, :width]
    return torch.cat([in_prefix, in_tree], dim=1)


def _scaled(rows: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return rows if factor is None else rows * factor.to(rows.dtype).view(1, -1, 1)


def _dot_dtype(dtype: torch.dtype):
    """What matrix products take: the query's dtype. Triton's interpreter has no bfloat16 product; float32 is exact."""
    from vllm_gsd.ops.attention.paged_triton import tl

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if interpreted() else names[dtype]


def _per_head(factor: torch.Tensor | None) -> int:
    """Step from one KV head's factor to the next: 0 where they share one."""
    return int(factor is not None and factor.numel() > 1)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Spans of the prefix: enough programs for the GPU twice over, none of fewer than 256 keys."""
    return max(1, min(_MOST_SPLITS, -(-2 * _processors(device) // programs), -(-longest // 256)))


def check_inputs(
    output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
    sinks, k_scale, v_scale, slot_positions, lse, num_splits, tiles, compute=None,
) -> None:  # fmt: skip
    """Raise ValueError, one sentence, for the first thing that does not fit; nothing is read from the device."""
    device, num_rows = query.device, query.shape[0]
    check_tensor("query", query, device, 3, *QUERY_DTYPES)
    check_tensor("output", output, device, 3, *{query.dtype: 0, compute or query.dtype: 0})
    if output.shape != query.shape:
        raise ValueError(f"output is {list(output.shape)}, but must be {list(query.shape)} as query")
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
            f"head_size is {head_size} in query and {key_cache.shape[3]} in key_cache, but must be one from 1 to 256"
        )
    if num_heads % kv_heads:
        raise ValueError(f"the {num_heads} query heads cannot share {kv_heads} KV heads evenly")
    check_tensor("query_start_loc", query_start_loc, device, 1, torch.int32, rows=1)
    requests = len(query_start_loc) - 1
    check_tensor("block_table", block_table, device, 2, torch.int32, rows=requests)
    check_tensor("prefix_lens", prefix_lens, device, 1, torch.int32, rows=requests)
    check_tensor("positions", positions, device, 1, torch.int64, rows=num_rows)
    check_tensor("tree_mask", tree_mask, device, 2, torch.int64, rows=num_rows)
    _check_options(device, num_heads, kv_heads, requests, sinks, k_scale, v_scale, slot_positions)
    if lse is not None:
        check_tensor("lse", lse, device, 2, torch.float32, *([compute] if compute else []), rows=num_rows)
    if num_splits is not None and not 1 <= num_splits <= _MOST_SPLITS:
        raise ValueError(f"num_splits is {num_splits}, but must be from 1 to {_MOST_SPLITS}")
    if tiles is not None and (tiles.keys not in (16, 32, 64) or tiles.rows < 16 or tiles.rows & (tiles.rows - 1)):
        raise ValueError(f"tiles are {tiles}, but rows must be a power of two from 16 and keys 16, 32 or 64")


def _check_options(device, num_heads, kv_heads, requests, sinks, k_scale, v_scale, slot_positions) -> None:
    if sinks is not None:
        check_tensor("sinks", sinks, device, 1, *QUERY_DTYPES, rows=num_heads)
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            check_tensor(name, factor, device, factor.dim(), torch.float32)
            if factor.numel() not in (1, kv_heads):
                raise ValueError(f"{name} has {factor.numel()} elements, but must have 1 or {kv_heads}")
    if slot_positions is not None:
        check_tensor("slot_positions", slot_positions, device, 2, torch.int64, rows=requests)
