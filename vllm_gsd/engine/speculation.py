"""One engine's speculation on either model runner: grow token graphs and learn which nodes the target accepts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.config.draft_kind import BLOCK_KINDS
from vllm_gsd.engine.attention.layers import (
    attention_layers,
    check_draft_layers,
    check_kernel_blocks,
    check_target_layers,
)
from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.draft.block_drafter import BlockDrafter
from vllm_gsd.engine.draft.context_kv import ContextKV
from vllm_gsd.engine.draft.copies import COPIED, Copies, leave_out_copies
from vllm_gsd.engine.draft.drafter import Drafter
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.draft.limits import MOST_MISSED, TOO_LONG, within_reach
from vllm_gsd.engine.draft.model import DraftModel, NoDraft, kind_of_draft
from vllm_gsd.engine.observe.recorder import recorder_of
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.observe.step_record import SOURCES
from vllm_gsd.engine.schedule.grammar import ProposedTree
from vllm_gsd.engine.verify.draft_tree import NO_NODES, FlatTree, Paths, flat_tree
from vllm_gsd.engine.verify.step import VerifyStep
from vllm_gsd.host import flatten, reset_all, tally
from vllm_gsd.method.constants import ACCEPTED, GRAMMAR, MOVED, NGRAM, NUM_SOURCES, VERIFIED
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.method.graph import GraphBatch, new_graphs
from vllm_gsd.planner.calibration import SourceTrust
from vllm_gsd.planner.planner import PROBE_REQUESTS, Planner
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.utils import AttentionGroup

# A grammar may forbid most draft tokens, so it chooses among GRAMMAR_CHOICE times as many nodes as are verified.
GRAMMAR_CHOICE = 4
# Counters of accepted nodes by source, and their index in the totals of ``tally``.
ACCEPTED_COUNTERS = {
    f"nodes_accepted_{name}": GRAMMAR if source == NUM_SOURCES else ACCEPTED + source
    for source, name in enumerate(SOURCES)
}


class Speculation:
    """Grows token graphs for the requests of a batch and learns from the nodes that the target accepts."""

    def __init__(self, vllm_config: VllmConfig):
        config = wire.options_of(vllm_config)
        assert config is not None
        self.vllm_config = vllm_config
        self.config: GSDConfig = config
        self.stats = GraphStats()
        self.draft_kv = DraftKVTracker(0, 1)  # of no blocks, until there is a KV cache
        self.trees: dict[str, FlatTree] = {}  # proposed, not yet verified
        self.grammar_trees: dict[str, ProposedTree] = {}  # proposed, not yet sent to the scheduler
        self.admitted: dict[str, tuple[bool, bool, int]] = {}  # results of ``admit`` by request
        self.max_model_len = vllm_config.model_config.max_model_len
        self.num_nodes = self.config.num_speculative_tokens if self.config.budget == "auto" else self.config.budget
        nodes = self.config.num_speculative_tokens
        capacity = 1 + min(2048, nodes * self.config.top_k * (self.config.max_depth + 1))
        self.graphs = new_graphs(vllm_config.scheduler_config.max_num_seqs, capacity)
        self.planner = Planner(self.config.top_k, self.config.max_depth, self.num_nodes)
        self.trust = SourceTrust()
        self.copies = Copies(self.config, self.num_nodes)
        self.most_missed = 1 + max(MOST_MISSED, vllm_config.scheduler_config.max_num_batched_tokens)
        self.recorder = recorder_of(vllm_config, config, self.stats)
        self.drafter: Drafter | None = None
        if self.config.model is not None:
            common = vllm_config, self.config, self.stats, self.planner, self.recorder
            block = kind_of_draft(vllm_config, self.config.model) in BLOCK_KINDS
            self.drafter = BlockDrafter(*common) if block else LevelDrafter(*common, capacity)
        self.draft_model: DraftModel | NoDraft = NoDraft() if self.drafter is None else self.drafter.model
        # The target's compiled code returns these states. Another draft may be in the same folder some day.
        wire.note_compiled(vllm_config, read_layers=self.draft_model.reads_aux and self.draft_model.aux_layers)

    # --- start-up ---------------------------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module | None = None) -> None:
        """Load the draft model. The target must be loaded before.

        Raises:
            GSDConfigError: a layer of the target or draft cannot attend along token graphs.
        """
        layers = attention_layers(self.vllm_config)
        check_target_layers(layers, self.config.num_speculative_tokens)
        if self.drafter is not None:
            self.drafter.model.load(target_model)
            layers = attention_layers(self.vllm_config)
            layers = {name: layers[name] for name in self.draft_model.layer_names}
            check_draft_layers(layers)
            if isinstance(self.drafter, BlockDrafter):
                self.drafter.check_layers(layers)

    def warm_up(self, num_tokens: int) -> None:
        if self.drafter is not None:
            self.drafter.model.run_idle(num_tokens)

    def prepare(
        self,
        kv_cache_config: KVCacheConfig,
        attention_groups: Sequence[Sequence[AttentionGroup]],
        pool: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Set up drafting for the KV cache, once the cache and the attention groups exist.

        Args:
            pool: the context in which hidden states are allocated.

        Raises:
            GSDConfigError: an attention backend splits the blocks of the KV cache.
        """
        check_kernel_blocks(attention_groups[0])
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.draft_kv = DraftKVTracker(kv_cache_config.num_blocks, block_size, self.draft_model.shift)
        if self.drafter is not None:
            self.drafter.model.bind_attention(attention_groups[0])
            self.drafter.prepare(kv_cache_config.num_blocks, block_size, pool or nullcontext())

    def release_kv_cache(self) -> None:
        """Drop everything that refers to the KV cache. ``prepare`` is called again for the next cache."""
        self.draft_kv = DraftKVTracker(0, 1)
        if self.drafter is not None:
            self.drafter.model.builders = []
            self.drafter.features = None

    def forget_warm_up(self) -> None:
        """Discard everything learned and counted during warm-up, except the number of captured CUDA graphs."""
        captured = self.stats.take()["counts"].get("cudagraphs_captured")
        if captured:
            self.stats.counts["cudagraphs_captured"] = captured
        self.planner.forget()
        self.trust = SourceTrust()
        self.trees, self.grammar_trees, self.admitted = {}, {}, {}
        self.copies.clear()
        self.draft_kv = DraftKVTracker(len(self.draft_kv.valid), self.draft_kv.block_size, self.draft_model.shift)

    @property
    def features(self) -> Features | ContextKV | None:
        """What is kept of the target's hidden states; None if the draft does not read them."""
        return None if self.drafter is None else self.drafter.features

    def keep_features(
        self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None
    ) -> None:
        """Store what the draft reads of a step's hidden states.

        Args:
            slots: int64 [n], the KV slots of the step's tokens.
            positions: int64 [>= n], their positions.
            hidden: [>= n, hidden], the target's.
            aux: of each layer in ``draft_model.aux_layers``, [>= n, hidden]; None if there are none.
        """
        if self.drafter is not None and self.features is not None:
            self.drafter.keep(slots, positions, hidden, aux)

    # --- between steps ----------------------------------------------------------------------------

    def forget(self, request_ids: Collection[str]) -> None:
        self.drop(request_ids)
        for request_id in request_ids:
            self.admitted.pop(request_id, None)
            self.trust.forget(request_id)
        self.recorder.forget(request_ids)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the proposed trees of these requests, which will not be verified."""
        for request_id in request_ids:
            self.trees.pop(request_id, None)

    def observe(self, request_ids: list[str], step: VerifyStep, paths: Paths) -> None:
        """Learn which nodes of a step's trees the target accepted."""
        emitting = paths.num_tokens > 0
        has_tree = emitting & step.has_tree
        self.recorder.verified(request_ids, step, paths.last, has_tree)
        self.stats.counts["target_steps"] += int(np.count_nonzero(emitting))
        if has_tree.any():
            self._learn(request_ids, step, paths, has_tree)
        elif emitting.any():
            self.planner.calibration.rest()
        self.trust.fade(request_ids[request] for request in (emitting & ~has_tree).nonzero()[0])

    def _learn(self, request_ids: list[str], step: VerifyStep, paths: Paths, has_tree: np.ndarray) -> None:
        """Count and learn from the nodes of ``has_tree``, bool [num_requests]."""
        rows = step.trees.parent, step.trees.starts, paths.last, has_tree, step.depth, step.source, step.survival
        seen, length, deepest, (tree, source, depth, survival, accepted) = tally(*rows)
        counts, total = self.stats.counts, seen.tolist()
        counts["nodes_verified"] += total[VERIFIED]
        counts["chain_requests"] += int(np.count_nonzero(has_tree & step.chains))
        counts["kv_rows_moved"] += total[MOVED]
        for counter, place in ACCEPTED_COUNTERS.items():
            counts[counter] += total[place]
        (requests,) = has_tree.nonzero()
        with_tree = [request_ids[request] for request in requests]
        nodes = np.add.reduceat(step.trees.parent >= 0, step.trees.starts[:-1], dtype=np.int64)
        graphs = np.stack([deepest, nodes, length], axis=1)[requests]
        self.stats.verified.update(map(tuple, graphs.tolist()))
        chance = self.planner.calibration.value(source, depth, survival)
        self.trust.observe(with_tree, tree, source, chance, accepted)
        self.planner.calibration.observe(source, depth, survival, accepted)
        if not self.planner.drafting:
            drafted = source < NGRAM
            self.planner.learn_accepted(float(chance[drafted].sum()), float(accepted[drafted].sum()))

    def request_tables(self) -> list[Sized]:
        """All tables keyed by request. Each must be empty once the runner knows that all requests have ended."""
        own: list[Sized] = [self.trees, self.grammar_trees, self.admitted, self.draft_kv.blocks, self.draft_kv.length]
        return [*own, self.draft_kv.shared, self.trust.seen, self.recorder.traced, *self.copies.tables()]

    def take_stats(self, *more_tables: Sized) -> dict[str, dict]:
        """Statistics since the last call, and the current state. The runner passes its own tables keyed by request."""
        drafting = self.drafter is not None and self.planner.drafting
        tracked = max(map(len, [*self.request_tables(), *more_tables]))
        return {**self.stats.take(), "state": {"drafting": float(drafting), "tracked_requests": tracked}}

    # --- drafting ---------------------------------------------------------------------------------

    def propose(self, batch: DraftBatch) -> list[FlatTree]:
        """Draft for every request of the batch.

        Returns:
            the flattened graph of each request. Requests with structured output have no nodes in it; their trees are in
            ``grammar_trees``.
        """
        request_ids, length = batch.request_ids, batch.length
        num_requests = len(request_ids)
        self.drop(request_ids)
        self.grammar_trees = {}  # the scheduler takes them from one rank only
        speculates, grammar, max_depth = self._request_limits(batch)
        self.recorder.begin(batch)
        self.planner.begin(num_requests, int(length.sum()))
        proposals = [NO_NODES] * num_requests
        wanted = speculates & batch.sampled & (max_depth > 0)
        # The draft also runs over unfinished prompts, unless drafting does not pay at this batch size or the answer
        # will be too short to draft for: nothing is drafted for its first token and its last.
        prompts = speculates & ~batch.sampled & (max_depth > 1)
        if not (wanted.any() or prompts.any()):
            if self.drafter is not None:
                self.planner.put_off()
            self.recorder.proposed(self.planner, self.drafter is not None)
            return proposals
        requests = self._graph_requests(batch, wanted.nonzero()[0], max_depth, grammar)
        trees, grown = self._grow(requests) if self.copies else None, np.zeros(len(requests.index), np.bool_)
        if self.drafter is not None:
            # A prompt that is read in parts is judged as a whole.
            missed = self.drafter.missed(self.draft_kv, request_ids, batch.whole)
            left = np.minimum(max_depth, self.max_model_len - batch.whole - 1)
            pays = self.planner.reading_pays(missed, left)
            missed = np.where(pays, missed - (batch.whole - length), TOO_LONG)
            drafting = self.choose_drafting(requests.index, *self._found(requests, trees), missed)
            due = np.where(drafting, length, 0)
            prompts &= missed <= self.most_missed
            if prompts.any() and self.planner.drafts_pay():
                due = np.where(prompts, length, due)
            hidden = None
            if due.any():
                drafted, hidden = self.drafter.catch_up(batch, self.draft_kv, due, drafting)
            if hidden is not None:
                grown = drafted[requests.index]
                if self.planner.alone:  # the planner learns from graphs without copies only
                    leave_out_copies(requests.trust, grown)
                trees = self._grow(requests, grown, hidden)
        if trees is not None:
            self._propose(proposals, requests, trees, grown)
        for index in (wanted & grammar).nonzero()[0].tolist():
            if request_ids[index] not in self.grammar_trees:  # the grammar may still force nodes
                self._offer_to_grammar(request_ids[index], NO_NODES, 0, int(max_depth[index]))
        self.recorder.proposed(self.planner, self.drafter is not None)
        return proposals

    def _graph_requests(
        self, batch: DraftBatch, index: np.ndarray, max_depth: np.ndarray, grammar: np.ndarray
    ) -> GraphRequests:
        """The requests at ``index`` with their limits; ``max_depth`` and ``grammar`` are from ``_request_limits``."""
        grammar = grammar[index]
        return GraphRequests(
            batch=batch,
            index=index,
            length=batch.length[index],
            max_depth=max_depth[index].astype(np.int32),
            grammar=grammar,
            num_nodes=np.where(grammar, GRAMMAR_CHOICE * self.num_nodes, self.num_nodes).astype(np.int32),
            trust=self.trust.of([batch.request_ids[request] for request in index]),
        )

    def _found(self, requests: GraphRequests, found: FlatTrees | None) -> tuple[np.ndarray, float]:
        """What sources other than the draft have found: ``found`` and ``left`` of ``choose_drafting``."""
        if found is None:
            return np.zeros(0), 1.0
        place = np.arange(found.value.shape[1])
        real = (place > 0) & (place <= np.minimum(found.size, self.num_nodes)[:, None])
        chances = found.value[real].astype(np.float64)
        return chances, 1.0 - float(found.value[real & (found.depth == 1)].sum()) / len(requests.index)

    def choose_drafting(self, index: np.ndarray, found: np.ndarray, left: float, missed: np.ndarray) -> np.ndarray:
        """Choose the requests to draft for.

        Args:
            index: int64 [n], the requests of the batch that can be drafted for.
            found: float64 [nodes], probabilities of the nodes that other sources have found for them.
            left: mean probability that the target accepts none of these nodes.
            missed: int64 [num_requests], tokens that the draft would have to run first. A request with more than
                ``most_missed`` gets no draft, as the step would take as long as reading them. If all requests together
                have more, those with the most wait.

        Returns:
            bool [num_requests].
        """
        drafting = np.zeros(len(missed), np.bool_)
        count = len(index)
        if count == 0:
            self.planner.put_off()
            return drafting
        was_drafting = self.planner.drafting
        readable = index[missed[index] <= self.most_missed]
        if len(readable) == 0 and (missed[index] < TOO_LONG).any():
            self.planner.put_off()
        wanted = self.planner.wants_drafts(len(readable), found, max(0.0, left))
        if self.planner.drafting != was_drafting:
            self.stats.counts["drafting_switches"] += 1
        if not wanted:
            self.stats.counts["drafts_skipped"] += count
            return drafting
        chosen = readable[within_reach(missed[readable], self.most_missed)]
        if self.planner.probing:
            chosen = chosen[:PROBE_REQUESTS]
        self.stats.counts["drafts_skipped"] += count - len(chosen)
        drafting[chosen] = True
        return drafting

    def _propose(
        self, proposals: list[FlatTree], requests: GraphRequests, trees: FlatTrees, drafted: np.ndarray
    ) -> None:
        """Choose the nodes to verify, store them by request and write them to ``proposals``.

        ``drafted``, bool [num_graphs], are the graphs that the draft model has grown.
        """
        most = np.minimum(trees.size, self.num_nodes)
        copied = COPIED[trees.origin] & (np.arange(trees.origin.shape[1]) <= most[:, None])
        pure = drafted & ~copied.any(axis=1)
        sizes = self.planner.choose(trees.value[:, 1:], most, requests.length, drafted, pure)
        self.stats.counts["nodes_cut"] += int((most - sizes).sum())
        for row in np.flatnonzero(requests.grammar | (sizes > 0)).tolist():
            index = int(requests.index[row])
            request_id = requests.batch.request_ids[index]
            if requests.grammar[row]:
                tree = flat_tree(trees, row, int(trees.size[row]))
                self._offer_to_grammar(request_id, tree, int(sizes[row]), int(requests.max_depth[row]))
            else:
                self.trees[request_id] = proposals[index] = flat_tree(trees, row, int(sizes[row]))

    def _offer_to_grammar(self, request_id: str, tree: FlatTree, budget: int, max_depth: int) -> None:
        """Store a tree for the scheduler, where the grammar chooses nodes. vLLM would check a list as a chain."""
        self.trees[request_id] = tree
        self.grammar_trees[request_id] = ProposedTree(
            tree.token.tolist(),
            tree.parent.tolist(),
            budget,
            max_depth=min(max_depth, self.num_nodes),
            room=self.num_nodes,
        )

    def _grow(
        self, requests: GraphRequests, drafted: np.ndarray | None = None, hidden: torch.Tensor | None = None
    ) -> FlatTrees | None:
        """Grow and flatten the token graph of every request.

        Args:
            drafted: bool [num_graphs], graphs to grow with the draft model; None to use the other sources only.
            hidden: [sum(drafted), hidden], the draft's hidden states of the roots of these graphs.

        Returns:
            the flattened trees; None if ``drafted`` is None and no source added a node.
        """
        count = len(requests.length)
        graphs = GraphBatch(*(array[:count] for array in self.graphs))
        batch = requests.batch
        reset_all(graphs, batch.token_ids, batch.token_rows[requests.index], requests.length)
        self.recorder.grows(requests)
        if self.drafter is not None and drafted is not None:
            assert hidden is not None
            self.drafter.grow(graphs, drafted, hidden, requests)
        self.copies.graft(graphs, requests)
        if drafted is None and (graphs.size <= 1).all():
            return None
        trees = flatten(graphs, requests.num_nodes, requests.max_depth, self.planner.calibration.factor, requests.trust)
        self.recorder.drafted(graphs, trees, self.num_nodes)
        return trees

    def take_grammar_trees(self) -> dict[str, ProposedTree]:
        """Return and clear the trees proposed for requests with structured output."""
        taken, self.grammar_trees = self.grammar_trees, {}
        return taken

    def speculates(self, batch: DraftBatch) -> np.ndarray:
        """Which requests use graph speculation, bool [num_requests]. Counts each new request that does not."""
        return self._request_limits(batch)[0]

    def uses_graph(self, request: Any) -> bool:
        """Whether a request, given as its runner's record, uses graph speculation. Counts a new one that does not."""
        return (self.admitted.get(request.req_id) or self.admit(request))[0]

    def follows_grammar(self, request: Any) -> bool:
        """Whether a request, given as its runner's record, has structured output, as ``admit`` says."""
        return (self.admitted.get(request.req_id) or self.admit(request))[1]

    def _request_limits(self, batch: DraftBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The limits of each request's graph.

        Returns:
            three arrays [num_requests]: whether the request uses graph speculation, bool; whether a grammar chooses its
            nodes, bool; the maximum depth of its nodes, int64. The depth respects max_tokens and max_model_len and
            leaves room for the bonus token.
        """
        requests = zip(batch.request_ids, batch.requests, strict=True)
        rows = [self.admitted.get(i) or self.admit(request) for i, request in requests]
        speculates, grammar, limits = np.array(rows, np.int64).reshape(-1, 3).T
        max_depth = np.minimum(limits - batch.num_outputs, self.max_model_len - batch.length) - 1
        return speculates.astype(np.bool_), grammar.astype(np.bool_), np.where(batch.ended, 0, max_depth)

    def traces(self, request: Any) -> bool:
        """Whether the steps of a request, given as its runner's record, are recorded. All ranks agree."""
        return self.config.trace is not None and wire.asks_for_trace(request.sampling_params)

    def admit(self, request: Any) -> tuple[bool, bool, int]:
        """Count a new request without a graph, record one that asks for it, and keep what is constant for a request.

        A further chunk of a streaming-input session has new parameters, so its request is admitted again. Its grammar
        is that of the first chunk, because vLLM's scheduler keeps that one.

        Args:
            request: its runner's record.

        Returns:
            whether it uses graphs, whether it has a grammar, and its maximum number of output tokens.
        """
        request_id, reason = request.req_id, fallback_reason(request)
        structured = request.sampling_params.structured_outputs is not None
        had_graph, grammar, _ = self.admitted.get(request_id, (True, structured, 0))
        if reason is not None and had_graph:
            self.stats.fallbacks[reason] += 1
        self.recorder.admit(request_id, request)
        most = request.sampling_params.max_tokens
        self.admitted[request_id] = admitted = reason is None, grammar, self.max_model_len if most is None else most
        return admitted


def fallback_reason(request: Any) -> str | None:
    """Why a request is decoded without a graph, as a metric label; None if it uses one.

    The request is given as its runner's record, such as V1's ``CachedRequestState``.
    """
    if wire.opts_out(request.sampling_params):
        return "opt_out"
    return None if request.sampling_params.thinking_token_budget is None else "thinking_token_budget"
