"""The draft phase of a decode step, entirely on the device, because only the device knows what was accepted before.

It is one function over buffers that stay where they are: the draft catches up on the tokens that it has not read, grows
graphs level by level, adds copies from the texts and from other requests' responses, and flattens. A draft of whole
blocks drafts one instead, which is laid into the graph. Nothing in it depends on what a tensor holds, so a CUDA graph
can hold it for each number of requests and of levels. The host sends only what does not depend on acceptance. The
results equal those of ``Speculation.propose`` on the host that drafts as many levels. Requests may get copies only,
without the draft model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.draft.block_drafter import BlockDrafter
from vllm_gsd.engine.draft.copies import MIN_NGRAM_MATCH, PACKED
from vllm_gsd.engine.draft.drafter import Drafter
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.parallel.ranks import tensors_from_first_rank
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.method.constants import NUM_BINS, NUM_DEPTHS, NUM_SOURCES
from vllm_gsd.ops.flatten.api import DeviceTrees, flatten_graphs
from vllm_gsd.ops.growth.api import Limits, begin, grow_level
from vllm_gsd.ops.growth.state import TOKEN, DeviceGraphs, Known, Rows, new_graphs, new_rows
from vllm_gsd.ops.lattice.api import add_lattices
from vllm_gsd.ops.ngram.api import graft_ngrams, graft_trees, new_matches, tree_words

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_gsd.engine.v2.draft_graphs import DraftGraphs

_FACTORS, _LIMITS = NUM_SOURCES * NUM_DEPTHS * NUM_BINS, 5


@dataclass(frozen=True)
class KnownBatch:
    """What the host knows about a batch before it learns which tokens were accepted."""

    slots: np.ndarray  # int64 [num_requests], V2's request slots
    # int [num_requests], 1 for requests to draft for, 2 for those that get copies only, and 0 for no graph, as in the
    # middle of a prompt.
    wanted: np.ndarray
    draft_length: np.ndarray  # int64 [num_requests], leading tokens with draft KV; -1 if only the device knows
    capacity: np.ndarray  # int64 [num_requests], KV slots in the allocated blocks
    end: np.ndarray  # int64 [num_requests], the request's maximum number of tokens
    trust: np.ndarray  # float32 [num_requests, sources], from ``SourceTrust``
    factor: np.ndarray  # float32, from ``Calibration``
    # int32 [num_requests, words], what other requests' responses suggest, from ``pack_tree``; None if the engine does
    # not share responses
    suggested: np.ndarray | None = None

    def packed(self, part: slice, count: int) -> np.ndarray:
        """A part of the requests in the layout of ``DeviceDrafting.known``, padded to ``count`` requests, int32."""
        trust = self.trust[part]
        floats = np.zeros(_FACTORS + count * NUM_SOURCES, np.float32)
        floats[:_FACTORS] = self.factor.ravel()
        floats[_FACTORS : _FACTORS + trust.size] = trust.ravel()
        limits = np.full((count, _LIMITS), -1, np.int32)
        for column, values in enumerate((self.slots, self.wanted, self.draft_length, self.capacity, self.end)):
            limits[: len(trust), column] = values[part]
        packed = [floats.view(np.int32), limits.ravel()]
        if self.suggested is not None:
            suggested = np.zeros((count, self.suggested.shape[1]), np.int32)
            suggested[: len(trust)] = self.suggested[part]
            packed.append(suggested.ravel())
        return np.concatenate(packed)


@dataclass(frozen=True)
class Bucket:
    """The buffers for one number of requests, and what is built from them once."""

    count: int
    known: Known
    graphs: DeviceGraphs
    block_table: torch.Tensor  # int32 [count, max_blocks]
    last: torch.Tensor  # int64 [count]
    rows: list[tuple[int, Rows, TreeRows]]  # of the texts and of every level but the last, with their widths
    ranks: torch.Tensor
    suggested: torch.Tensor  # int32 [count, words], a view of what ``known`` is a view of


class DeviceDrafting:
    """Grows graphs of at most ``capacity`` nodes for a batch, and flattens them into ``trees`` by V2's request slot."""

    def __init__(
        self,
        config: GSDConfig,
        drafter: Drafter | None,
        req_states: RequestState,
        capacity: int,
        trees: DeviceTrees,
        device: torch.device,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.req_states = req_states
        self.trees = trees
        self.device = device
        # Returns the CUDA graphs, or None. The speculator owns them.
        self.cuda_graphs: Callable[[], DraftGraphs | None] = lambda: None
        slots, num_nodes = trees.token.shape[0], trees.token.shape[1] - 1
        block = drafter if isinstance(drafter, BlockDrafter) else None
        # The most draft levels. A block counts as one, and so do copies without a draft model.
        self.num_levels = config.max_depth if drafter is not None and block is None else 1
        # The numbers of levels that are captured in CUDA graphs and timed; without a plan, all levels are drafted.
        few = {1, (1 + self.num_levels) // 2} if config.budget == "auto" else set()
        self.variants = sorted(few | {self.num_levels})
        # Of the first forward, for each request: a step's tokens, or a block.
        self.width = 1 + num_nodes if block is None else block.num_rows
        # Drafted for at once. The draft's forward is over no more rows than the target's largest.
        self.most = slots if drafter is None else max(1, min(slots, drafter.max_rows // self.width))
        # The number of leading tokens with draft KV, by slot.
        self.draft_length = torch.zeros(slots, dtype=torch.int64, device=device)
        max_length = req_states.all_token_ids.gpu.shape[1]
        self.limits = Limits(
            top_k=config.top_k,
            theta_sib=config.theta_sib,
            theta_prob=config.theta_prob,
            max_length=max_length,
            max_positions=max_length if drafter is None else drafter.max_positions,
            max_slots=0 if drafter is None else drafter.max_slots,
            shift=0 if drafter is None else drafter.model.shift,
            mask_token=-1 if block is None else block.mask_token,
            causal=block is None or block.causal,
        )
        merge_ngram = 0 if drafter is None or block else config.merge_ngram
        self.graphs = new_graphs(self.most, capacity, num_nodes, merge_ngram, self.limits.max_slots, device)
        # Of a suffix tree: along a path that was accepted since the look-up, and below it.
        self.tree_words = tree_words(1 + 2 * num_nodes) if PACKED.intersection(config.sources) else 0
        # Factors, the requests' trust in float32, their limits and suffix trees, so that one copy brings all.
        words = _FACTORS + self.most * (NUM_SOURCES + _LIMITS + self.tree_words)
        self.known = torch.zeros(words, dtype=torch.int32, device=device)
        self.last = torch.zeros(self.most, dtype=torch.int64, device=device)
        self.text_rows = new_rows(self.most, self.width, -(-self.width // 64), device)
        self.node_rows = new_rows(self.most, num_nodes, self.graphs.slots.shape[1], device)
        self.ranks, self.match_probs = new_matches(self.most, config.top_k, device)
        self.unbind()

    @property
    def counts(self) -> torch.Tensor:
        """``growth.state.COUNTS`` since the last reset, int64 [5]."""
        return self.graphs.counts

    def bind(self, block_table: torch.Tensor, block_size: int) -> None:
        """Allocate what the KV cache decides. ``propose`` gets rows of the table, int32 [num_slots, max_blocks]."""
        self.block_table = torch.zeros_like(block_table[: self.most])
        self.block_size = block_size
        self.buckets: dict[int, Bucket] = {}

    def unbind(self) -> None:
        """Release what ``bind`` allocated. Until there is a KV cache, one block stands for all KV."""
        self.bind(torch.zeros((self.most, 1), dtype=torch.int32, device=self.device), 1 << 30)

    def reset(self) -> None:
        """Forget the draft KV and the counts of all requests."""
        self.draft_length.zero_()
        self.counts.zero_()

    @torch.inference_mode()
    def propose(self, known: KnownBatch, block_table: torch.Tensor, levels: int | None = None) -> None:
        """Draft ``levels`` levels for a batch, or all for None, and write the flattened graphs of its requests.

        ``block_table`` is int32 [num_requests, max_blocks].
        """
        levels = self.num_levels if levels is None else levels
        copies_only = not (known.wanted == 1).any()  # a few launches, which need no CUDA graph
        if copies_only and self.drafter is not None:
            levels = 0
        graphs = None if levels == 0 else self.cuda_graphs()
        for first in range(0, len(known.slots), self.most):
            part = slice(first, first + self.most)
            count = len(known.slots[part])
            size = None if graphs is None else graphs.size_for(count, levels)
            (packed,) = send(self.device, known.packed(part, size or count))
            self.known[: len(packed)].copy_(packed)
            self.block_table[:count].copy_(block_table[part])
            if graphs is None or size is None:
                self.draft(count, levels)
            else:
                graphs.replay(size, levels)
            if self.drafter is not None:
                widths = [width for width, _, _ in self.bucket(size or count).rows[:levels]]
                self.drafter.stats.counts["draft_rows"] += (size or count) * sum(widths)
                self.drafter.stats.counts["draft_forwards"] += len(widths)

    def run_idle(self, count: int, levels: int) -> None:
        """Run the draft phase over padding for ``count`` requests, to measure its cost."""
        for first in range(0, count, self.most):
            part = min(self.most, count - first)
            graphs = self.cuda_graphs()
            size = None if graphs is None else graphs.size_for(part, levels)
            self.known.fill_(-1)  # padding, so that no request's draft KV changes
            if graphs is None or size is None:
                self.draft(part, levels)
            else:
                graphs.replay(size, levels)

    def bucket(self, count: int) -> Bucket:
        """The buffers for ``count`` requests, at most ``most``."""
        if count not in self.buckets:
            num_nodes = self.graphs.num_nodes
            # A level has at most as many nodes as the level before has candidates.
            widths = [min(num_nodes, self.config.top_k**level) for level in range(1, self.num_levels)]
            rows = [(self.width, self.text_rows), *((width, self.node_rows) for width in widths)]
            floats = self.known[: _FACTORS + count * NUM_SOURCES].view(torch.float32)
            limits, suggested, _ = self.known[len(floats) :].tensor_split(
                [count * _LIMITS, count * (_LIMITS + self.tree_words)]
            )
            factor = floats[:_FACTORS].view(NUM_SOURCES, NUM_DEPTHS, NUM_BINS)
            self.buckets[count] = Bucket(
                count=count,
                known=Known(limits.view(count, _LIMITS), floats[_FACTORS:].view(count, NUM_SOURCES), factor),
                graphs=self.graphs.first(count),
                block_table=self.block_table[:count],
                last=self.last[:count],
                rows=[(width, part := whole.first(count, width), self._tree(part, width)) for width, whole in rows],
                ranks=self.ranks[:count],
                suggested=suggested.view(count, self.tree_words),
            )
        return self.buckets[count]

    def _tree(self, rows: Rows, width: int) -> TreeRows:
        """How the rows of a forward attend. Requests without rows read no KV, because they may have no blocks."""
        count = len(rows.prefix)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self.device) * width
        return TreeRows(starts, rows.prefix, self.block_table[:count], rows.position, rows.mask, max_rows=width)

    @torch.inference_mode()
    def draft(self, count: int, levels: int) -> None:
        """The draft phase for ``count`` requests, as ``known`` and ``block_table`` say.

        With 0 levels, the draft model does not run.
        """
        bucket, req_states, texts = self.bucket(count), self.req_states, self.req_states.all_token_ids.gpu
        blocks: tuple[Any, ...] = (bucket.block_table, self.block_size, self.limits)
        _, rows, tree = bucket.rows[0]
        begin(
            bucket.graphs, rows, bucket.last, bucket.known, texts, req_states.total_len.gpu, self.draft_length, *blocks
        )
        if levels == 0:
            pass
        elif isinstance(self.drafter, BlockDrafter):
            hidden = self.drafter.model.run_rows(rows.token, rows.slot, tree).view(count, self.width, -1)
            roots = bucket.graphs.nodes[:, TOKEN, 0].long()
            tokens, probs = self.drafter.candidates(hidden[:, self.drafter.predicting], roots)
            add_lattices(bucket.graphs, tokens, probs, self.limits)
        elif isinstance(self.drafter, LevelDrafter):
            self._grow(self.drafter, bucket, levels, blocks)
        if "ngram" in self.config.sources:
            graft_ngrams(bucket.graphs, bucket.ranks, self.match_probs, texts, MIN_NGRAM_MATCH)
        if self.tree_words:
            graft_trees(bucket.graphs, bucket.suggested, self.match_probs, texts)
        flatten_graphs(bucket.graphs, self.trees, bucket.known.factor, bucket.known.trust)

    def _grow(self, drafter: LevelDrafter, bucket: Bucket, num_levels: int, blocks: tuple[Any, ...]) -> None:
        """Catch up on the texts and grow ``num_levels`` levels."""
        (_, rows, tree), *levels = bucket.rows[:num_levels]
        features, model = drafter.features, drafter.model
        # No name keeps what the draft reads, so that it is freed before there are logits.
        hidden = model.run_rows(
            rows.token, rows.slot, tree, None if features is None else features.read(rows.source, rows.source < 0)
        )[bucket.last]
        for _, rows, tree in levels:
            probs, tokens = self._candidates(drafter, hidden, bucket.count)
            grow_level(bucket.graphs, rows, tokens, probs, *blocks)
            # Below the root, the draft reads its own hidden states.
            hidden = model.run_rows(
                rows.token, rows.slot, tree, None if features is None else model.next_features(hidden[rows.source])
            )
        probs, tokens = self._candidates(drafter, hidden, bucket.count)
        grow_level(bucket.graphs, None, tokens, probs, *blocks)

    def _candidates(self, drafter: Drafter, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and tokens of the rows' candidates, [count, width, top_k], the same on every rank."""
        probs, tokens = drafter.model.most_probable(hidden, self.config.top_k)
        tokens, probs = tensors_from_first_rank(tokens, probs)
        return probs.view(count, -1, self.config.top_k), tokens.view(count, -1, self.config.top_k)
