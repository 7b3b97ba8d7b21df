"""The rows of a forward pass that attend along a graph: what the attention backend needs to know of them."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig

from vllm_gsd.ops import HAVE_EXTENSION


@dataclass(frozen=True)
class TreeRows:
    """Tree rows of one forward pass, request by request.

    A row attends all ``prefix_lens[r]`` committed keys of its request, and among the request's tree slots (logical
    index ``prefix_lens[r] + j``) those whose bit is set in its mask.
    """

    query_start_loc: torch.Tensor  # int32 [num_tree_requests + 1]
    prefix_lens: torch.Tensor  # int32 [num_tree_requests]
    block_table: torch.Tensor  # int32 [num_tree_requests, max_blocks]
    positions: torch.Tensor  # int64 [num_tree_rows]
    mask: torch.Tensor  # int64 [num_tree_rows, words]
    rows: torch.Tensor | None  # int64 [num_tree_rows], their rows in the batch; None: they are the whole batch
    # The other rows of the batch and upstream's metadata for them alone; None when there are no others.
    plain_rows: torch.Tensor | None = None
    plain_metadata: Any = None
    # For GPUs. Most rows of a request, so that a launch is bounded without asking the device; None: all of them.
    max_rows: int | None = None
    # int64 [num_tree_requests, slots], for models with sliding windows that slots may leave; None: not windowed.
    slot_positions: torch.Tensor | None = None


class TreeRowsOnly:
    """Attention metadata of layers all of whose rows attend along graphs: nothing but their TreeRows, once set."""


def serves_chains(device: torch.device, model: ModelConfig) -> bool:
    """Whether our kernel is faster than upstream's for rows without branches and prompts too (kernels/README.md).

    Not of models with sliding windows: a prompt's rows lie farther apart than those, and masks name rows, not windows.
    """
    faster = HAVE_EXTENSION and device.type == "cpu" and model.dtype == torch.bfloat16
    return faster and model.get_sliding_window() is None
