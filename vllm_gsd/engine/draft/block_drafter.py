"""Growing token graphs with a draft of whole blocks (DFlash, DFlash2, DSpark): one draft forward per step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.cpu.packed_weights import packs_weights, uses_cpu_kernels
from vllm_gsd.engine.attention.layers import window_of
from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.draft.block_heads import block_candidates
from vllm_gsd.engine.draft.context_kv import ContextKV, compute_idle
from vllm_gsd.engine.draft.drafter import Drafter, slots_of
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.draft.limits import TOO_LONG
from vllm_gsd.engine.draft.model import LOGIT_BYTES, MAX_LOGITS_BYTES
from vllm_gsd.engine.observe.recorder import Recorder
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.parallel.ranks import tensors_from_first_rank
from vllm_gsd.host import add_lattices
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.planner.planner import Planner
from vllm_gsd.upstream.drafts import keep_all_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def block_shape(anchored: bool, size: int | None, max_depth: int, most: int) -> tuple[int, slice]:
    """The number of rows of a drafted block, and those of them whose predictions are used.

    A block has as many rows as those that the draft was trained on, ``size`` if that is known. Its rows attend to each
    other, so with fewer of them it guesses worse at every depth. KV blocks have room for ``most`` rows behind the root.
    The root's row predicts if the draft is ``anchored``, as most DSpark drafts are.
    """
    first = int(not anchored)
    rows = min(size or first + max_depth, first + most)
    return rows, slice(first, min(rows, first + max_depth))


class BlockDrafter(Drafter):
    """Drafts a block for every request in one forward, and lays its lattice into the token graphs.

    A block has a row for the root, the last committed token, and rows of a mask token behind it. They attend to the
    committed text and to each other. A row predicts the token after it (DSpark) or, where the root predicts nothing,
    its own token.
    """

    features: ContextKV | None = None
    causal = False  # whether rows of a block attend only to those before
    mask: np.ndarray  # int64 [num_rows, words], as in ``AttendingRows``; set by ``check_layers``

    def __init__(
        self, vllm_config: VllmConfig, config: GSDConfig, stats: GraphStats, planner: Planner, recorder: Recorder
    ):
        super().__init__(vllm_config, config, stats, planner, vocab_size=None)
        self.recorder = recorder
        assert config.model is not None
        hf_config = self.model.model_config.hf_config
        # vLLM's translation of speculators folders leaves the size of a block out.
        stored = get_hf_file_to_dict("config.json", config.model, self.model.model_config.revision) or {}
        size = stored.get("block_size") or stored.get("dspark_block_size")
        anchored = self.model.kind == "dspark" and getattr(hf_config, "sample_from_anchor", True)
        self.num_rows, self.predicting = block_shape(anchored, size, config.max_depth, config.num_speculative_tokens)
        self.mask_token = get_parallel_drafting_token_id(hf_config)
        self.model.block_depth = self.num_rows - self.predicting.start
        planner.first_rows = self.num_rows
        planner.forget()

    def check_layers(self, layers: dict[str, Any]) -> None:
        """Set how the rows of a block attend to each other.

        Raises:
            GSDConfigError: the draft has layers that cannot attend in blocks.
        """
        window = min((window for layer in layers.values() if (window := window_of(layer.impl))), default=None)
        if window is not None and window < self.num_rows:  # rows of a block all see each other
            raise GSDConfigError(
                f'"model" is {self.config.model!r}, a draft of blocks of {self.num_rows} rows, which must fit into its '
                f'sliding window of {window} tokens; set "num_speculative_tokens" below that.'
            )
        keep_all_keys(layers.values())
        causal = set(self.model.model.get_draft_attn_causal())
        if len(causal) > 1:
            raise GSDConfigError(
                f'"model" is {self.config.model!r}, a draft of whole blocks some of whose layers are causal, which gsd '
                "does not support yet; use one whose layers are alike."
            )
        self.causal = causal == {True}
        places = np.arange(-(-self.num_rows // 64) * 64)
        last = np.arange(self.num_rows) if self.causal else np.full(self.num_rows, self.num_rows - 1)
        self.mask = np.packbits(places <= last[:, None], axis=1, bitorder="little").view(np.int64)

    def prepare(self, num_blocks: int, block_size: int, pool: AbstractContextManager[Any]) -> None:
        """Find the draft's KV caches, which are allocated."""
        context = self.model.vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in self.model.layer_names}
        kernels = uses_cpu_kernels(self.model.vllm_config)
        self.features = ContextKV(self.model.model, layers, lambda weight: kernels and packs_weights(weight))

    def keep(
        self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None
    ) -> None:
        """Write the draft KV of a target step's rows."""
        assert self.features is not None
        states = self.model.features_of(hidden[: len(slots)], aux)
        self.features.write(slots, positions[: len(slots)].clamp(max=self.max_positions - 1), states)

    def keep_idle(self, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None) -> None:
        compute_idle(self.model.model, self.model.features_of(hidden, aux))

    def missed(self, tracker: DraftKVTracker, request_ids: Sequence[str], length: np.ndarray) -> np.ndarray:
        """0 tokens, since the target's steps write the draft's KV, or TOO_LONG for a block."""
        return np.where(length - 1 + self.num_rows > self.max_positions, TOO_LONG, 0)

    def catch_up(
        self, batch: DraftBatch, tracker: DraftKVTracker, needed: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Draft a block for each wanted request that has room for it.

        There is nothing to catch up on: the draft has KV for all committed tokens but the last of each request. The
        hidden states are those of the rows that predict, [number of these requests, depth, hidden].
        """
        room = np.minimum(batch.capacity, self.max_positions)
        drafted = wanted & (batch.length - 1 + self.num_rows <= room)
        (chosen,) = drafted.nonzero()
        if len(chosen) == 0:
            return drafted, None
        most = max(1, self.max_rows // self.num_rows)
        parts = [self._run(batch, chosen[first : first + most]) for first in range(0, len(chosen), most)]
        return drafted, torch.cat(parts)

    def _run(self, batch: DraftBatch, chosen: np.ndarray) -> torch.Tensor:
        """The hidden states that predict, [len(chosen), depth, hidden], from one forward over a block per request."""
        count, rows, to_device = len(chosen), self.num_rows, self.model.to_device
        tokens = np.full((count, rows), self.mask_token, np.int64)
        tokens[:, 0] = self._roots(batch, chosen)
        before = batch.length[chosen] - 1
        positions = (before[:, None] + np.arange(rows)).ravel()
        slots = slots_of(batch.block_table, chosen.repeat(rows), positions, batch.block_size)
        tree = TreeRows(
            query_start_loc=to_device(np.arange(0, count * rows + 1, rows, dtype=np.int32)),
            prefix_lens=to_device(before.astype(np.int32)),
            block_table=batch.block_table[to_device(chosen)],
            positions=to_device(positions),
            mask=to_device(np.tile(self.mask, (count, 1))),
            max_rows=rows,
        )
        self.planner.caught_up(count * rows)
        self.ran(count * rows)
        hidden = self.model.run_rows(self.model.tokens(tokens.ravel()), slots, tree)
        return hidden.view(count, rows, -1)[:, self.predicting]

    def _roots(self, batch: DraftBatch, chosen: np.ndarray) -> np.ndarray:
        """The last committed tokens of these requests, int64."""
        return batch.token_ids[batch.token_rows[chosen], batch.length[chosen] - 1].astype(np.int64)

    def grow(self, graphs: GraphBatch, drafted: np.ndarray, hidden: torch.Tensor, requests: GraphRequests) -> None:
        """Lay the lattices of drafted blocks into the graphs."""
        roots = self.model.to_device(self._roots(requests.batch, requests.index[drafted]))
        tokens, probs = (tensor.cpu().numpy() for tensor in self.candidates(hidden, roots))
        # A sound depth reaches its first candidate from at least one of those before.
        self.stats.counts["draft_rows_invalid"] += int(np.count_nonzero(probs[:, :, :, 0].max(axis=2) == 0))
        first = np.zeros((len(probs), self.config.top_k), np.float32)
        first[:, : tokens.shape[2]] = probs[:, 0, 0]
        self.planner.drafted(first)
        added, merged, pruned = add_lattices(
            graphs,
            drafted,
            tokens,
            probs,
            requests.num_nodes,
            requests.max_depth,
            self.config.theta_sib,
            self.config.theta_prob,
        )
        self.recorder.block(graphs, drafted, tokens, probs)
        self.stats.counts.update(nodes_added=added, nodes_merged=merged, nodes_pruned=pruned)

    def candidates(self, hidden: torch.Tensor, roots: torch.Tensor) -> Sequence[torch.Tensor]:
        """``block_candidates`` on the device, the same on every tensor-parallel rank."""
        k = self.config.top_k
        # A head scores the whole vocabulary at all depths, and once more after each candidate of a depth.
        logits = self.model.model_config.get_vocab_size() * (hidden.shape[1] + k)
        most = max(1, MAX_LOGITS_BYTES // (LOGIT_BYTES * logits))
        parts = [
            block_candidates(self.model.kind, self.model.model, *part, k, self.config.merge_ngram > 0)
            for part in zip(hidden.split(most), roots.split(most), strict=True)
        ]
        tokens, probs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return tensors_from_first_rank(tokens, probs.contiguous())

    def idle_level(self, num_rows: int) -> None:
        count = -(-num_rows // self.num_rows)
        hidden = self.model.run_idle(count * self.num_rows).view(count, self.num_rows, -1)[:, self.predicting]
        self.candidates(hidden, torch.zeros(count, dtype=torch.int64, device=self.model.device))
