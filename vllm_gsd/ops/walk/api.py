"""The verification walk on the device: which path of each flattened tree its own samples follow.

Same rule as ``method.verify.step_into``: at a place, the first child that carries the token sampled there is stepped
into; where there is none, that token is the bonus token. Everything has a fixed, padded shape and stays on the device,
and what it returns is what :func:`vllm_gsd.ops.kv_move.paged.move_paged_kv` takes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from vllm_gsd.method.constants import NONE
from vllm_gsd.method.verify import child_carrying
from vllm_gsd.ops.dispatch import check_tensor, use_triton

PADDING = -1
_MOST_NODES = 4096


class Accepted(NamedTuple):
    """What a walk found; D is ``max_depth``."""

    path: torch.Tensor  # int32 [num_trees, D], places of the accepted nodes in their tree's list, then -1
    length: torch.Tensor  # int32 [num_trees], how many nodes were accepted
    tokens: torch.Tensor  # int64 [num_trees, D + 1], accepted tokens, the bonus token, then -1
    src_slots: torch.Tensor | None  # int64 [num_trees, D], KV slot that an accepted node has; -1: it need not move
    dst_slots: torch.Tensor | None  # int64 [num_trees, D], KV slot that it belongs in; -1 where src_slots is

    @property
    def bonus(self) -> torch.Tensor:
        """The last token of each tree, int64 ``[num_trees]``; -1 for a tree without rows."""
        return self.tokens.gather(1, self.length.long().unsqueeze(1)).squeeze(1)


def accept_walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    max_depth: int,
    slots: torch.Tensor | None = None,
    max_nodes: int | None = None,
) -> Accepted:
    """Walk all trees of a batch.

    Args:
        tokens: int64 ``[num_rows]``, rows of all trees one after the other; the first row of a tree is its root, whose
            token is not read.
        parents: int32 ``[num_rows]``, place of each row's parent within its own tree, below its own; a root has -1. A
            negative parent elsewhere: the row is never reached.
        sampled: int64 or int32 ``[num_rows]``, the token sampled at each row (for greedy, the argmax of its logits).
        starts: int32 ``[num_trees + 1]``; tree t has rows ``[starts[t], starts[t + 1])``. A tree without rows is
            padding.
        max_depth: most nodes of a path that are accepted, from 0.
        slots: int64 ``[num_rows]``, KV slot of every row. None: no slots are returned.
        max_nodes: most rows of a tree, at most 4096; None: ``num_rows``.

    Capture-safe: shapes depend on arguments' shapes and numbers alone, and nothing is read back.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a number is out of range.
    """
    max_nodes = _check(tokens, parents, sampled, starts, max_depth, slots, max_nodes)
    if not use_triton(tokens):
        return accept_walk_reference(tokens, parents, sampled, starts, max_depth, slots)
    from vllm_gsd.ops.walk.triton import accept_walk_kernel, triton

    accepted = _empty(len(starts) - 1, max_depth, tokens.device, slots is not None)
    if len(starts) > 1:
        accept_walk_kernel[(len(starts) - 1,)](
            accepted.path, accepted.length, accepted.tokens, accepted.src_slots, accepted.dst_slots, tokens, parents,
            sampled, starts, slots, accepted.path.stride(0), accepted.tokens.stride(0), max_depth,
            MOVES=slots is not None, BLOCK=triton.next_power_of_2(max(1, max_nodes)), num_warps=1,
        )  # fmt: skip
    return accepted


def accept_walk_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    max_depth: int,
    slots: torch.Tensor | None = None,
) -> Accepted:
    """:func:`accept_walk` in plain Python."""
    _check(tokens, parents, sampled, starts, max_depth, slots, None)
    accepted = _empty(len(starts) - 1, max_depth, tokens.device, slots is not None)
    for tensor in accepted:
        if tensor is not None:
            tensor.fill_(PADDING)
    accepted.length.zero_()
    bounds = starts.tolist()
    for tree, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            continue
        token, parent = tokens[first:end].numpy(force=True), parents[first:end].numpy(force=True)
        drawn = sampled[first:end].tolist()
        place = 0
        for depth in range(max_depth):
            child = child_carrying(token, parent, place, drawn[place])
            if child == NONE:
                break
            accepted.tokens[tree, depth] = drawn[place]
            place = child
            accepted.path[tree, depth] = place
            accepted.length[tree] += 1
            if slots is not None and place != depth + 1:
                assert accepted.src_slots is not None and accepted.dst_slots is not None
                accepted.src_slots[tree, depth] = slots[first + place]
                accepted.dst_slots[tree, depth] = slots[first + depth + 1]
        accepted.tokens[tree, accepted.length[tree]] = drawn[place]
    return accepted


def _empty(num_trees: int, max_depth: int, device: torch.device, moves: bool) -> Accepted:
    def padded(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Accepted(
        padded(num_trees, max_depth, dtype=torch.int32),
        padded(num_trees, dtype=torch.int32),
        padded(num_trees, max_depth + 1, dtype=torch.int64),
        padded(num_trees, max_depth, dtype=torch.int64) if moves else None,
        padded(num_trees, max_depth, dtype=torch.int64) if moves else None,
    )


def _check(tokens, parents, sampled, starts, max_depth, slots, max_nodes) -> int:
    device, rows = tokens.device, len(tokens)
    check_tensor("tokens", tokens, device, 1, torch.int64)
    check_tensor("parents", parents, device, 1, torch.int32, rows=rows)
    check_tensor("sampled", sampled, device, 1, torch.int64, torch.int32, rows=rows)
    check_tensor("starts", starts, device, 1, torch.int32, rows=1)
    if slots is not None:
        check_tensor("slots", slots, device, 1, torch.int64, rows=rows)
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}, but must be at least 0")
    max_nodes = rows if max_nodes is None else min(max_nodes, rows)
    if max_nodes > _MOST_NODES:
        raise ValueError(f"a tree may have {max_nodes} rows, but at most {_MOST_NODES} are possible; set max_nodes")
    return max_nodes
