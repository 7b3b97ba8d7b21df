"""Drafting that never leaves the device: what was accepted a moment ago, it alone knows.

The host says what it knows for sure: who takes part, how many blocks everybody has, what may be learned from earlier
steps. Lengths and tokens are read where vLLM keeps them, and everything has a fixed, padded shape. The result is
exactly what ``Speculation.propose`` gives on the host without a planner's costs: every level is drafted.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.draft.drafter import Drafter
from vllm_gsd.engine.draft.model import DraftModel
from vllm_gsd.engine.speculation import MIN_NGRAM_MATCH
from vllm_gsd.method.constants import MERGED, NGRAM, OFF_BELOW
from vllm_gsd.ops.flatten.api import DeviceTrees, flatten_graphs
from vllm_gsd.ops.growth.api import add_candidates, level_rows, next_frontier
from vllm_gsd.ops.growth.state import DeviceGraphs, one_bit, start_graphs
from vllm_gsd.ops.ngram.api import MATCH_BYTES, graft_ngrams

# What ``DeviceDrafting.counts`` counts.
COUNTS = ("nodes_added", "nodes_merged", "nodes_pruned", "draft_nodes", "draft_rows_invalid")
# Most bytes of one pass over some of the batch's requests, beside the draft's own forward and logits.
MAX_BYTES = 1 << 30
# Numbers of eight bytes that a node of a graph takes at most: its own, and those of a level's growth.
COLUMNS = 24


@dataclass(frozen=True)
class KnownBatch:
    """What the host knows of a batch, whatever was accepted."""

    slots: np.ndarray  # int64 [num_requests], V2's request slots
    wanted: np.ndarray  # bool [num_requests], requests to draft for: those in the midst of a prompt are none
    draft_length: np.ndarray  # int64 [num_requests], leading tokens with draft KV; -1: what the device knows
    capacity: np.ndarray  # int64 [num_requests], KV slots there are blocks for
    end: np.ndarray  # int64 [num_requests], most tokens the text may come to
    trust: np.ndarray  # float32 [num_requests, sources], of ``SourceTrust``
    factor: np.ndarray  # float32, of ``Calibration``
    most_new: int  # most tokens that any text can have got in this step
    longest: int  # most tokens that any text can have by now

    def part(self, of: slice) -> "KnownBatch":
        """What is known of some of the requests."""
        names = ("slots", "wanted", "draft_length", "capacity", "end", "trust")
        return replace(self, **{name: getattr(self, name)[of] for name in names})


@dataclass(frozen=True)
class _Batch:
    """The same on the device, and what only the device knows."""

    length: torch.Tensor  # int64 [num_requests], tokens of each text
    texts: torch.Tensor  # int32 [num_requests, longest]
    block_table: torch.Tensor  # int32 [num_requests, max_blocks]
    block_size: int
    wanted: torch.Tensor  # bool [num_requests]
    done: torch.Tensor  # int64 [num_requests], leading tokens with draft KV
    capacity: torch.Tensor  # int64 [num_requests]
    max_depth: torch.Tensor  # int64 [num_requests], deepest node worth verifying
    trust: torch.Tensor  # float32 [num_requests, sources]


class DeviceDrafting:
    """Grows and flattens the graphs of a batch.

    Args:
        config: ours.
        drafter: the draft model's, None without one.
        req_states: V2's request states.
        capacity: nodes a graph can hold; num_places: most nodes of a flattened one.
        device: where all of it is.
    """

    def __init__(
        self,
        config: GSDConfig,
        drafter: Drafter | None,
        req_states,
        capacity: int,
        num_places: int,
        device: torch.device,
    ):
        self.config = config
        self.drafter = drafter
        self.req_states = req_states
        self.capacity = capacity
        self.num_places = num_places
        self.device = device
        # Leading tokens of each slot's request with draft KV.
        self.draft_length = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def propose(
        self, known: KnownBatch, slots: torch.Tensor, block_table: torch.Tensor, block_size: int
    ) -> DeviceTrees:
        """Draft for a batch.

        Args:
            slots: ``known.slots`` on the device; block_table: int32 [num_requests, max_blocks].

        Returns:
            DeviceTrees of ``num_places`` places.
        """
        most = self.most_requests(known.longest, known.most_new)
        parts = []
        for first in range(0, len(slots), most):
            of = slice(first, first + most)
            parts.append(self._propose(known.part(of), slots[of], block_table[of], block_size))
        return parts[0] if len(parts) == 1 else DeviceTrees(*map(torch.cat, zip(*parts, strict=True)))

    def most_requests(self, longest: int, most_new: int) -> int:
        """How many requests are drafted for at once, so that it takes ``MAX_BYTES`` beside the draft's own forward.

        Args:
            longest, most_new: as of ``KnownBatch``.
        """
        most = MAX_BYTES // self.bytes_per_request(longest)
        if self.drafter is not None:  # whose largest forward is one over a whole batch of tokens
            most = min(most, self.drafter.max_rows // max(most_new, self.config.num_speculative_tokens))
        return max(1, most)

    def bytes_per_request(self, longest: int) -> int:
        """What a request takes while its graph is grown, at most: its text, its graph, and the nodes of a level.

        A candidate is compared with every node, a byte each, and some of these comparisons are kept at a time.
        """
        width = self.config.num_speculative_tokens
        nodes, candidates = self.capacity + 1, width * self.config.top_k
        slots = 0 if self.drafter is None else self.drafter.max_slots
        words = -(-self.capacity // 64) + -(-slots // 64)
        return MATCH_BYTES * longest + nodes * (4 * candidates + 8 * (COLUMNS + words)) + 32 * candidates * words

    def reset(self) -> None:
        """Forget what was drafted so far."""
        self.draft_length.zero_()
        self.counts.zero_()

    def _propose(self, known: KnownBatch, slots, block_table, block_size: int) -> DeviceTrees:
        """``propose`` for as many requests as fit."""
        batch = self._batch(known, slots, block_table, block_size)
        drafts = self.drafter is not None
        graphs = start_graphs(batch.texts, batch.length, self.capacity, drafts and self.config.merge_ngram > 0)
        if self.drafter is not None:
            drafted, hidden = self._catch_up(batch, self.drafter, known.most_new)
            self.draft_length[slots] = batch.done
            self._grow(graphs, batch, self.drafter, drafted, hidden)
        if "ngram" in self.config.sources:
            self._copy(graphs, batch)
        num_nodes = torch.where(batch.wanted, self.num_places, 0)
        factor = self._to_device(known.factor)
        return flatten_graphs(graphs, self.num_places, num_nodes, batch.max_depth, factor, batch.trust)

    def _batch(self, known: KnownBatch, slots: torch.Tensor, block_table: torch.Tensor, block_size: int) -> _Batch:
        columns = known.wanted, known.draft_length, known.capacity, known.end
        wanted, done, capacity, end = self._to_device(np.stack(columns).astype(np.int64))
        texts = self.req_states.all_token_ids.gpu
        # A request that has ended may run on, beyond where its text ends.
        length = self.req_states.total_len.gpu[slots].long().clamp(1, known.longest)
        max_depth = torch.minimum(end, torch.full_like(end, texts.shape[1])) - length - 1
        return _Batch(
            length=length,
            texts=texts[:, : known.longest][slots],
            block_table=block_table,
            block_size=block_size,
            wanted=wanted.bool() & (max_depth > 0),
            done=torch.where(done < 0, self.draft_length[slots], done),
            capacity=capacity,
            max_depth=max_depth,
            trust=self._to_device(known.trust),
        )

    # --- the draft model --------------------------------------------------------------------------

    def _catch_up(self, batch: _Batch, drafter: Drafter, most_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft over the newest tokens; updates ``batch.done``.

        Args:
            most_new: rows for each request. Whose text has got further than that takes more than one step.

        Returns:
            bool [num_requests], requests that can be drafted for, and the hidden states of their last tokens,
            [num_requests, hidden].
        """
        room = batch.capacity.clamp(max=drafter.max_positions)
        missing = torch.where(batch.wanted, torch.minimum(batch.length, room) - batch.done, 0)
        fresh = missing.clamp(0, most_new)
        place = torch.arange(most_new, device=self.device)
        real = place < fresh[:, None]
        positions = (batch.done[:, None] + place).clamp(max=min(drafter.max_positions, batch.texts.shape[1]) - 1)
        words = -(-most_new // 64)
        mask = one_bit(place, words).cumsum(0)  # a row attends those before it and itself
        mask = torch.where(real[:, :, None], mask, 0)
        tokens = batch.texts.gather(1, positions)
        features = self._features_before(batch, drafter, positions)
        hidden = self._run(drafter.model, batch, tokens, positions, positions, real, mask, batch.done, features)
        last = (fresh - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        batch.done.add_(fresh)
        return (fresh > 0) & (batch.done == batch.length), hidden.gather(1, last).squeeze(1)

    def _features_before(self, batch: _Batch, drafter: Drafter, positions: torch.Tensor) -> torch.Tensor | None:
        """Hidden states that the target had before tokens at positions, [num_requests, width]."""
        if drafter.features is None:
            return None
        slots = _flat_slots(batch, (positions - 1).clamp(min=0))
        return drafter.features.read(slots.flatten(), (positions == 0).flatten())

    def _grow(
        self, graphs: DeviceGraphs, batch: _Batch, drafter: Drafter, drafted: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Grow the graphs level by level, as ``Drafter.grow``; ``hidden``: of the roots."""
        config, count = self.config, len(batch.length)
        frontier, frontier_len = torch.zeros_like(batch.length)[:, None], drafted.long()
        used = torch.zeros_like(batch.length)
        words = -(-drafter.max_slots // 64)
        masks = torch.zeros((count, graphs.capacity + 1, words), dtype=torch.int64, device=self.device)
        room = (batch.capacity - batch.length).clamp(max=drafter.max_slots)
        deepest = torch.minimum(batch.max_depth, drafter.max_positions - batch.length)
        num_nodes = torch.full_like(batch.length, self.num_places)
        merge_ngram = torch.where(batch.trust[:, MERGED] < OFF_BELOW, 0, config.merge_ngram)
        # Which row of the level that ran it a node had; the root's is the first.
        lines = torch.zeros((count, graphs.capacity + 1), dtype=torch.int64, device=self.device)
        for level in range(1, config.max_depth + 1):
            first_new = graphs.size.clone()
            probs, tokens = drafter.model.most_probable(hidden, config.top_k)
            shape = (count, frontier.shape[1], config.top_k)
            real = torch.arange(frontier.shape[1], device=self.device) < frontier_len[:, None]
            self.counts[4] += ((probs.view(shape)[:, :, 0] == 0) & real).sum()
            counts = add_candidates(
                graphs,
                frontier,
                frontier_len,
                tokens.view(shape),
                probs.view(shape),
                num_nodes,
                config.theta_sib,
                merge_ngram,
                config.merge_ngram,
            )
            self.counts[:3] += counts
            if level == config.max_depth:
                break
            room_now = torch.where(drafted & (deepest > level), room - used, 0)
            # A level has no more nodes than the one before has candidates.
            width = min(config.num_speculative_tokens, frontier.shape[1] * config.top_k)
            frontier, frontier_len = next_frontier(graphs, first_new, num_nodes, room_now, config.theta_prob, width)
            rows = level_rows(graphs, used, masks, frontier, frontier_len)
            self.counts[3] += frontier_len.sum()
            features = None
            if drafter.features is not None:  # below the root they are the draft's own
                line = lines.gather(1, graphs.parent.gather(1, frontier).long().clamp(min=0))
                width_before = hidden.numel() // (count * hidden.shape[-1])
                above = hidden.view(count, width_before, -1)
                features = above.gather(1, line[:, :, None].expand(-1, -1, above.shape[2])).flatten(0, 1)
                node = torch.where(rows.real, frontier, graphs.capacity)
                lines.scatter_(1, node, torch.arange(frontier.shape[1], device=self.device).expand_as(frontier))
            base = batch.length[:, None]
            positions = (base - 1 + rows.depth).clamp(max=drafter.max_positions - 1)
            slots = base + rows.slot
            hidden = self._run(
                drafter.model, batch, rows.token, positions, slots, rows.real, rows.mask, batch.length, features
            ).flatten(0, 1)

    def _run(
        self, model: DraftModel, batch: _Batch, tokens, positions, slots, real, mask, prefix, features
    ) -> torch.Tensor:
        """One forward of the draft over as many rows of each request.

        Args:
            tokens, positions, slots, real: [num_requests, width], KV slots counted per request; rows that are not real
                leave nothing behind. mask: int64 [num_requests, width, words], KV behind the prefix that each attends.
            prefix: int64 [num_requests], tokens that all rows of a request attend.
            features: of ``DraftModel.run_rows``.

        Returns:
            hidden states [num_requests, width, hidden].
        """
        count, width = tokens.shape
        flat_slots = torch.where(real, _flat_slots(batch, slots), -1)
        tree = TreeRows(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=self.device) * width,
            # Who has no row reads nothing: its blocks may not be there yet.
            prefix_lens=torch.where(real.any(1), prefix, 0).int(),
            block_table=batch.block_table,
            positions=positions.flatten(),
            mask=mask.flatten(0, 1),
            rows=None,
            max_rows=width,
        )
        assert self.drafter is not None
        self.drafter.stats.counts["draft_rows"] += count * width
        self.drafter.stats.counts["draft_forwards"] += 1
        hidden = model.run_rows(tokens.flatten().int(), flat_slots.flatten(), tree, features)
        return hidden.view(count, width, -1)

    # --- the text itself --------------------------------------------------------------------------

    def _copy(self, graphs: DeviceGraphs, batch: _Batch) -> None:
        """Graft what followed the end of each text earlier in it."""
        trusted = batch.wanted & (batch.trust[:, NGRAM] >= OFF_BELOW)
        depth = torch.where(trusted, batch.max_depth.clamp(max=self.num_places), 0)
        graft_ngrams(graphs, batch.texts, batch.length, self.config.top_k, depth, self.num_places, MIN_NGRAM_MATCH)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _flat_slots(batch: _Batch, slots: torch.Tensor) -> torch.Tensor:
    """Physical KV slots, int64, of slots counted per request, [num_requests, width]."""
    blocks = batch.block_table.gather(1, (slots // batch.block_size).clamp(max=batch.block_table.shape[1] - 1))
    return blocks.long() * batch.block_size + slots % batch.block_size
