"""Tree attention through xformers: an alternative implementation, and a check that shares no code with ours.

As in ``xformers.ops.tree_attention``, the paged split-K kernel attends the prefix, the same kernel with an explicit
bias attends the tree's slots, and both results are merged by log-sum-exp. xformers (0.0.35 or newer) is imported at the
first call.
"""

import itertools
from types import ModuleType

import torch

from vllm_gsd.ops.attention.paged_checks import check_inputs
from vllm_gsd.ops.attention.rows import AttendingRows

HEAD_SIZES = (16, 32, 64, 128, 256)
_PAGE = 64  # ``BLOCK_N`` of the split-K kernel: the number of keys of a page that it reads at once


def load_xformers() -> ModuleType:
    """Return ``xformers.ops.fmha``.

    Raises:
        ImportError: xformers is missing or does not load; one sentence.
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
    rows: AttendingRows,
    scale: float,
    *,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write what :func:`vllm_gsd.ops.attention.paged.paged_tree_attention` writes; arguments as there.

    Takes bfloat16 and float16 with a cache of the same dtype, tokens before heads in memory (vLLM's NHD layout), blocks
    of a multiple of 64 tokens, and head sizes 16 to 256 that are powers of two, on SM80 or newer. The lengths are read
    on the host, so the call cannot be captured.

    Raises:
        ImportError: xformers is missing.
        ValueError: inputs do not fit or are not supported, such as a window, a soft cap or sinks.
    """
    check_inputs(output, query, key_cache, value_cache, rows, sinks=sinks)
    _refuse(query, key_cache, sliding_window, softcap, sinks)
    fmha = load_xformers()
    starts = rows.query_start_loc.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    if not starts[-1]:
        return
    heads = query[: starts[-1]].unflatten(1, (key_cache.shape[2], -1))  # query heads grouped by KV head
    inputs = heads, (key_cache, value_cache), rows, counts, scale
    parts = [_attend_prefix(fmha, *inputs), _attend_slots(fmha, *inputs)]
    merged, _ = fmha.merge_attentions(
        [part for part, _ in parts], [lse for _, lse in parts], write_lse=False, output_dtype=output.dtype
    )
    output[: starts[-1]] = merged.reshape(starts[-1], *output.shape[1:])


def _attend_prefix(
    fmha: ModuleType,
    heads: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    rows: AttendingRows,
    counts: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the prefixes: output ``[1, rows, kv_heads, group, head_size]`` and its log-sum-exp.

    ``counts`` has the number of rows of each request.
    """
    num_blocks, block_size, kv_heads, head_size = caches[0].shape
    # The paged mask is block-diagonal: requests lie one after the other in a batch of one.
    bias = fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=counts, kv_seqlen=rows.prefix_lens[: len(counts)].tolist(),
        block_tables=rows.block_table[: len(counts)].contiguous(), page_size=block_size, device=heads.device,
    )  # fmt: skip
    key, value = (
        cache.view(1, num_blocks * block_size, kv_heads, 1, head_size).expand(-1, -1, -1, heads.shape[2], -1)
        for cache in caches
    )
    return fmha.memory_efficient_attention_partial(
        heads[None], key, value, attn_bias=bias, scale=scale, op=fmha.triton_splitk.FwOp
    )


def _attend_slots(
    fmha: ModuleType,
    heads: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    rows: AttendingRows,
    counts: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the trees' slots, shaped as in ``_attend_prefix``; requests are padded to equal rows and slots."""
    device, (total, kv_heads, group, head_size) = heads.device, heads.shape
    request = torch.repeat_interleave(torch.arange(len(counts), device=device), torch.tensor(counts).to(device))
    line = torch.arange(total, device=device) - rows.query_start_loc.long()[request]
    attends = (rows.mask[:total].unsqueeze(2) >> torch.arange(64, device=device) & 1).bool().flatten(1)
    slots = torch.arange(attends.shape[1], device=device)
    bias = heads.new_full((len(counts), kv_heads, group, max(counts), len(slots)), -torch.inf)
    bias[request, :, :, line] = heads.new_zeros(attends.shape).masked_fill(~attends, -torch.inf)[:, None, None]
    query = heads.new_zeros((len(counts), max(counts), kv_heads, group, head_size))
    query[request, line] = heads
    used = torch.zeros(len(counts), len(slots), dtype=torch.bool, device=device)
    used.index_put_((request[:, None], slots[None]), attends, accumulate=True)
    index, block_size = rows.prefix_lens[: len(counts), None].long() + slots, caches[0].shape[1]
    # No row attends the slots beyond the block table, so any block will do for them. A slot that
    # holds NaN would spoil the rows that do not attend it, too.
    last = rows.block_table.shape[1] - 1
    block = rows.block_table.gather(1, (index // block_size).clamp(max=last)).long().clamp(min=0)
    key, value = (
        cache[block, index % block_size]
        .nan_to_num(0.0, 0.0, 0.0)
        .unsqueeze(3)
        .expand(-1, -1, -1, group, -1)
        .masked_fill(~used[:, :, None, None, None], 0)
        for cache in caches
    )
    attention, lse = fmha.memory_efficient_attention_partial(
        query, key, value, attn_bias=bias, scale=scale, op=fmha.triton_splitk.FwOp
    )
    return attention[request, line].unsqueeze(0), lse.permute(1, 2, 0, 3)[:, :, request, line].unsqueeze(0)


def _refuse(
    query: torch.Tensor, key_cache: torch.Tensor, sliding_window: int, softcap: float, sinks: torch.Tensor | None
) -> None:
    block_size = key_cache.shape[1]
    one_dimension = key_cache.stride(0) == block_size * key_cache.stride(1)  # as which blocks and tokens can be viewed
    for name, asked in (
        ("a sliding window", sliding_window > 0),
        ("a soft cap", softcap != 0),
        ("sinks", sinks is not None),
        (f"a {key_cache.dtype} cache", key_cache.dtype != query.dtype),
        (f"{query.dtype}", query.dtype == torch.float32),
        (f"head size {query.shape[2]}", query.shape[2] not in HEAD_SIZES),
        ("a cache with heads before tokens in memory", not one_dimension),
        (f"blocks of {block_size} tokens, only of a multiple of {_PAGE}", block_size % _PAGE != 0),
    ):
        if asked:
            raise ValueError(f"tree attention by xformers does not support {name}; choose another implementation")
