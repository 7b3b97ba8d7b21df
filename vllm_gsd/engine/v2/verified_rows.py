"""The rows that a step verifies, on the device.

The host knows only how many rows each request has. Which rows are nodes, their parents and their attention masks stay
in device tensors. A request whose graph is a chain, or empty, is therefore treated like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.engine.verify.step import TargetLayers, verified_rows
from vllm_gsd.ops.flatten.api import DeviceTrees
from vllm_gsd.ops.lay_out.api import lay_out_rows

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_gsd.engine.v2.proposals import Proposals


class RowBuffers:
    """Masks and prefix lengths at fixed addresses, because a full CUDA graph reads the same ones at every replay.

    There is room for ``num_requests`` full graphs of ``rows_per_request`` rows, the root's included.
    """

    def __init__(self, num_requests: int, rows_per_request: int, device: torch.device) -> None:
        self.rows_per_request = rows_per_request
        words = (rows_per_request + 63) // 64
        self.mask = torch.zeros((num_requests * rows_per_request, words), dtype=torch.int64, device=device)
        self.prefix_lens = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Clear everything, because the block tables of a dummy batch belong to no request."""
        self.mask.zero_()
        self.prefix_lens.zero_()

    def rows(
        self,
        num_requests: int,
        num_rows: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
    ) -> TreeRows:
        """The tree rows of a batch whose rows are all verified. The other tensors are buffers of vLLM.

        Args:
            num_requests, num_rows: of the batch, which may include padding.
            query_start_loc: int32 [> num_requests].
            positions: int64 [>= num_rows].
            block_table: int32 [>= num_requests, max_blocks].
        """
        return TreeRows(
            query_start_loc=query_start_loc[: num_requests + 1],
            prefix_lens=self.prefix_lens[:num_requests],
            block_table=block_table[:num_requests],
            positions=positions[:num_rows],
            mask=self.mask[:num_rows],
            max_rows=self.rows_per_request,
        )


class DeviceStep:
    """The graphs that a step verifies. Rows are numbered per request, and row 0 is the root.

    Args:
        batch: the batch, whose ``num_draft_tokens_per_req`` says how many rows each request verifies.
        by_row: whether our kernel attends all rows of decodes, so that a row has the same bits with nodes and without,
            and vLLM's kernel all rows of prompts, however many of them are in the batch.
    """

    # The graphs of the batch's requests, cut to their rows; set by ``lay``, if any request has more than a root.
    trees: DeviceTrees | None = None
    slot_mapping: torch.Tensor  # int64 [>= rows of the batch], set by ``lay``

    def __init__(self, proposals: Proposals, batch: InputBatch, by_row: bool = False) -> None:
        drafts, count = batch.num_draft_tokens_per_req, batch.num_reqs
        self.proposals, self.batch = proposals, batch
        # int64 [num_requests], the rows of each request to verify: the last ones of its rows of the batch.
        self.sizes = np.ones(count, np.int64) if drafts is None else 1 + drafts.astype(np.int64)
        self.batch_ends = batch.query_start_loc_np[1 : count + 1].astype(np.int64)
        has_nodes = self.sizes > 1
        self.has_nodes = bool(has_nodes.any())
        decodes = np.diff(batch.query_start_loc_np[: count + 1]) == self.sizes
        if by_row:
            decodes &= ~batch.is_prefilling_np
        # Requests whose verified rows our kernel attends. Without ``by_row`` these are the ones with nodes.
        self.tree_requests = np.flatnonzero(has_nodes | decodes if by_row else has_nodes)
        self.whole = bool(decodes.all())  # whether our kernel can attend all rows of the batch

    def lay(self, buffers: RowBuffers, slot_mapping: torch.Tensor) -> None:
        """Assign the nodes to the rows: set positions by depth, and masks and prefix lengths in ``buffers``.

        The KV slots, int64 [>= rows of the batch], must have been computed, because they follow row order.
        """
        batch, slots = self.batch, self.batch.idx_mapping
        self.slot_mapping = slot_mapping
        if not len(self.tree_requests):
            return
        (fresh,) = send(slots.device, self.proposals.fresh[batch.idx_mapping_np].astype(np.int32))
        trees = lay_out_rows(
            self.proposals.trees, slots, fresh, batch.cu_num_logits, batch.query_start_loc, batch.positions,
            buffers.mask, buffers.prefix_lens,
        )  # fmt: skip
        self.trees = trees if self.has_nodes else None

    def attach_tree_rows(self, buffers: RowBuffers, layers: TargetLayers, common: CommonAttentionMetadata) -> None:
        """Add the tree mask to the target layers' attention metadata, for a batch with other rows too."""
        index, first_rows = self.tree_requests, self.batch_ends - self.sizes
        starts, rows, lines = verified_rows(index, self.sizes, first_rows, self.batch.cu_num_logits_np)
        on_device = send(buffers.mask.device, index, starts, rows, lines)
        tree_rows = TreeRows(
            query_start_loc=on_device[1].int(),
            prefix_lens=buffers.prefix_lens[on_device[0]],
            block_table=common.block_table_tensor[on_device[0]],
            positions=self.batch.positions[on_device[2]],
            mask=buffers.mask[on_device[3]],
            rows=on_device[2],
            max_rows=buffers.rows_per_request,
        )
        layers.attach_part(tree_rows, rows, index, common)
