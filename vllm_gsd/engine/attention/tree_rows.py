"""The rows of a forward pass that attend along a graph: what the attention backend needs to know of them."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig

from vllm_gsd.ops import HAVE_EXTENSION


@dataclass(frozen=True)
class TreeRows:
    """Tree rows of one forward pass, request by request.

    A row attends the ``prefix_lens[r]`` first keys of its request up to its own position, and among the request's tree
    slots (logical index ``prefix_lens[r] + j``) those whose bit is set in its mask. So rows of text have their own keys
    in the prefix, and no bits; only CPUs attend such rows this way. A node's position is never below the prefix.
    """

    query_start_loc: torch.Tensor  # int32 [num_tree_requests + 1]
    prefix_lens: torch.Tensor  # int32 [num_tree_requests]
    block_table: torch.Tensor  # int32 [num_tree_requests, max_blocks]
    positions: torch.Tensor  # int64 [num_tree_rows]
    mask: torch.Tensor  # int64 [num_tree_rows, words], no words where no row has bits
    rows: torch.Tensor | None  # int64 [num_tree_rows], their rows in the batch; None: they are the whole batch
    # The other rows of the batch and upstream's metadata for them alone; None when there are no others.
    plain_rows: torch.Tensor | None = None
    plain_metadata: Any = None
    # For GPUs. Most rows of a request, so that a launch is bounded without asking the device; None: all of them.
    max_rows: int | None = None
    # int64 [num_tree_requests, slots], for models with sliding windows that slots may leave; None: not windowed.
    slot_positions: torch.Tensor | None = None


class AttendsTrees:
    """Mixed into the attention implementations that heed the TreeRows of their metadata."""

    def refuses(self) -> str | None:
        """What the layer does and the chosen kernel for graph rows cannot do; None: nothing."""
        return None


class TreeRowsOnly:
    """Attention metadata of layers all of whose rows attend along graphs: nothing but their TreeRows, once set."""


def serves_chains(device: torch.device, model: ModelConfig) -> bool:
    """Whether our kernel attends all rows of the model, those of texts and without branches too."""
    return device.type == "cpu" and serves_text(model.dtype)


def serves_text(dtype: torch.dtype) -> bool:
    """Whether our CPU kernel is faster than upstream's for the rows of texts too (kernels/README.md).

    It then attends every row of every step, so that a row's result is the same bits with a graph and without.
    """
    return HAVE_EXTENSION and dtype == torch.bfloat16
