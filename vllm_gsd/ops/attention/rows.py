"""The rows of tree attention, and which keys of a paged KV cache each of them attends.

A request's keys are its text (the *prefix*, logical indices ``[0, prefix)``) and the nodes of its tree (*slots* 0, 1...
at logical indices ``prefix + slot``). A row attends the prefix up to its own position and the slots in its mask. A node
attends the whole prefix, its ancestors and itself. A row of text attends no slot, since its own key is in the prefix;
therefore prompts need no mask.
"""

from dataclasses import dataclass

import torch

from vllm_gsd.ops.dispatch import check_tensor


@dataclass(frozen=True)
class AttendingRows:
    """Rows of a batch, request by request."""

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]; request r has rows [start[r], start[r + 1])
    prefix_lens: torch.Tensor  # int32 [num_reqs]
    # int32 [num_reqs, max_blocks]; logical index i of request r lies in block ``block_table[r, i // block_size]``, slot
    # ``i % block_size``.
    block_table: torch.Tensor
    positions: torch.Tensor  # int64 [num_rows], each row's position in its sequence
    # int64 [num_rows, words]; bit j of word w is set if the row attends slot 64 * w + j. There may be no words.
    mask: torch.Tensor

    def check(self, device: torch.device, num_rows: int | None = None) -> int:
        """Check the tensors of ``num_rows`` rows; None for as many as ``query_start_loc`` says, which is read then.

        Returns:
            the number of rows.

        Raises:
            ValueError: a tensor does not fit.
        """
        requests = len(self.query_start_loc) - 1
        check_tensor("query_start_loc", self.query_start_loc, device, 1, torch.int32, rows=1)
        num_rows = int(self.query_start_loc[-1]) if num_rows is None else num_rows
        check_tensor("block_table", self.block_table, device, 2, torch.int32, rows=requests)
        check_tensor("prefix_lens", self.prefix_lens, device, 1, torch.int32, rows=requests)
        check_tensor("positions", self.positions, device, 1, torch.int64, rows=num_rows)
        check_tensor("tree_mask", self.mask, device, 2, torch.int64, rows=num_rows)
        return num_rows
