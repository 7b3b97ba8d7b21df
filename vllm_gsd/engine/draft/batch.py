"""What drafting reads of a model runner's batch. Both runners build it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class DraftBatch:
    """The batch between two steps, with requests in the runner's order."""

    request_ids: list[str]
    requests: list[Any]  # the runner's records of the requests
    num_outputs: np.ndarray  # int64 [num_requests], tokens generated so far
    sampled: np.ndarray  # bool [num_requests], whether the last step emitted tokens; False during chunked prefill
    length: np.ndarray  # int64 [num_requests], committed tokens, or the computed part of an unfinished prompt
    whole: np.ndarray  # int64 [num_requests], ``length`` with the rest of an unfinished prompt
    token_ids: np.ndarray  # int32 [>= num_requests, max_model_len]
    token_rows: np.ndarray  # int64 [num_requests], each request's row in ``token_ids``
    block_table: torch.Tensor  # int32 [num_requests, max_blocks]
    num_blocks: np.ndarray  # int64 [num_requests]
    block_size: int
    # bool [num_requests], whether a text ended with the last step. V2's host does not know that yet.
    ended: np.ndarray | bool = False

    @property
    def capacity(self) -> np.ndarray:
        """KV slots in each request's blocks, int64 [num_requests]."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class GraphRequests:
    """The requests of a batch whose token graphs are grown, with the limits of each graph."""

    batch: DraftBatch
    index: np.ndarray  # int64 [num_graphs], each request's index in the batch
    length: np.ndarray  # int64 [num_graphs], committed tokens
    max_depth: np.ndarray  # int32 [num_graphs], deepest node worth verifying
    grammar: np.ndarray  # bool [num_graphs], whether a grammar chooses among the nodes
    num_nodes: np.ndarray  # int32 [num_graphs], maximum number of proposed nodes
    trust: np.ndarray  # float32 [num_graphs, sources], from ``SourceTrust``
