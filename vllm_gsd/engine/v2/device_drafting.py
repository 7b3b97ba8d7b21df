"""Drafting entirely on the device, because only the device knows what the previous step accepted.

The host passes only what does not depend on acceptance: the requests to draft for, their KV capacity, and what earlier
steps have taught. Lengths and tokens come from vLLM's device buffers, and all tensors have fixed, padded shapes. The
result equals that of ``Speculation.propose`` on the host without a cost table, which drafts every level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

# The counters in ``DeviceDrafting.counts``.
COUNTS = ("nodes_added", "nodes_merged", "nodes_pruned", "draft_nodes", "draft_rows_invalid")
# Most bytes of one drafting pass over a part of the batch, not counting the draft's forward pass and logits.
MAX_BYTES = 1 << 30
# Most 8-byte values per node of a graph: its own fields, and temporary ones while a level is added.
COLUMNS = 24


@dataclass(frozen=True)
class KnownBatch:
    """What the host knows about a batch before it learns which tokens were accepted."""

    slots: np.ndarray  # int64 [num_requests], V2's request slots
    wanted: np.ndarray  # bool [num_requests], requests to draft for; False in the middle of a prompt
    draft_length: np.ndarray  # int64 [num_requests], leading tokens with draft KV; -1 if only the device knows
    capacity: np.ndarray  # int64 [num_requests], KV slots in the allocated blocks
    end: np.ndarray  # int64 [num_requests], the request's maximum number of tokens
    trust: np.ndarray  # float32 [num_requests, sources], from ``SourceTrust``
    factor: np.ndarray  # float32, from ``Calibration``
    most_new: int  # upper bound on the tokens that a request got in this step
    longest: int  # upper bound on the tokens that a request has now

    def part(self, of: slice) -> KnownBatch:
        """The same for a slice of the requests."""
        names = ("slots", "wanted", "draft_length", "capacity", "end", "trust")
        return replace(self, **{name: getattr(self, name)[of] for name in names})


@dataclass(frozen=True)
class _Batch:
    """``KnownBatch`` on the device, and what only the device knows."""

    length: torch.Tensor  # int64 [num_requests], number of tokens
    texts: torch.Tensor  # int32 [num_requests, longest], the tokens
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
        config: gsd's options.
        drafter: None without a draft model.
        req_states: V2's request states.
        capacity: the most nodes of a graph.
        num_places: the most nodes of a flattened graph.
        device: the engine's device.
    """

    def __init__(
        self,
        config: GSDConfig,
        drafter: Drafter | None,
        req_states: RequestState,
        capacity: int,
        num_places: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.req_states = req_states
        self.capacity = capacity
        self.num_places = num_places
        self.device = device
        # The number of leading tokens with draft KV, by slot.
        self.draft_length = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def propose(
        self, known: KnownBatch, slots: torch.Tensor, block_table: torch.Tensor, block_size: int
    ) -> DeviceTrees:
        """Draft for a batch.

        Args:
            known: what the host knows about the batch.
            slots: ``known.slots`` on the device.
            block_table: int32 [num_requests, max_blocks].
            block_size: tokens per block.

        Returns:
            The flattened graphs, padded to ``num_places`` nodes.
        """
        most = self.most_requests(known.longest, known.most_new)
        parts = []
        for first in range(0, len(slots), most):
            of = slice(first, first + most)
            parts.append(self._propose(known.part(of), slots[of], block_table[of], block_size))
        return parts[0] if len(parts) == 1 else DeviceTrees(*map(torch.cat, zip(*parts, strict=True)))

    def most_requests(self, longest: int, most_new: int) -> int:
        """How many requests to draft for at once, so that drafting stays within ``MAX_BYTES``.

        Args:
            longest: as in ``KnownBatch``.
            most_new: as in ``KnownBatch``.
        """
        most = MAX_BYTES // self.bytes_per_request(longest)
        if self.drafter is not None:  # its forward pass is limited to ``max_rows`` rows
            most = min(most, self.drafter.max_rows // max(most_new, self.config.num_speculative_tokens))
        return max(1, most)

    def bytes_per_request(self, longest: int) -> int:
        """An upper bound on the bytes of a request during drafting: its tokens, its graph and one level's candidates.

        Each candidate is compared with every node; each comparison takes a byte, and several are alive at a time.
        """
        width = self.config.num_speculative_tokens
        nodes, candidates = self.capacity + 1, width * self.config.top_k
        slots = 0 if self.drafter is None else self.drafter.max_slots
        words = -(-self.capacity // 64) + -(-slots // 64)
        return MATCH_BYTES * longest + nodes * (4 * candidates + 8 * (COLUMNS + words)) + 32 * candidates * words

    def reset(self) -> None:
        """Forget the draft KV and the counts of all requests."""
        self.draft_length.zero_()
        self.counts.zero_()

    def _propose(
        self, known: KnownBatch, slots: torch.Tensor, block_table: torch.Tensor, block_size: int
    ) -> DeviceTrees:
        """Like ``propose``, for at most ``most_requests`` requests."""
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
        # A finished request may run for another step, beyond the end of its text.
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
        """Run the draft on the newest tokens and update ``batch.done``.

        Args:
            batch: the batch.
            drafter: the draft model's.
            most_new: rows per request. A request with more new tokens catches up over several steps.

        Returns:
            Whether each request has caught up, bool [num_requests], and the hidden states of the last tokens,
            [num_requests, hidden].
        """
        shift, room = drafter.model.shift, batch.capacity.clamp(max=drafter.max_positions)
        length = batch.length - shift
        missing = torch.where(batch.wanted, torch.minimum(length, room) - batch.done, 0)
        fresh = missing.clamp(0, most_new)
        place = torch.arange(most_new, device=self.device)
        real = place < fresh[:, None]
        positions = (batch.done[:, None] + place).clamp(
            max=min(drafter.max_positions, batch.texts.shape[1] - shift) - 1
        )
        words = -(-most_new // 64)
        mask = one_bit(place, words).cumsum(0)  # each row attends to the rows before it and to itself
        mask = torch.where(real[:, :, None], mask, 0)
        tokens = batch.texts.gather(1, positions + shift)
        features = self._features_before(batch, drafter, positions)
        hidden = self._run(drafter.model, batch, tokens, positions, positions, real, mask, batch.done, features)
        ends = (fresh - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        batch.done.add_(fresh)
        return (fresh > 0) & (batch.done == length), hidden.gather(1, ends).squeeze(1)

    def _features_before(self, batch: _Batch, drafter: Drafter, positions: torch.Tensor) -> torch.Tensor | None:
        """The target's hidden states before the tokens at ``positions``, [num_requests, width]; None if unused."""
        if drafter.features is None:
            return None
        places = positions - 1 + drafter.model.shift
        slots = _flat_slots(batch, places.clamp(min=0))
        return drafter.features.read(slots.flatten(), (places < 0).flatten())

    def _grow(
        self, graphs: DeviceGraphs, batch: _Batch, drafter: Drafter, drafted: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Grow the graphs level by level, as ``Drafter.grow`` does.

        Args:
            graphs: updated.
            batch: the batch.
            drafter: the draft model's.
            drafted: bool [num_requests], the requests to draft for.
            hidden: [num_requests, hidden], the hidden states of the roots.
        """
        config, count, length = self.config, len(batch.length), batch.length - drafter.model.shift
        frontier, frontier_len = torch.zeros_like(batch.length)[:, None], drafted.long()
        used = torch.zeros_like(batch.length)
        words = -(-drafter.max_slots // 64)
        masks = torch.zeros((count, graphs.capacity + 1, words), dtype=torch.int64, device=self.device)
        room = (batch.capacity - length).clamp(max=drafter.max_slots)
        deepest = torch.minimum(batch.max_depth, drafter.max_positions - length)
        num_nodes = torch.full_like(batch.length, self.num_places)
        merge_ngram = torch.where(batch.trust[:, MERGED] < OFF_BELOW, 0, config.merge_ngram)
        # The row of each node in the forward pass of its level; the root has row 0.
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
            # A level has at most as many nodes as the level before has candidates.
            width = min(config.num_speculative_tokens, frontier.shape[1] * config.top_k)
            frontier, frontier_len = next_frontier(graphs, first_new, num_nodes, room_now, config.theta_prob, width)
            rows = level_rows(graphs, used, masks, frontier, frontier_len)
            self.counts[3] += frontier_len.sum()
            features = None
            if drafter.features is not None:  # below the root, these are the draft's own hidden states
                features = drafter.model.next_features(_of_parents(hidden, lines, graphs, frontier))
                node = torch.where(rows.real, frontier, graphs.capacity)
                lines.scatter_(1, node, torch.arange(frontier.shape[1], device=self.device).expand_as(frontier))
            base = length[:, None]
            positions = (base - 1 + rows.depth).clamp(max=drafter.max_positions - 1)
            slots = base + rows.slot
            hidden = self._run(
                drafter.model, batch, rows.token, positions, slots, rows.real, rows.mask, length, features
            ).flatten(0, 1)

    def _run(
        self,
        model: DraftModel,
        batch: _Batch,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        real: torch.Tensor,
        mask: torch.Tensor,
        prefix: torch.Tensor,
        features: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the draft on ``width`` rows of each request.

        Args:
            model: the draft model.
            batch: the batch.
            tokens: [num_requests, width].
            positions: [num_requests, width].
            slots: [num_requests, width], KV slots numbered from the start of the request.
            real: bool [num_requests, width]; other rows are padding and write no KV.
            mask: int64 [num_requests, width, words], the KV after the prefix that each row attends to.
            prefix: int64 [num_requests], the number of leading tokens that all rows of a request attend to.
            features: as in ``DraftModel.run_rows``.

        Returns:
            Hidden states [num_requests, width, hidden].
        """
        count, width = tokens.shape
        flat_slots = torch.where(real, _flat_slots(batch, slots), -1)
        tree = TreeRows(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=self.device) * width,
            # Requests without rows read no KV, because their blocks may not be allocated yet.
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

    # --- n-grams ----------------------------------------------------------------------------------

    def _copy(self, graphs: DeviceGraphs, batch: _Batch) -> None:
        """Add candidates that followed earlier occurrences of each text's last tokens."""
        trusted = batch.wanted & (batch.trust[:, NGRAM] >= OFF_BELOW)
        depth = torch.where(trusted, batch.max_depth.clamp(max=self.num_places), 0)
        graft_ngrams(graphs, batch.texts, batch.length, self.config.top_k, depth, self.num_places, MIN_NGRAM_MATCH)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _of_parents(
    hidden: torch.Tensor, lines: torch.Tensor, graphs: DeviceGraphs, frontier: torch.Tensor
) -> torch.Tensor:
    """Hidden states of the parents of a level's nodes.

    Args:
        hidden: [num_requests * width of the level before, hidden], the hidden states of that level.
        lines: int64 [num_requests, capacity + 1], the row of each node in the forward pass of its level.
        graphs: the graphs.
        frontier: [num_requests, width], the nodes.

    Returns:
        [num_requests * width, hidden].
    """
    count = len(frontier)
    line = lines.gather(1, graphs.parent.gather(1, frontier).long().clamp(min=0))
    width_before = hidden.numel() // (count * hidden.shape[-1])
    above = hidden.view(count, width_before, -1)
    return above.gather(1, line[:, :, None].expand(-1, -1, above.shape[2])).flatten(0, 1)


def _flat_slots(batch: _Batch, slots: torch.Tensor) -> torch.Tensor:
    """Convert slots numbered per request to physical KV slots, int64 [num_requests, width]."""
    blocks = batch.block_table.gather(1, (slots // batch.block_size).clamp(max=batch.block_table.shape[1] - 1))
    return blocks.long() * batch.block_size + slots % batch.block_size
