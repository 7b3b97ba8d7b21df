"""What drafting reads of a model runner's batch, the same for every runner."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class DraftBatch:
    """A batch between two steps, requests in the runner's order."""

    request_ids: list[str]
    requests: list[Any]  # the runner's own records: ``sampling_params`` and ``prompt_embeds`` are read
    num_outputs: np.ndarray  # int64 [num_requests], tokens generated so far
    sampled: np.ndarray  # bool [num_requests], whether the last step emitted tokens: not so in the midst of a prompt
    length: (
        np.ndarray
    )  # int64 [num_requests], tokens known to be final: all committed ones, or the computed part of a prompt
    token_ids: np.ndarray  # int32 [>= num_requests, max_model_len]
    token_rows: np.ndarray  # int64 [num_requests], each request's row of ``token_ids``
    block_table: torch.Tensor  # int32 [num_requests, max_blocks]
    num_blocks: np.ndarray  # int64 [num_requests]
    block_size: int

    @property
    def capacity(self) -> np.ndarray:
        """KV slots that each request has blocks for, int64."""
        return self.num_blocks * self.block_size
