"""The verification walk on the device: the path of each flattened tree that the target's samples follow.

As in ``method.verify.step_into``, the walk steps into the first child that carries the token sampled at its place. If
no child does, that token is the bonus token. All results have fixed, padded shapes and stay on the device.
:func:`vllm_gsd.ops.kv_move.paged.move_paged_kv` takes the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton

PADDING = -1
_MOST_NODES = 4096


class Accepted(NamedTuple):
    """The accepted paths; D is ``max_depth``."""

    path: torch.Tensor  # int32 [num_trees, D], places of the accepted nodes in their tree, then -1
    length: torch.Tensor  # int32 [num_trees], number of accepted nodes
    tokens: torch.Tensor  # int64 [num_trees, D + 1], accepted tokens, the bonus token, then -1
    src_slots: torch.Tensor | None  # int64 [num_trees, D], KV slot of each accepted node, -1 if it need not move
    dst_slots: torch.Tensor | None  # int64 [num_trees, D], KV slot to move it to, -1 where src_slots is -1

    @classmethod
    def empty(cls, num_trees: int, max_depth: int, device: torch.device, moves: bool) -> Accepted:
        """Tensors with arbitrary content."""
        slots = (
            torch.empty((num_trees, max_depth), dtype=torch.int64, device=device) if moves else None for _ in range(2)
        )
        return cls(
            torch.empty((num_trees, max_depth), dtype=torch.int32, device=device),
            torch.empty(num_trees, dtype=torch.int32, device=device),
            torch.empty((num_trees, max_depth + 1), dtype=torch.int64, device=device),
            *slots,
        )

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
        tokens: int64 ``[num_rows]``, the rows of all trees in sequence. A tree's first row is its root, whose token is
            not read.
        parents: int32 ``[num_rows]``, the place of each row's parent within its own tree, before its own place; -1 for
            a root. Other rows with a negative parent are never reached.
        sampled: int64 or int32 ``[num_rows]``, the token sampled at each row (for greedy, the argmax of its logits).
        starts: int32 ``[num_trees + 1]``; tree t has rows ``[starts[t], starts[t + 1])``; a tree without
            rows is padding.
        max_depth: bound on the accepted nodes of a path, at least 0.
        slots: int64 ``[num_rows]``, KV slot of every row; None to return no slots.
        max_nodes: bound on the rows of a tree, at most 4096; None for ``num_rows``.

    The call is safe to capture: shapes depend on the arguments' shapes and numbers only, and nothing is read back.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a number is out of range.
        RuntimeError: Triton cannot run on these tensors.
    """
    max_nodes = check_walk(tokens, parents, sampled, starts, max_depth, slots, max_nodes)
    require_triton("accept_walk", tokens)
    from vllm_gsd.ops.walk.triton import accept_walk_kernel, triton

    accepted = Accepted.empty(len(starts) - 1, max_depth, tokens.device, slots is not None)
    if len(starts) > 1:
        accept_walk_kernel[(len(starts) - 1,)](
            accepted.path, accepted.length, accepted.tokens, accepted.src_slots, accepted.dst_slots, tokens, parents,
            sampled, starts, slots, accepted.path.stride(0), accepted.tokens.stride(0), max_depth,
            MOVES=slots is not None, BLOCK=triton.next_power_of_2(max(1, max_nodes)), num_warps=1,
        )  # fmt: skip
    return accepted


def check_walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    max_depth: int,
    slots: torch.Tensor | None,
    max_nodes: int | None,
) -> int:
    """Return the bound on a tree's rows; raise ValueError for the first argument that does not fit."""
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
