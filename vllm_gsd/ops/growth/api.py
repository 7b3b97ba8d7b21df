"""Level-wise growth on the device; the results equal those of ``method.growth`` and ``method.draft_level``.

Neither function reads anything back: all shapes depend on numbers that the host passes.
"""

from typing import NamedTuple

import torch

from vllm_gsd.ops.dispatch import check_tensor, registers_for, require_triton, warps_for
from vllm_gsd.ops.growth.state import DeviceGraphs, Known, Rows


class Limits(NamedTuple):
    """Numbers that stay the same while an engine runs."""

    top_k: int  # candidates of each node
    theta_sib: float  # a candidate below this share of its best sibling is dropped
    theta_prob: float  # a node below this survival is not expanded
    max_length: int  # most tokens of a request
    max_positions: int  # most tokens that the draft can read
    max_slots: int  # most draft KV slots of a request; 0 without a draft model
    shift: int  # as ``DraftModel.shift``
    mask_token: int = -1  # of a draft of whole blocks, in all rows of a block but the root's; -1 for other drafts
    causal: bool = True  # whether the rows of a block attend only to those before


def begin(
    graphs: DeviceGraphs,
    rows: Rows,
    last: torch.Tensor,
    known: Known,
    texts: torch.Tensor,
    total_len: torch.Tensor,
    draft_length: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    limits: Limits,
) -> None:
    """Reset the graphs to their roots, and write the rows of the tokens for which the draft has no KV yet.

    A request with more such tokens than ``rows`` has places for it catches up over several steps, and its graph does
    not grow before. With a draft of whole blocks, the rows are a block behind all tokens but the last, for requests
    with room for it.

    Args:
        graphs: updated.
        rows: output, rows of text; ``source`` is the KV slot of the hidden state that the row reads.
        last: output, int64 ``[num_graphs]``, the row of each request's last token.
        texts: int32 ``[slots, most]``; total_len: int32 ``[slots]``, tokens in use.
        draft_length: int64 ``[slots]``, leading tokens with draft KV; updated.
        block_table: int32 ``[num_graphs, max_blocks]``; block_size: tokens of a block.
    """
    from vllm_gsd.ops.growth.triton import begin_kernel, triton

    device, count = graphs.state.device, len(graphs.state)
    check_tensor("texts", texts, device, 2, torch.int32)
    check_tensor("block_table", block_table, device, 2, torch.int32, rows=count)
    check_tensor("draft_length", draft_length, device, 1, torch.int64)
    check_tensor("known.limits", known.limits, device, 2, torch.int32, rows=count)
    check_tensor("known.trust", known.trust, device, 2, torch.float32, rows=count)
    require_triton("begin", texts)
    width = len(rows.token) // count
    begin_kernel[(count,)](
        graphs.nodes, graphs.chances, graphs.grams, graphs.above, graphs.best, graphs.frontier, graphs.state, *rows,
        last, known.limits, known.trust, texts, total_len, draft_length, block_table, texts.stride(0),
        block_table.stride(0), block_size, limits.max_length, limits.max_positions, limits.max_slots, limits.mask_token,
        graphs.capacity, graphs.num_nodes, width, DRAFTS=limits.max_slots > 0 or limits.mask_token >= 0,
        SHIFT=limits.shift, BLOCK=limits.mask_token >= 0, CAUSAL=limits.causal, GRAM=graphs.grams.shape[1],
        GRAPH_WORDS=graphs.above.shape[1], ROW_WORDS=rows.mask.shape[1], BEST=triton.next_power_of_2(graphs.num_nodes),
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def grow_level(
    graphs: DeviceGraphs,
    rows: Rows | None,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    limits: Limits,
) -> None:
    """Add the draft's candidates below the frontier, merge nodes, choose the next frontier and write its rows.

    Args:
        graphs: updated, ``frontier`` included.
        rows: output, rows of nodes, at most ``graphs.num_nodes`` for each request; ``source`` is the row of the node's
            parent among the rows that gave the candidates. None after the last level.
        tokens: int64 ``[num_graphs, width, k]``, distinct candidates of each place of the frontier, best first;
            negative for none.
        probs: float32 ``[num_graphs, width, k]``, falling.
        block_table, block_size, limits: as for ``begin``.
    """
    from vllm_gsd.ops.growth.triton import grow_kernel, triton

    device, count = graphs.state.device, len(graphs.state)
    check_tensor("tokens", tokens, device, 3, torch.int64, rows=count)
    check_tensor("probs", probs, device, 3, torch.float32, rows=count)
    check_tensor("block_table", block_table, device, 2, torch.int32, rows=count)
    require_triton("grow_level", tokens)
    if tokens.shape != probs.shape or tokens.shape[2] != limits.top_k or tokens.shape[1] > graphs.num_nodes:
        raise ValueError(f"tokens and probs must be [{count}, at most {graphs.num_nodes}, {limits.top_k}]")
    width, next_width = tokens.shape[1], 0 if rows is None else len(rows.token) // count
    lanes = triton.next_power_of_2(width * limits.top_k)
    block = triton.next_power_of_2(graphs.capacity)
    new = min(lanes, triton.next_power_of_2(max(1, graphs.capacity - 1)))  # no graph gets more nodes
    warps = warps_for(max(block, 8 * new))
    outputs = (graphs.state,) * 6 if rows is None else rows  # nothing is written after the last level
    grow_kernel[(count,)](
        *graphs, *outputs, tokens.contiguous(), probs.contiguous(), block_table, block_table.stride(0), block_size,
        limits.max_positions, limits.theta_sib, limits.theta_prob, graphs.num_nodes, graphs.capacity, width, next_width,
        TOP_K=limits.top_k, GRAM=graphs.grams.shape[1], GRAPH_WORDS=graphs.above.shape[1],
        SLOT_WORDS=graphs.slots.shape[1], CANDIDATES=lanes, PART=min(lanes, 1024), NEW=new, BLOCK=block,
        BEST=triton.next_power_of_2(graphs.num_nodes), CHUNK=max(2, min(64, 4096 // new)),
        WIDTH=triton.next_power_of_2(next_width) if next_width else 0, num_warps=warps, maxnreg=registers_for(warps),
    )  # fmt: skip
