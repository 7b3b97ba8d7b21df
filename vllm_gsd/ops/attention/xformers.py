"""Tree attention through xformers: another implementation to choose, and a witness that shares no code with ours.

As ``xformers.ops.tree_attention`` does: the committed keys through its paged split-K kernel, the tree's keys with an
explicit bias, both merged by log-sum-exp. xformers (0.0.35 or newer) is imported when this is first called.
"""

from __future__ import annotations

import itertools

import torch

from vllm_gsd.ops.attention.paged import check_inputs

_HEAD_SIZES = (16, 32, 64, 128, 256)
_PAGE = 64  # its split-K kernel's ``BLOCK_N``: it reads so many keys of a page at once


def load_xformers():
    """``xformers.ops.fmha``.

    Raises:
        ImportError: it is missing or does not load; one sentence.
    """
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import triton_splitk  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"tree attention by xformers needs xformers 0.0.35 or newer, which cannot be imported ({error}); "
            "pip install 'xformers>=0.0.35' or choose another implementation"
        ) from error
    return fmha


def xformers_tree_attention(
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
) -> None:
    """What :func:`vllm_gsd.ops.attention.paged.paged_tree_attention` writes, by xformers.

    Takes bfloat16 and float16 with a cache of the same dtype, tokens before heads in memory (vLLM's NHD layout), blocks
    of a multiple of 64 tokens, and head sizes 16 to 256 that are powers of two, on an SM80 or newer. Reads lengths on
    the host, hence is not capture-safe.

    Raises:
        ImportError: xformers is missing.
        ValueError: inputs do not fit, or ask for a window, a soft cap, sinks, or what else it cannot do.
    """
    check_inputs(
        output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
        sinks, None, None, None, None, None, None,
    )  # fmt: skip
    _refuse(query, key_cache, sliding_window, softcap, sinks)
    fmha = load_xformers()
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    starts, prefixes = query_start_loc.tolist(), prefix_lens.tolist()
    rows = [end - start for start, end in itertools.pairwise(starts)]
    total, group = starts[-1], query.shape[1] // kv_heads
    if not total:
        return

    def by_group(tensor: torch.Tensor) -> torch.Tensor:
        """Every KV head seen by each of its query heads: [1, tokens, KV heads, group, head size]."""
        return tensor.reshape(1, -1, kv_heads, 1, head_size).expand(-1, -1, -1, group, -1)

    heads = query[:total].reshape(1, total, kv_heads, group, head_size)
    # Requests one after the other: the paged mask is block-diagonal.
    bias = fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=rows, kv_seqlen=prefixes[: len(rows)], block_tables=block_table[: len(rows)].contiguous(),
        page_size=block_size, device=query.device,
    )  # fmt: skip
    paged = (cache.view(num_blocks * block_size, kv_heads, head_size) for cache in (key_cache, value_cache))
    parts = [
        fmha.memory_efficient_attention_partial(
            heads, *map(by_group, paged), attn_bias=bias, scale=scale, op=fmha.triton_splitk.FwOp
        )
    ]
    # The tree's slots, each request padded to the same number of rows and slots.
    most, slots = max(rows), 64 * tree_mask.shape[1]
    request = torch.repeat_interleave(torch.arange(len(rows), device=query.device), torch.tensor(rows).to(query.device))
    line = torch.arange(total, device=query.device) - query_start_loc.long()[request]
    bits = torch.arange(64, device=query.device)
    attends = (tree_mask[:total].unsqueeze(2) >> bits & 1).bool().flatten(1)
    padded = query.new_full((len(rows), kv_heads, group, most, slots), -torch.inf)
    padded[request, :, :, line] = torch.zeros_like(attends, dtype=query.dtype).masked_fill(~attends, -torch.inf)[
        :, None, None
    ]
    padded_query = query.new_zeros((len(rows), most, kv_heads, group, head_size))
    padded_query[request, line] = heads[0]
    index = prefix_lens[: len(rows), None].long() + torch.arange(slots, device=query.device)
    # Slots behind the table are attended by nobody; any block will do for them.
    block = block_table.gather(1, (index // block_size).clamp(max=block_table.shape[1] - 1)).long().clamp(min=0)
    key, value = (
        cache[block, index % block_size].unsqueeze(3).expand(-1, -1, -1, group, -1)
        for cache in (key_cache, value_cache)
    )
    used = torch.zeros(len(rows), slots, dtype=torch.bool, device=query.device)
    used.index_put_((request[:, None], torch.arange(slots, device=query.device)[None]), attends, accumulate=True)
    key, value = (tensor.masked_fill(~used[:, :, None, None, None], 0) for tensor in (key, value))
    tree, tree_lse = fmha.memory_efficient_attention_partial(
        padded_query, key, value, attn_bias=padded, scale=scale, op=fmha.triton_splitk.FwOp
    )
    parts.append((tree[request, line].unsqueeze(0), tree_lse.permute(1, 2, 0, 3)[:, :, request, line].unsqueeze(0)))
    merged, _ = fmha.merge_attentions(
        [part for part, _ in parts], [lse for _, lse in parts], write_lse=False, output_dtype=output.dtype
    )
    output[:total] = merged.reshape(total, -1, head_size)


def _refuse(query, key_cache, sliding_window, softcap, sinks) -> None:
    for name, asked in (
        ("a sliding window", sliding_window > 0),
        ("a soft cap", softcap != 0),
        ("sinks", sinks is not None),
        (f"a {key_cache.dtype} cache", key_cache.dtype != query.dtype),
        (f"{query.dtype}", query.dtype == torch.float32),
        (f"head size {query.shape[2]}", query.shape[2] not in _HEAD_SIZES),
        ("a cache with heads before tokens in memory", not _flat(key_cache)),
        (f"blocks of {key_cache.shape[1]} tokens (a multiple of {_PAGE} it does)", key_cache.shape[1] % _PAGE != 0),
    ):
        if asked:
            raise ValueError(f"tree attention by xformers does not support {name}; choose another implementation")


def _flat(cache: torch.Tensor) -> bool:
    """Whether blocks and tokens are one dimension in memory."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)
