"""Growing token graphs level by level: catch up on committed text, then one draft forward per level."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.attention.tree_rows import TreeRows, causal_rows, serves_chains
from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.draft.drafter import Drafter, slots_of
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.draft.limits import TOO_LONG, draft_kv_slots
from vllm_gsd.engine.draft.text_kv import FEW_ROWS, TextKV, has_text_kv
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.host import (
    add_candidates,
    frontier_chances,
    keep_best,
    level_rows,
    next_frontier,
    next_rows,
    parent_lines,
    text_rows,
)
from vllm_gsd.method.constants import MERGED, OFF_BELOW
from vllm_gsd.method.draft_level import DraftSlots, new_draft_slots
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.ops.state_rows.api import read_rows
from vllm_gsd.planner.planner import Planner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gsd.engine.observe.recorder import Recorder


class _Growing(NamedTuple):
    """Graphs that grow level by level."""

    graphs: GraphBatch
    frontier: np.ndarray  # int32 [num_graphs, num_nodes], the nodes that the draft runs next or has just run
    frontier_len: np.ndarray  # int32 [num_graphs]
    slots: DraftSlots
    requests: GraphRequests
    length: np.ndarray  # int64 [num_graphs], tokens of each text, as the draft counts them
    block_table: torch.Tensor  # int32 [num_graphs, max_blocks]
    merge_ngram: np.ndarray  # int32 [num_graphs]; 0 for graphs whose nodes do not merge


class LevelDrafter(Drafter):
    """Grows graphs of at most ``capacity`` nodes. EAGLE drafts read the target's hidden states, ``features``."""

    features: Features | None = None
    text_kv: TextKV | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: GSDConfig,
        stats: GraphStats,
        planner: Planner,
        recorder: Recorder,
        capacity: int,
    ):
        super().__init__(vllm_config, config, stats, planner, config.draft_vocab_size)
        self.recorder = recorder
        self.masks_chains = serves_chains(vllm_config, self.model.device, self.model.model_config)
        self.max_slots = draft_kv_slots(config)
        num_requests = vllm_config.scheduler_config.max_num_seqs
        self.slots = new_draft_slots(num_requests, capacity, self.max_slots)
        self.frontier = np.zeros((num_requests, config.num_speculative_tokens), np.int32)
        self.node_rows = np.zeros((num_requests, capacity), np.int64)  # each node's row in the forward that ran it
        if self.model.reads_features:
            self.feature_bytes = self.model.hidden_size * self.model.model_config.dtype.itemsize

    def prepare(self, num_blocks: int, block_size: int, pool: AbstractContextManager[Any]) -> None:
        if self.model.reads_features:
            model = self.model
            slots = num_blocks * block_size
            with pool:
                self.features = Features(slots, model.hidden_size, model.model_config.dtype, model.device)
            if has_text_kv(model.model):
                self.text_kv = TextKV(model.model)

    def keep(
        self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None
    ) -> None:
        assert self.features is not None
        self.features.write(slots, self.model.features_of(hidden[: len(slots)], aux))

    def keep_idle(self, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None) -> None:
        if self.model.reads_features:
            self.model.features_of(hidden, aux)

    def idle_level(self, num_rows: int) -> None:
        self.model.candidates(self.model.run_idle(num_rows), self.config.top_k)

    def missed(self, tracker: DraftKVTracker, request_ids: Sequence[str], length: np.ndarray) -> np.ndarray:
        too_long = length - self.model.shift > self.max_positions
        return np.where(too_long, TOO_LONG, length - tracker.lengths(request_ids))

    def catch_up(
        self, batch: DraftBatch, tracker: DraftKVTracker, needed: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """See ``Drafter``; the hidden states are those of the last tokens, [number of these requests, hidden]."""
        # The batch as the draft sees it: an EAGLE-3 head's row j holds token j + 1 (see ``DraftModel.shift``).
        batch = replace(batch, token_ids=batch.token_ids[:, self.model.shift :])
        needed = np.maximum(needed - self.model.shift, 0)
        room = np.minimum(batch.capacity, self.max_positions)
        done = tracker.lengths(batch.request_ids)
        # A request whose draft KV is already complete runs no row, so it has no hidden state to draft from.
        drafted = wanted & (needed <= room) & (needed > done)
        due = np.minimum(needed, room)
        counts = np.empty_like(done)
        self._write_text(batch, tracker, done, due - drafted)
        (chosen,) = drafted.nonzero()
        last_hidden = None
        while num_rows := next_rows(done, due, self.max_rows, counts):
            hidden = self._run_text(batch, done, counts, num_rows)
            _advance(batch, tracker, done, counts)
            if len(chosen) == 0:
                continue
            last_rows = counts.cumsum()[chosen] - 1
            if last_hidden is None and counts[chosen].all():  # one forward is nearly always enough
                last_hidden = read_rows(hidden, self.model.to_device(last_rows))
                continue
            if last_hidden is None:
                last_hidden = hidden.new_zeros(len(chosen), hidden.shape[1])
            run = np.flatnonzero(counts[chosen])
            last_hidden[self.model.to_device(run)] = hidden[self.model.to_device(last_rows[run])]
        return drafted, last_hidden

    def _write_text(self, batch: DraftBatch, tracker: DraftKVTracker, done: np.ndarray, due: np.ndarray) -> None:
        """Write draft KV of the tokens from ``done`` to ``due``, from which nothing is drafted, if this is cheaper.

        ``done`` is updated.
        """
        if self.text_kv is None or not self.model.has_kv_cache or np.maximum(due - done, 0).sum() <= FEW_ROWS:
            return
        counts = np.empty_like(done)
        while num_rows := next_rows(done, due, self.max_rows, counts):
            tokens, positions, slots, features = self._text(batch, done, counts, num_rows)
            assert features is not None
            self.stats.counts["draft_rows"] += num_rows
            self.text_kv.write(self.model.tokens(tokens), self.model.to_device(positions), slots, features)
            _advance(batch, tracker, done, counts)

    def _text(
        self, batch: DraftBatch, done: np.ndarray, counts: np.ndarray, num_rows: int
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor | None]:
        """Tokens, positions, KV slots and features of each request's next ``counts`` tokens after ``done``."""
        tokens, positions, requests = np.empty((3, num_rows), np.int64)
        text_rows(done, counts, batch.token_ids, batch.token_rows, tokens, positions, requests)
        if self.model.head is not None:
            self.model.head.see(tokens)
        self.planner.caught_up(num_rows)
        slots = slots_of(batch.block_table, requests, positions, batch.block_size)
        if self.features is None:
            return tokens, positions, slots, None
        places = positions - 1 + self.model.shift  # of the target's hidden states of the preceding tokens
        before = slots_of(batch.block_table, requests, places, batch.block_size)
        return tokens, positions, slots, self.features.read(before, self.model.to_device(places < 0))

    def _run_text(self, batch: DraftBatch, done: np.ndarray, counts: np.ndarray, num_rows: int) -> torch.Tensor:
        """Run the draft over each request's next ``counts`` tokens after ``done``; returns [num_rows, hidden]."""
        tokens, positions, slots, features = self._text(batch, done, counts, num_rows)
        self.ran(num_rows)
        to_device = self.model.to_device
        (running,) = counts.nonzero()
        starts = starts_of(counts[running])
        block_table = batch.block_table
        if len(running) < len(counts):
            block_table = block_table[to_device(running)]
        lengths = (done + counts)[running].astype(np.int32)
        if not self.masks_chains:
            return self.model.run_causal(tokens, positions, slots, starts, lengths, block_table, features)
        tree = causal_rows(to_device(starts), to_device(lengths), block_table, to_device(positions))
        return self.model.run_rows(self.model.tokens(tokens), slots, tree, features)

    def grow(self, graphs: GraphBatch, drafted: np.ndarray, hidden: torch.Tensor, requests: GraphRequests) -> None:
        """See ``Drafter``; another level is drafted while it is expected to pay."""
        batch, length = requests.batch, requests.length - self.model.shift
        count = len(length)
        frontier, frontier_len = self.frontier[:count], drafted.astype(np.int32)
        frontier[:, 0] = 0
        slots = DraftSlots(self.slots.used[:count], self.slots.mask[:count])
        slots.used[:] = 0
        block_table = batch.block_table
        if count < len(block_table):
            block_table = block_table[self.model.to_device(requests.index)]
        room = np.minimum(self.max_slots, batch.capacity[requests.index] - length).astype(np.int32)
        deepest = np.minimum(requests.max_depth, self.max_positions - length)
        merge_ngram = np.full(count, self.config.merge_ngram, np.int32)
        merge_ngram[requests.trust[:, MERGED] < OFF_BELOW] = 0
        theta_prob = np.float32(self.config.theta_prob)
        growing = _Growing(graphs, frontier, frontier_len, slots, requests, length, block_table, merge_ngram)
        self.node_rows[drafted.nonzero()[0], 0] = np.arange(len(hidden))
        for level in range(1, self.config.max_depth + 1):
            first_new = graphs.size.copy()
            self._add_children(growing, hidden)
            if level == self.config.max_depth:
                break
            room_left = (room - slots.used) * (deepest > level)
            next_frontier(graphs, first_new, requests.num_nodes, room_left, theta_prob, frontier, frontier_len)
            chances = frontier_chances(graphs, frontier, frontier_len, self.planner.calibration.factor, requests.trust)
            size = self.planner.level_size(chances)
            if size == 0:
                break
            # vLLM's compiled models take no more rows than the target's steps have.
            keep_best(frontier, frontier_len, chances, min(size, self.max_rows))
            hidden = self._run_level(growing, hidden)

    def _add_children(self, growing: _Growing, hidden: torch.Tensor) -> None:
        """Add the draft's candidates below the frontier nodes, whose hidden states are [rows, hidden]."""
        graphs, frontier, frontier_len, *_ = growing
        probs, tokens = self.model.candidates(hidden, self.config.top_k)
        self.stats.counts["draft_rows_invalid"] += int(np.count_nonzero(probs[:, 0] == 0))
        self.planner.drafted(probs)
        limits = growing.requests.num_nodes, self.config.theta_sib, growing.merge_ngram
        added, merged, pruned = add_candidates(graphs, frontier, frontier_len, tokens, probs, *limits)
        self.recorder.level(frontier, frontier_len, tokens, probs)
        self.stats.counts.update(nodes_added=added, nodes_merged=merged, nodes_pruned=pruned)

    def _run_level(self, growing: _Growing, hidden: torch.Tensor) -> torch.Tensor:
        """Run the draft over the frontier nodes of all requests; returns hidden states [rows, hidden].

        ``hidden`` are those of the level before, which contain the nodes' parents.
        """
        graphs, frontier, frontier_len, slots, requests, length, block_table, _ = growing
        num_rows = int(frontier_len.sum())
        token = np.empty(num_rows, np.int64)
        depth, slot = np.empty((2, num_rows), np.int32)
        mask = np.empty((num_rows, slots.mask.shape[2]), np.int64)
        level_rows(graphs, slots, frontier, frontier_len, token, depth, slot, mask)
        request_of_row = np.arange(len(frontier_len)).repeat(frontier_len)
        base = length[request_of_row]
        positions = base - 1 + depth
        to_device = self.model.to_device
        features = None
        if self.features is not None:  # the draft's own hidden states of the parents
            parents = parent_lines(graphs, frontier, frontier_len, self.node_rows)
            features = self.model.next_features(read_rows(hidden, to_device(parents)))
        tree = TreeRows(
            query_start_loc=to_device(starts_of(frontier_len)),
            prefix_lens=to_device(length.astype(np.int32)),
            block_table=block_table,
            positions=to_device(positions),
            mask=to_device(mask),
            max_rows=frontier.shape[1],
        )
        self.ran(num_rows)
        self.stats.counts["draft_nodes"] += num_rows
        flat_slots = slots_of(block_table, request_of_row, base + slot, requests.batch.block_size)
        return self.model.run_rows(self.model.tokens(token), flat_slots, tree, features)


def starts_of(counts: np.ndarray) -> np.ndarray:
    """Start of each request's rows, followed by the total: int32 [len(counts) + 1]."""
    starts = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=starts[1:])
    return starts


def _advance(batch: DraftBatch, tracker: DraftKVTracker, done: np.ndarray, counts: np.ndarray) -> None:
    """Record that each request's next ``counts`` tokens after ``done``, which is updated, have draft KV."""
    done += counts
    for request in counts.nonzero()[0].tolist():
        tracker.advance(batch.request_ids[request], int(done[request]))
