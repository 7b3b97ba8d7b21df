"""Tree rows in fixed shapes at fixed addresses, for steps in which every request verifies all the nodes it may have.

What a full CUDA graph has captured it reads again at every replay: masks and prefix lengths are written to where they
were, everything else lies in vLLM's own buffers.
"""

import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.v2.device_step import DeviceStep


class PaddedTreeRows:
    """Buffers for the tree rows of a whole batch.

    Args:
        num_requests: most requests of a batch.
        rows_per_request: root and nodes of each.
        device: where the target is.
    """

    def __init__(self, num_requests: int, rows_per_request: int, device: torch.device):
        self.rows_per_request = rows_per_request
        words = (rows_per_request + 63) // 64
        self.mask = torch.zeros((num_requests * rows_per_request, words), dtype=torch.int64, device=device)
        self.prefix_lens = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def fits(self, step: DeviceStep, num_rows: int) -> bool:
        """Whether all rows of a batch are those of whole graphs."""
        return num_rows == step.sizes.sum() and bool((step.sizes == self.rows_per_request).all())

    def fill(self, step: DeviceStep, positions: torch.Tensor) -> None:
        """Write a step's masks and prefix lengths.

        Args:
            step: one that fits; its rows are the batch's.
            positions: int64 [>= num_rows], of the batch's rows; those of roots are read.
        """
        num_requests = len(step.sizes)
        num_rows = num_requests * self.rows_per_request
        self.mask[:num_rows].copy_(step.masks().flatten(0, 1))
        self.prefix_lens[:num_requests].copy_(positions[: num_rows : self.rows_per_request])

    def clear(self) -> None:
        """Let a dummy batch attend nothing: its block tables are no request's."""
        self.mask.zero_()
        self.prefix_lens.zero_()

    def rows(self, num_requests: int, query_start_loc, positions, block_table) -> TreeRows:
        """Tree rows of the first requests of a batch, padding among them.

        Args:
            query_start_loc: int32 [> num_requests]; positions: int64 [>= num_requests * rows_per_request];
                block_table: int32 [>= num_requests, max_blocks]; the buffers that vLLM fills at every step.
        """
        num_rows = num_requests * self.rows_per_request
        return TreeRows(
            query_start_loc=query_start_loc[: num_requests + 1],
            prefix_lens=self.prefix_lens[:num_requests],
            block_table=block_table[:num_requests],
            positions=positions[:num_rows],
            mask=self.mask[:num_rows],
            rows=None,
            max_rows=self.rows_per_request,
        )
