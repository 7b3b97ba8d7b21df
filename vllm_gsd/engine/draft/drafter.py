"""Drafters run the draft model for the requests of a batch: what all kinds of drafts share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.draft.context_kv import ContextKV
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.draft.model import DraftModel
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.host import kv_slots
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.planner.planner import Planner

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Drafter(ABC):
    """Grows token graphs for the requests of a batch with the draft model."""

    features: Features | ContextKV | None = None  # what is kept of the target's hidden states; set by ``prepare``
    feature_bytes = 0  # bytes per token for it, besides the KV cache
    max_slots = 0  # draft KV slots of a request behind its text

    def __init__(
        self, vllm_config: VllmConfig, config: GSDConfig, stats: GraphStats, planner: Planner, vocab_size: int | None
    ):
        assert config.model is not None
        self.config, self.stats, self.planner = config, stats, planner
        self.model = DraftModel(vllm_config, config.model, config.draft_tensor_parallel_size, vocab_size)
        # The draft's maximum length. Nothing is drafted for longer texts.
        self.max_positions = min(vllm_config.model_config.max_model_len, self.model.model_config.max_model_len)
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens

    # --- start-up ---------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, num_blocks: int, block_size: int, pool: AbstractContextManager[Any]) -> None:
        """Set up ``features``, if needed, for a KV cache of this size; allocate in the context ``pool``."""

    @abstractmethod
    def keep_idle(self, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None) -> None:
        """Compute what ``keep`` stores, so that its memory can be measured before there is a KV cache."""

    @abstractmethod
    def idle_level(self, num_rows: int) -> None:
        """Do the work of a draft level, or of a block, over about ``num_rows`` rows, to measure its cost."""

    # --- in a step --------------------------------------------------------------------------------

    @abstractmethod
    def keep(
        self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None
    ) -> None:
        """Store what the draft reads of the target's hidden states; arguments as for ``Speculation.keep_features``."""

    @abstractmethod
    def missed(self, tracker: DraftKVTracker, request_ids: Sequence[str], length: np.ndarray) -> np.ndarray:
        """Tokens of each request that the draft has to run before it can draft, int64 [num_requests], or TOO_LONG."""

    @abstractmethod
    def catch_up(
        self, batch: DraftBatch, tracker: DraftKVTracker, needed: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Run the draft over committed text for which it has no KV yet.

        Args:
            tracker: the valid draft KV; it is updated.
            needed: int64 [num_requests], leading tokens of each request that need draft KV; 0 for none.
            wanted: bool [num_requests], requests to draft for.

        Returns:
            bool [num_requests], the wanted requests that can be drafted for, and the hidden states from which they are
            drafted for, [number of these requests, ..., hidden], or None if there are no such requests.
        """

    @abstractmethod
    def grow(self, graphs: GraphBatch, drafted: np.ndarray, hidden: torch.Tensor, requests: GraphRequests) -> None:
        """Grow the token graphs of a batch.

        Args:
            graphs: one graph per request, each with a root only.
            drafted: bool [num_graphs], graphs to grow.
            hidden: [sum(drafted), ..., hidden], from ``catch_up``.
        """

    def ran(self, num_rows: int) -> None:
        """Count a forward pass over ``num_rows`` rows."""
        self.stats.counts["draft_rows"] += num_rows
        self.stats.counts["draft_forwards"] += 1


def slots_of(block_table: torch.Tensor, rows: np.ndarray, positions: np.ndarray, block_size: int) -> torch.Tensor:
    """Physical KV slots, int64, on the block table's device. Arguments are those of ``kv_slots``."""
    if block_table.device.type == "cpu":
        return torch.from_numpy(kv_slots(block_table.numpy(), rows, positions, block_size))
    places = np.divmod(np.maximum(positions, 0), block_size)
    index, block, offset = send(block_table.device, rows, *places)
    return block_table[index, block].long() * block_size + offset
