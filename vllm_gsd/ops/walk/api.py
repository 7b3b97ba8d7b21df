"""The verification walk on the device: the path of each flattened tree that the target's samples follow.

As in ``method.verify.step_into``, the walk steps into the first child that carries the token sampled at its place. If
no child does, that token is the bonus token. All results have fixed, padded shapes and stay on the device.
:func:`vllm_gsd.ops.kv_move.paged.move_paged_kv` takes the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton
from vllm_gsd.ops.flatten.api import DeviceTrees


class Accepted(NamedTuple):
    """The accepted paths; L is the levels of the walk, as many as the trees have places."""

    tokens: torch.Tensor  # int64 [num_trees, L], accepted tokens, the bonus token, then zeros
    rows: torch.Tensor  # int64 [num_trees, L], the verified row of each of these tokens, then the last one's again
    count: torch.Tensor  # int32 [num_trees], tokens that are not padding: accepted nodes + 1
    last: torch.Tensor  # int64 [num_trees], the row within its tree at which the walk ended; 0 is the root
    src_slots: torch.Tensor  # int64 [num_trees, L - 1], KV slot of each accepted node, -1 if it need not move
    dst_slots: torch.Tensor  # int64 [num_trees, L - 1], KV slot to move it to, -1 where src_slots is -1

    @classmethod
    def empty(cls, num_trees: int, levels: int, device: torch.device) -> Accepted:
        """Tensors with arbitrary content."""
        shapes = ((num_trees, levels), (num_trees, levels), (num_trees,), (num_trees,))
        moves = ((num_trees, levels - 1), (num_trees, levels - 1))
        dtypes = (torch.int64, torch.int64, torch.int32, *[torch.int64] * 3)
        of = zip((*shapes, *moves), dtypes, strict=True)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in of))


def accept_walk(
    trees: DeviceTrees,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    batch_starts: torch.Tensor,
    slot_mapping: torch.Tensor,
    invalid: torch.Tensor | None = None,
    max_steps: int | None = None,
) -> Accepted:
    """Walk all trees of a batch.

    Args:
        trees: the graphs as ``lay_out_rows`` gives them; place p of a tree is its row p.
        sampled: int64 ``[num_rows]``, the token sampled at each verified row (for greedy, the argmax of its logits).
        starts: int32 ``[num_trees + 1]``; tree t has the verified rows ``[starts[t], starts[t + 1])``.
        batch_starts: int32 ``[>= num_trees + 1]``, each request's first row of the batch; its last rows are verified.
        slot_mapping: int64 ``[>= rows of the batch]``, KV slot of every row of the batch.
        invalid: bool ``[num_rows]``, rows that no walk may step into; None if there are none.
        max_steps: bound on the accepted nodes of a path; None for no bound.

    The call is safe to capture: shapes depend on the arguments' shapes only, and nothing is read back.
    """
    places = check_walk(trees, sampled, starts, batch_starts, slot_mapping, invalid)
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"max_steps is {max_steps}, but must be at least 0")
    require_triton("accept_walk", sampled)
    from vllm_gsd.ops.walk.triton import accept_walk_kernel, triton

    count = len(trees.size)
    accepted = Accepted.empty(count, places, sampled.device)
    if count:
        accept_walk_kernel[(count,)](
            *accepted, trees.token, trees.parent, trees.size, sampled, invalid, starts, batch_starts, slot_mapping,
            places, places if max_steps is None else min(max_steps, places), INVALID=invalid is not None,
            BLOCK=triton.next_power_of_2(max(16, places)), num_warps=1,
        )  # fmt: skip
    return accepted


def check_walk(
    trees: DeviceTrees,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    batch_starts: torch.Tensor,
    slot_mapping: torch.Tensor,
    invalid: torch.Tensor | None,
) -> int:
    """Return the places of the trees; raise ValueError for the first argument that does not fit."""
    device, count = sampled.device, len(trees.size)
    check_tensor("sampled", sampled, device, 1, torch.int64)
    for name in ("token", "parent"):
        check_tensor(name, getattr(trees, name), device, 2, torch.int64, rows=count)
    check_tensor("starts", starts, device, 1, torch.int32, rows=count + 1)
    check_tensor("batch_starts", batch_starts, device, 1, torch.int32, rows=count + 1)
    check_tensor("slot_mapping", slot_mapping, device, 1, torch.int64)
    if invalid is not None:
        check_tensor("invalid", invalid, device, 1, torch.bool, rows=len(sampled))
    return trees.num_places()
