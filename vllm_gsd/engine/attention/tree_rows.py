"""Metadata for the rows of a forward pass that attend along token graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig

from vllm_gsd.cpu.packed_weights import uses_cpu_kernels
from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.attention.rows import AttendingRows


@dataclass(frozen=True)
class TreeRows(AttendingRows):
    """The rows of one forward pass that our kernels serve. Those of the target are nodes only, but on CPUs."""

    # The rows of the batch, int64 [num_rows] or, if they are neighbours, a slice; None if they are all its rows.
    rows: torch.Tensor | slice | None = None
    # The other rows of the batch, given alike, and upstream's metadata for them; None if there are none.
    plain_rows: torch.Tensor | slice | None = None
    plain_metadata: Any = None
    # For GPUs: maximum rows of a request, which bounds a launch without a device sync; None for the number of all rows.
    max_rows: int | None = None


class AttendsTrees:
    """Mixin of the attention implementations that support TreeRows in their metadata."""

    def refuses(self) -> tuple[str, str] | None:
        """A feature of the layer that tree attention does not support and what to do instead; None if there is none."""
        return None

    def _tree(self, *args: Any, **kwargs: Any) -> None:
        """Attend tree rows: ``_tree(layer, query, kv_cache, tree, output)``."""
        raise NotImplementedError

    def attend(
        self,
        plain: Callable[[torch.Tensor, Any, torch.Tensor], Any],
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        tree: TreeRows,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Fill ``output`` by ``_tree``, and the plain rows by ``plain(query, metadata, output)``."""

        def fill(rows: torch.Tensor | slice, attend: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
            if isinstance(rows, slice):
                attend(query[rows], output[rows])
                return
            found = output.new_empty((len(rows), *output.shape[1:]))
            attend(query.index_select(0, rows), found)
            output.index_copy_(0, rows, found)

        if tree.rows is None:
            self._tree(layer, query, kv_cache, tree, output)
            return output
        fill(tree.rows, lambda query, output: self._tree(layer, query, kv_cache, tree, output))
        if tree.plain_rows is not None:
            fill(tree.plain_rows, lambda query, output: plain(query, tree.plain_metadata, output))
        return output


class TreeBackend:
    """Mixin before upstream's backend class, whose name, metadata and cache layout stay. It names what vLLM builds."""

    builder: type
    impl: type

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl


class TreeRowsOnly:
    """Attention metadata for batches with tree rows only. They are attached by ``wire.attach``."""


def serves_chains(vllm_config: VllmConfig, device: torch.device, model: ModelConfig) -> bool:
    """Whether our kernel attends all rows of the model, text and rows without branches too.

    It does where it is faster than upstream's (docs/cpu-kernels.md), unless ``"cpu_kernels"`` is "off". Since it then
    attends every row of every step, a row's result has the same bits with a graph and without.
    """
    amx = torch.cpu._is_amx_tile_supported() and model.get_head_size() % 32 == 0  # where upstream attends with AMX
    faster = HAVE_EXTENSION and device.type == "cpu" and model.dtype == torch.bfloat16 and not amx
    return faster and uses_cpu_kernels(vllm_config)


def causal_rows(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, positions: torch.Tensor
) -> TreeRows:
    """Rows of text for our kernel: each attends its request's earlier rows and itself.

    Args:
        query_start_loc: int32 [num_requests + 1]; seq_lens: int32 [num_requests], these rows included.
        block_table: int32 [num_requests, max_blocks]; positions: int64 [num_rows].
    """
    no_bits = torch.empty((len(positions), 0), dtype=torch.int64, device=positions.device)
    return TreeRows(query_start_loc, seq_lens, block_table, positions, no_bits)
