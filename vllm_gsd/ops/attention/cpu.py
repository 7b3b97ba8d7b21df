"""Attention of tree rows over vLLM's paged KV cache on CPUs.

Which keys a row attends is described in :mod:`vllm_gsd.ops.attention.rows`.

    s[key] = scale * q . k[key];  with softcap: s = softcap * tanh(s / softcap)
    out = sum(e^s[key] * v[key]) / (sum(e^s[key]) + e^sink)        over the keys that the row attends
"""

import torch

from vllm_gsd.ops import use_kernel
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.kv_move.layout import KVLayout


def tree_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: KVLayout,
    rows: AttendingRows,
    scale: float,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of every row into ``output``; see the module's formula.

    Args:
        output: ``[num_rows, num_heads, head_size]``, dtype of ``query``. Rows after the last request's are
            left unchanged. A row that attends no key becomes 0.
        query: ``[num_rows, num_heads, head_size]`` float32, bfloat16 or float16; any row and head stride.
        kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]``, dtype of ``query``; query head h uses
            KV head ``h // (num_heads // kv_heads)``.
        layout: order of the elements in the cache's pages.
        rows: the rows and the keys that they attend.
        scale: factor of the scores.
        sliding_window: a row at position p attends the prefix's keys i <= p with ``p - i < sliding_window``; -1 or
            0 for all of them. The window does not apply to slots: the mask must leave out distant ones.
        softcap: 0 for none.
        sinks: ``[num_heads]``, a logit without a value in each head's softmax.

    Arithmetic is in float32. On AMD processors with AVX512-BF16, pairs of bfloat16 are multiplied with sums in float32,
    and the softmax's weights are rounded to bfloat16, as in FlashAttention. Only keys that a row of the request attends
    are read. Slots that a row does not attend, and the prefix behind it, may be NaN.

    A row's result depends on its query and on the keys and values that it attends, to the last bit: not on other rows,
    on where slots lie, on how a prompt is cut into chunks, nor on the number of threads.

    Raises:
        ValueError: shapes or dtypes do not fit, or the block table lacks an attended block.
    """
    if not use_kernel(query):
        tree_attention_reference(output, query, kv_cache, layout, rows, scale, sliding_window, softcap, sinks)
        return
    if sinks is not None:
        sinks = sinks.to(torch.float32)
    torch.ops.vllm_gsd.tree_attention(
        output, query, kv_cache, layout.tables, rows.block_table, rows.query_start_loc, rows.prefix_lens,
        rows.positions, rows.mask, scale, sliding_window, softcap, sinks,
    )  # fmt: skip


def tree_attention_reference(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: KVLayout,
    rows: AttendingRows,
    scale: float,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """:func:`tree_attention` in plain PyTorch; computes in float64 where ``query`` is float64.

    A row's last bits depend on the other rows, and a slot that holds NaN spoils all rows if one attends it.
    """
    _check(output, query, kv_cache, layout, rows)
    compute = torch.promote_types(query.dtype, torch.float32)
    heads_per_kv = query.shape[1] // kv_cache.shape[1]
    start = rows.query_start_loc.tolist()
    for request, prefix in enumerate(rows.prefix_lens[: len(start) - 1].tolist()):
        own = slice(start[request], start[request + 1])
        attends = _attended(prefix, rows.positions[own], rows.mask[own], sliding_window)
        keys = attends.any(0).nonzero().squeeze(1)  # logical indices that some row attends
        attends = attends[:, keys]
        if (keys >= rows.block_table.shape[1] * layout.block_size).any():
            raise ValueError(f"request {request} attends keys that its block_table has no blocks for")
        blocks = rows.block_table[request, keys // layout.block_size].long()
        if (blocks < 0).any() or (blocks >= kv_cache.shape[0]).any():
            raise ValueError(f"block_table of request {request} names a block that does not exist")
        key, value = layout.read(kv_cache, blocks * layout.block_size + keys % layout.block_size)
        key = key.repeat_interleave(heads_per_kv, dim=1).to(compute)
        value = value.repeat_interleave(heads_per_kv, dim=1).to(compute)
        scores = torch.einsum("rhd,khd->hrk", query[own].to(compute), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~attends, -torch.inf)
        weights = _softmax(scores, sinks)
        output[own] = torch.einsum("hrk,khd->rhd", weights, value).to(output.dtype)


def _attended(prefix: int, positions: torch.Tensor, tree_mask: torch.Tensor, sliding_window: int) -> torch.Tensor:
    """Which logical index each row attends, bool ``[rows, prefix + 64 * words]``."""
    index = torch.arange(prefix, device=positions.device)
    in_prefix = index <= positions.unsqueeze(1)
    if sliding_window > 0:
        in_prefix &= positions.unsqueeze(1) - index < sliding_window
    bits = torch.arange(64, device=positions.device)
    in_tree = (tree_mask.unsqueeze(2) >> bits & 1).bool().flatten(1)
    return torch.cat([in_prefix, in_tree], dim=1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys of ``[heads, rows, keys]`` and the head's sink; 0 for a row with only -inf."""
    heads, rows, keys = scores.shape
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(heads, 1, 1).expand(heads, rows, 1)
        scores = torch.cat([scores, sink], dim=2)
    nothing = (scores == -torch.inf).all(dim=2, keepdim=True)
    return torch.softmax(scores, dim=2).masked_fill(nothing, 0.0)[:, :, :keys]


def _check(
    output: torch.Tensor, query: torch.Tensor, kv_cache: torch.Tensor, layout: KVLayout, rows: AttendingRows
) -> None:
    """Raise ValueError unless the arguments fit; the compiled kernel checks them itself."""
    layout.check(kv_cache)
    if output.dtype != query.dtype or kv_cache.dtype != query.dtype:
        raise ValueError(
            f"output, query and kv_cache must have one dtype, not {output.dtype}, {query.dtype} and {kv_cache.dtype}"
        )
    if query.dim() != 3 or output.shape != query.shape or query.shape[2] != layout.head_size:
        raise ValueError(
            f"query and output must both be [num_rows, num_heads, {layout.head_size}], "
            f"not {list(query.shape)} and {list(output.shape)}"
        )
    if query.shape[1] % kv_cache.shape[1]:
        raise ValueError(f"the {query.shape[1]} query heads cannot share {kv_cache.shape[1]} KV heads evenly")
    if len(query) < (count := rows.check(query.device)):
        raise ValueError(f"query has {len(query)} rows, but query_start_loc ends at row {count}")
