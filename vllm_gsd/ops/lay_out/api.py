"""The rows that verify a step's graphs: their nodes, positions and attention masks, with one launch.

Equal to ``method.lay_out`` on the host. A request's verified rows are its last rows of the batch: a root, and then a
row per node. Rows without a node attend to the root and themselves, and stand at the root's position.
"""

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton, warps_for
from vllm_gsd.ops.flatten.api import DeviceTrees


def lay_out_rows(
    kept: DeviceTrees,
    slots: torch.Tensor,
    valid: torch.Tensor,
    starts: torch.Tensor,
    batch_starts: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> DeviceTrees:
    """Assign the graphs of a batch to its verified rows.

    Args:
        slots: int64 ``[num_requests]``, the slot of each request.
        valid: int32 ``[num_requests]``, 0 where the slot's graph is not the request's.
        starts: int32 ``[num_requests + 1]``; request r verifies the rows ``[starts[r], starts[r + 1])``.
        batch_starts: int32 ``[>= num_requests + 1]``, each request's first row of the batch.
        positions: int64 ``[>= rows of the batch]``, in row order. Those of nodes become root position + depth.
        mask: int64 ``[>= verified rows, words]``, receives a bit per row of the request that a row attends to.
        prefix_lens: int32 ``[>= num_requests]``, receives the positions of the roots.

    Returns:
        The requests' graphs, cut to their rows, with as many places as ``kept``: shapes do not depend on how many rows
        a step verifies, so all steps share their kernels.

    The call is safe to capture: shapes depend on the arguments' shapes only, nothing is read back.
    """
    device, count = slots.device, len(slots)
    check_tensor("slots", slots, device, 1, torch.int64)
    check_tensor("valid", valid, device, 1, torch.int32, rows=count)
    check_tensor("starts", starts, device, 1, torch.int32, rows=count + 1)
    check_tensor("batch_starts", batch_starts, device, 1, torch.int32, rows=count + 1)
    check_tensor("positions", positions, device, 1, torch.int64)
    check_tensor("mask", mask, device, 2, torch.int64)
    check_tensor("prefix_lens", prefix_lens, device, 1, torch.int32, rows=count)
    places = kept.num_places()
    if mask.shape[1] * 64 < places:
        raise ValueError(f"masks of {mask.shape[1]} words have no bits for {places} rows")
    require_triton("lay_out_rows", slots)
    from vllm_gsd.ops.lay_out.triton import lay_out_kernel, triton

    trees = DeviceTrees(*(values.new_empty((count, *values.shape[1:])) for values in kept))
    if count:
        lay_out_kernel[(count,)](
            *trees, *kept, slots, valid, starts, batch_starts, positions, mask, prefix_lens, places,
            WORDS=mask.shape[1], BLOCK=(block := triton.next_power_of_2(places)), num_warps=warps_for(block),
        )  # fmt: skip
    return trees
