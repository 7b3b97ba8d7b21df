"""One engine's speculation, whatever its model runner: growing graphs, and learning what became of them."""

from typing import Any, NamedTuple

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.drafter import Drafter
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.draft.shared_suffixes import SharedSuffixes
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.schedule.fallback import fallback_reason
from vllm_gsd.engine.schedule.grammar import ProposedTree
from vllm_gsd.engine.verify.draft_tree import NO_NODES, DraftTree
from vllm_gsd.engine.verify.step import VerifyStep
from vllm_gsd.host import flatten, graft_all_ngrams, reset_all, tally
from vllm_gsd.method.constants import (
    ACCEPTED,
    AGREED,
    GRAMMAR,
    MERGED,
    MOVED,
    NATIVE,
    NGRAM,
    NUM_ORIGINS,
    OFF_BELOW,
    ORIGIN_AGREED,
    ORIGIN_NGRAM,
    ORIGIN_SHARED,
    SHARED,
    VERIFIED,
)
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.method.graph import GraphBatch, new_graphs
from vllm_gsd.planner.calibration import SourceTrust
from vllm_gsd.planner.planner import PROBE_REQUESTS, Planner
from vllm_gsd.upstream import wire

# Shortest suffix whose earlier occurrence counts as an n-gram match.
MIN_NGRAM_MATCH = 2
# A grammar may forbid most of what was drafted: so many times the nodes that will be verified are proposed for it.
GRAMMAR_CHOICE = 4
# By origin, whether a node was copied from a text.
COPIED = np.zeros(NUM_ORIGINS, np.bool_)
COPIED[[ORIGIN_NGRAM, ORIGIN_SHARED, ORIGIN_AGREED]] = True
# Counters of accepted nodes by source, and where ``tally`` counts them.
ACCEPTED_COUNTERS = {
    "nodes_accepted_native": ACCEPTED + NATIVE,
    "nodes_accepted_merged": ACCEPTED + MERGED,
    "nodes_accepted_ngram": ACCEPTED + NGRAM,
    "nodes_accepted_shared": ACCEPTED + SHARED,
    "nodes_accepted_agreed": ACCEPTED + AGREED,
    "nodes_accepted_grammar": GRAMMAR,
}


class Committed(NamedTuple):
    """Texts to grow graphs for."""

    batch: DraftBatch
    requests: np.ndarray  # int64 [num_graphs], places in the batch
    length: np.ndarray  # int64 [num_graphs], committed tokens
    max_depth: np.ndarray  # int32 [num_graphs], deepest node worth verifying
    grammar: np.ndarray  # bool [num_graphs], whether a grammar chooses among the nodes
    num_nodes: np.ndarray  # int32 [num_graphs], most nodes to propose
    trust: np.ndarray  # of ``SourceTrust``, float32 [num_graphs, sources]


class Speculation:
    """Grows graphs for the requests of a batch, and learns from what the target accepted.

    Args:
        vllm_config: the engine's configuration; ours is in it.
    """

    # Whether a grammar chooses among nodes before they have rows, and may add some.
    asks_grammar = True

    def __init__(self, vllm_config):
        config = wire.options_of(vllm_config)
        assert config is not None
        self.config: GSDConfig = config
        self.stats = GraphStats()
        self.draft_kv: DraftKVTracker | None = None
        self.trees: dict[str, DraftTree] = {}  # proposed, not verified yet
        self.grammar_trees: dict[str, ProposedTree] = {}  # proposed, not taken yet
        self.known: dict[str, tuple[bool, bool, int]] = {}  # of each request, what never changes
        self.max_model_len = vllm_config.model_config.max_model_len
        self.num_nodes = self.config.num_speculative_tokens if self.config.budget == "auto" else self.config.budget
        nodes = self.config.num_speculative_tokens
        capacity = 1 + min(2048, nodes * self.config.top_k * (self.config.max_depth + 1))
        self.graphs = new_graphs(vllm_config.scheduler_config.max_num_seqs, capacity)
        self.first_graphs: dict[int, GraphBatch] = {}  # the first so many
        self.planner = Planner(self.config.top_k, self.config.max_depth, self.num_nodes)
        self.trust = SourceTrust()
        self.copies = not {"ngram", "shared"}.isdisjoint(self.config.sources)  # whether hypotheses come for free
        self.shared = None
        if "shared" in self.config.sources:
            self.shared = SharedSuffixes(self.config.shared_responses)
        self.drafter = None
        if self.config.model is not None:
            self.drafter = Drafter(vllm_config, self.config, self.stats, self.planner, capacity)

    # --- start-up ---------------------------------------------------------------------------------

    def load_model(self, target_model: Any = None) -> None:
        """Load the draft model (after the target is loaded)."""
        if self.drafter is not None:
            self.drafter.model.load(target_model)

    @property
    def layer_names(self) -> list[str]:
        """Names of the draft's attention layers."""
        return [] if self.drafter is None else self.drafter.model.layer_names

    def warm_up(self, num_tokens: int) -> None:
        """Compile what can be compiled."""
        if self.drafter is not None:
            self.drafter.model.run_idle(num_tokens)

    def prepare(self, kv_cache_config, attention_groups) -> None:
        """Called once the KV cache and the attention groups exist."""
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.draft_kv = DraftKVTracker(kv_cache_config.num_blocks, block_size)
        if self.drafter is not None:
            self.drafter.model.bind_attention(attention_groups[0])
            self.drafter.prepare(kv_cache_config.num_blocks, block_size)

    @property
    def features(self) -> Features | None:
        """Where the target's hidden states are kept, if the draft reads them."""
        return None if self.drafter is None else self.drafter.features

    @property
    def feature_bytes(self) -> int:
        """What they take a token, 0 for nothing."""
        return 0 if self.drafter is None else self.drafter.feature_bytes

    # --- between steps ----------------------------------------------------------------------------

    def forget(self, request_ids) -> None:
        """Requests are finished."""
        self.drop(request_ids)
        for request_id in request_ids:
            self.known.pop(request_id, None)
            self.trust.forget(request_id)

    def drop(self, request_ids) -> None:
        """What was proposed for these requests will not be verified."""
        for request_id in request_ids:
            self.trees.pop(request_id, None)

    def observe(self, request_ids: list[str], step: VerifyStep, places: np.ndarray, emitting: np.ndarray) -> None:
        """Learn what the target accepted of a step's graphs.

        Args:
            request_ids: of the step's batch.
            places: int32 [num_requests], where each walk ended.
            emitting: bool [num_requests], whether the request got tokens.
        """
        has_tree = emitting & step.has_tree
        rows = step.trees.parent, step.trees.starts, places, has_tree, step.depth, step.source, step.survival
        seen, length, deepest, (tree, source, depth, survival, accepted) = tally(*rows)
        counts = self.stats.counts
        total = seen.tolist()
        counts["target_steps"] += int(np.count_nonzero(emitting))
        counts["nodes_verified"] += total[VERIFIED]
        counts["chain_requests"] += int(np.count_nonzero(has_tree & step.chains))
        counts["kv_rows_moved"] += total[MOVED]
        for counter, place in ACCEPTED_COUNTERS.items():
            counts[counter] += total[place]
        (requests,) = has_tree.nonzero()
        with_tree = [request_ids[request] for request in requests]
        self.stats.accepted_lengths.update(length[requests].tolist())
        self.stats.drafted_depths.update(zip(with_tree, deepest[requests].tolist(), strict=True))
        if with_tree:
            chance = self.planner.calibration.value(source, depth, survival)
            self.trust.observe(with_tree, tree, source, chance, accepted)
            self.planner.calibration.observe(source, depth, survival, accepted)

    def take_stats(self) -> dict[str, dict]:
        """What happened since the last call, and the state now, for the scheduler."""
        drafting = self.drafter is not None and self.planner.drafting
        return {**self.stats.take(), "state": {"drafting": float(drafting)}}

    # --- drafting ---------------------------------------------------------------------------------

    def propose(self, batch: DraftBatch) -> list[DraftTree]:
        """Draft for every request of the batch.

        Returns:
            the flattened graph of each request; those of requests with structured output are in ``grammar_trees``.
        """
        request_ids, length = batch.request_ids, batch.length
        num_requests = len(request_ids)
        self.drop(request_ids)
        self.grammar_trees = {}  # only one rank's are ever taken
        speculates, grammar, max_depth = self._facts(batch)
        wanted = speculates & batch.sampled & (max_depth > 0)
        self.planner.begin(num_requests, int(length.sum()))
        text = self._committed(batch, wanted.nonzero()[0], max_depth, grammar)
        trees = self._grow(text) if self.copies else None
        if self.drafter is not None:
            assert self.draft_kv is not None
            drafting = self._choose_drafting(text, trees, num_requests)
            due = np.where(drafting, length, 0)
            # Prompts go through the draft along with the target, unless drafts don't pay in so large a batch.
            prompts = speculates & ~wanted
            if prompts.any() and self.planner.drafts_pay():
                due = np.where(prompts, length, due)
            drafted, hidden = self.drafter.catch_up(batch, self.draft_kv, due, drafting)
            if hidden is not None:
                trees = self._grow(text, drafted[text.requests], hidden)
        proposals = [NO_NODES] * num_requests
        if trees is not None:
            self._propose(proposals, text, trees)
        for request in (wanted & grammar).nonzero()[0].tolist():
            if request_ids[request] not in self.grammar_trees:
                self._offer_to_grammar(request_ids[request], NO_NODES, 0, int(max_depth[request]))  # it may force some
        return proposals

    def _committed(
        self, batch: DraftBatch, requests: np.ndarray, max_depth: np.ndarray, grammar: np.ndarray
    ) -> Committed:
        """The texts of these requests; ``max_depth`` and ``grammar`` are those of ``_facts``."""
        grammar = grammar[requests]
        return Committed(
            batch=batch,
            requests=requests,
            length=batch.length[requests],
            max_depth=max_depth[requests].astype(np.int32),
            grammar=grammar,
            num_nodes=np.where(grammar, GRAMMAR_CHOICE * self.num_nodes, self.num_nodes).astype(np.int32),
            trust=self.trust.of([batch.request_ids[request] for request in requests]),
        )

    def _choose_drafting(self, text: Committed, found: FlatTrees | None, num_requests: int) -> np.ndarray:
        """Requests to draft for, bool [num_requests], given what other sources found for those in ``text``."""
        drafting = np.zeros(num_requests, np.bool_)
        count = len(text.requests)
        if count == 0:
            return drafting
        chances, left = np.zeros(0), 1.0
        if found is not None:  # so there are nodes
            real = np.arange(found.value.shape[1]) < np.minimum(found.size, self.num_nodes)[:, None]
            chances = found.value[real].astype(np.float64)
            left = 1.0 - float(found.value[real & (found.depth == 1)].sum()) / count
        chosen = text.requests
        was_drafting = self.planner.drafting
        wanted = self.planner.wants_drafts(count, chances, max(0.0, left))
        if self.planner.drafting != was_drafting:
            self.stats.counts["drafting_switches"] += 1
        if not wanted:
            self.stats.counts["drafts_skipped"] += count
            return drafting
        if self.planner.probing and count > PROBE_REQUESTS:
            # Those that cost the draft the least to catch up with.
            assert self.draft_kv is not None
            done = np.array([self.draft_kv.length[text.batch.request_ids[request]] for request in chosen])
            chosen = chosen[np.argsort(text.length - done, kind="stable")[:PROBE_REQUESTS]]
            self.stats.counts["drafts_skipped"] += count - PROBE_REQUESTS
        drafting[chosen] = True
        return drafting

    def _propose(self, proposals: list[DraftTree], text: Committed, trees: FlatTrees) -> None:
        """Choose the nodes to verify, remember them, and write them to ``proposals``."""
        most = np.minimum(trees.size, self.num_nodes)
        copied = COPIED[trees.origin] & (np.arange(trees.origin.shape[1]) < most[:, None])
        sizes = self.planner.choose(trees.value, most, text.length, (most > 0) & ~copied.any(axis=1))
        self.stats.counts["nodes_cut"] += int((most - sizes).sum())
        for row, request in enumerate(text.requests.tolist()):
            grammar = text.grammar[row]
            size = int(trees.size[row] if grammar else sizes[row])
            tree = DraftTree(
                token=trees.token[row, :size],
                parent=trees.parent[row, :size],
                depth=trees.depth[row, :size],
                origin=trees.origin[row, :size],
                via_merge=trees.via_merge[row, :size],
                survival=trees.survival[row, :size],
            )
            request_id = text.batch.request_ids[request]
            if grammar:
                self._offer_to_grammar(request_id, tree, int(sizes[row]), int(text.max_depth[row]))
            elif size > 0:
                self.trees[request_id] = tree
                proposals[request] = tree

    def _offer_to_grammar(self, request_id: str, tree: DraftTree, budget: int, max_depth: int) -> None:
        """Let the scheduler choose among nodes; upstream would take a list for a chain."""
        self.trees[request_id] = tree
        self.grammar_trees[request_id] = ProposedTree(
            tree.token.tolist(),
            tree.parent.tolist(),
            budget,
            max_depth=min(max_depth, self.num_nodes),
            room=self.num_nodes,
        )

    def _grow(self, text: Committed, drafted: np.ndarray | None = None, hidden=None) -> FlatTrees | None:
        """Grow the graph of every request in ``text`` and flatten it; None if there are no nodes without a draft.

        Args:
            drafted: bool [num_graphs], graphs that the draft model has a part in, None for none; ``hidden``: its hidden
                states at their roots.
        """
        batch, length, trust = text.batch, text.length, text.trust
        count = len(length)
        if (graphs := self.first_graphs.get(count)) is None:
            graphs = self.first_graphs[count] = GraphBatch(*[array[:count] for array in self.graphs])
        lines = batch.token_rows[text.requests]
        reset_all(graphs, batch.token_ids, lines, length)
        if self.drafter is not None and drafted is not None:
            self.drafter.grow(graphs, drafted, text.requests, hidden, text.num_nodes, text.max_depth, trust, batch)
        if "ngram" in self.config.sources:
            chosen = trust[:, NGRAM] >= OFF_BELOW
            deepest = np.minimum(text.max_depth, self.num_nodes)  # grammars roll back no further
            limits = self.config.top_k, deepest, MIN_NGRAM_MATCH
            graft_all_ngrams(graphs, batch.token_ids, lines, length, chosen, *limits)
        if self.shared is not None:
            for row in np.flatnonzero(trust[:, SHARED] >= OFF_BELOW):
                request, tokens = text.requests[row], batch.token_ids[lines[row], : length[row]]
                owner = batch.request_ids[request], batch.requests[request].lora_request
                self.shared.graft(graphs, row, *owner, tokens, self.num_nodes)
        if drafted is None and (graphs.size <= 1).all():
            return None
        return flatten(graphs, text.num_nodes, text.max_depth, self.planner.calibration.factor, trust)

    def take_grammar_trees(self) -> dict[str, ProposedTree]:
        """Graphs proposed for requests with structured output since the last call."""
        taken, self.grammar_trees = self.grammar_trees, {}
        return taken

    def speculates(self, batch: DraftBatch) -> np.ndarray:
        """Which requests go on the graph, bool [num_requests]; counts those that do not."""
        return self._facts(batch)[0]

    def _facts(self, batch: DraftBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whether each request goes on the graph, whether a grammar chooses its nodes, how deep these may be.

        Returns:
            bool, bool, int64 [num_requests]; max_tokens and max_model_len end a text, the bonus token takes the last
            place.
        """
        requests = zip(batch.request_ids, batch.requests, strict=True)
        rows = [self.known.get(i) or self._know(i, request) for i, request in requests]
        speculates, grammar, limits = np.array(rows, np.int64).reshape(-1, 3).T
        max_depth = np.minimum(limits - batch.num_outputs, self.max_model_len - batch.length) - 1
        return speculates.astype(np.bool_), grammar.astype(np.bool_), max_depth

    def _know(self, request_id: str, request) -> tuple[bool, bool, int]:
        """What never changes of a request: whether it goes on the graph, has a grammar, and its most tokens."""
        reason = fallback_reason(request)
        if reason is not None:
            self.stats.fallbacks[reason] += 1
        most = None if request.sampling_params is None else request.sampling_params.max_tokens
        grammar = reason is None and self.asks_grammar and has_grammar(request)
        self.known[request_id] = known = reason is None, grammar, self.max_model_len if most is None else most
        return known


def check_kv_groups(kv_cache_config) -> None:
    """Refuse layers of unlike shapes: blocks are followed in one table.

    Raises:
        ValueError: target and draft don't share one KV cache group.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError(
            f"gsd needs all layers of target and draft in one KV cache group, but this pair has "
            f"{len(kv_cache_config.kv_cache_groups)} groups."
        )


def has_grammar(request) -> bool:
    """Whether a runner's record of a request asks for structured output."""
    return request.sampling_params.structured_outputs is not None
