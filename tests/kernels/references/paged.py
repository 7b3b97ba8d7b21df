"""Reference of ``vllm_gsd.ops.attention.paged``."""

import torch

from vllm_gsd.ops.attention.paged_checks import TreeTiles, check_inputs
from vllm_gsd.ops.attention.rows import AttendingRows


def paged_tree_attention_reference(
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
    compute: torch.dtype = torch.float64,
) -> None:
    """``paged_tree_attention`` in plain PyTorch, computed in ``compute``; ``output`` may have that dtype too.

    ``max_rows``, ``num_splits``, ``by_row`` and ``tiles`` do not change the result.

    Raises:
        ValueError: as there, and if a row attends a key for which its request's block table has no block.
    """
    extras = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "lse": lse}
    check_inputs(
        output, query, key_cache, value_cache, rows, **extras, num_splits=num_splits, tiles=tiles, compute=compute
    )
    group = query.shape[1] // key_cache.shape[2]
    start = rows.query_start_loc.tolist()
    for request, prefix in enumerate(rows.prefix_lens[: len(start) - 1].tolist()):
        own = slice(start[request], start[request + 1])
        attends = attended(prefix, rows.positions[own], rows.mask[own], sliding_window, include_prefix)
        keys = attends.any(0).nonzero().squeeze(1)
        blocks = blocks_of(keys, rows.block_table, key_cache, request)
        key, value = (
            scaled(cache[blocks, keys % key_cache.shape[1]].to(compute), factor).repeat_interleave(group, 1)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = torch.einsum("rhd,khd->hrk", query[own].to(compute), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights, total = softmax(scores.masked_fill(~attends[:, keys], -torch.inf), sinks)
        output[own] = torch.einsum("hrk,khd->rhd", weights, value).to(output.dtype)
        if lse is not None:
            lse[own] = total.T.to(lse.dtype)


def attended(
    prefix: int, positions: torch.Tensor, tree_mask: torch.Tensor, sliding_window: int, include_prefix: bool
) -> torch.Tensor:
    """Which logical index each row attends, bool ``[rows, prefix + 64 * words]``."""
    index = torch.arange(prefix, device=positions.device)
    in_prefix = torch.full((len(positions), prefix), include_prefix, device=positions.device)
    bits = torch.arange(64, device=positions.device)
    in_tree = (tree_mask.unsqueeze(2) >> bits & 1).bool().flatten(1)
    if sliding_window > 0:
        in_prefix &= positions.unsqueeze(1) - index < sliding_window
    return torch.cat([in_prefix, in_tree], dim=1)


def blocks_of(keys: torch.Tensor, block_table: torch.Tensor, cache: torch.Tensor, request: int) -> torch.Tensor:
    """The blocks that hold a request's keys, int64 ``[keys]``."""
    num_blocks, block_size = cache.shape[:2]
    if (keys >= block_table.shape[1] * block_size).any():
        raise ValueError(f"request {request} attends keys that its block_table has no blocks for")
    blocks = block_table[request, keys // block_size].long()
    if (blocks < 0).any() or (blocks >= num_blocks).any():
        raise ValueError(f"block_table of request {request} names a block that does not exist")
    return blocks


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of ``[heads, rows, keys]`` with each head's sink, and its log-sum-exp ``[heads, rows]``."""
    keys = scores.shape[2]
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], 2)
    total = torch.logsumexp(scores, 2) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
    weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(2))
    return weights[:, :, :keys], total


def scaled(rows: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Stored keys or values ``[n, kv_heads, head_size]`` times their factor."""
    return rows if factor is None else rows * factor.to(rows.dtype).view(1, -1, 1)
