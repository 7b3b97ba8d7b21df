"""Tree rows with fixed shapes at fixed addresses, for steps in which every request verifies a full graph.

A full CUDA graph reads the same addresses at every replay. Masks and prefix lengths have buffers here; all other inputs
are in vLLM's own buffers.
"""

import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.v2.device_step import DeviceStep


class PaddedTreeRows:
    """Buffers for the tree rows of a batch.

    Args:
        num_requests: the most requests of a batch.
        rows_per_request: the rows of a full graph, its root included.
        device: the target's device.
    """

    def __init__(self, num_requests: int, rows_per_request: int, device: torch.device) -> None:
        self.rows_per_request = rows_per_request
        words = (rows_per_request + 63) // 64
        self.mask = torch.zeros((num_requests * rows_per_request, words), dtype=torch.int64, device=device)
        self.prefix_lens = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def fits(self, step: DeviceStep, num_rows: int) -> bool:
        """Whether a batch of ``num_rows`` rows consists of full graphs only."""
        return num_rows == step.sizes.sum() and bool((step.sizes == self.rows_per_request).all())

    def fill(self, step: DeviceStep, positions: torch.Tensor) -> None:
        """Write a step's masks and prefix lengths.

        Args:
            step: a step for which ``fits`` is true.
            positions: int64 [>= num_rows], the positions of the batch's rows; only those of the roots are read.
        """
        num_requests = len(step.sizes)
        num_rows = num_requests * self.rows_per_request
        self.mask[:num_rows].copy_(step.masks().flatten(0, 1))
        self.prefix_lens[:num_requests].copy_(positions[: num_rows : self.rows_per_request])

    def clear(self) -> None:
        """Clear the masks and prefix lengths, because the block tables of a dummy batch belong to no request."""
        self.mask.zero_()
        self.prefix_lens.zero_()

    def rows(
        self, num_requests: int, query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor
    ) -> TreeRows:
        """The tree rows of the first ``num_requests`` requests of a batch, which may include padding.

        The tensors are buffers that vLLM fills at every step.

        Args:
            num_requests: the number of requests.
            query_start_loc: int32 [> num_requests].
            positions: int64 [>= num_requests * rows_per_request].
            block_table: int32 [>= num_requests, max_blocks].
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
