"""The proposer in vLLM's speculative-decoding interface: a token graph for every request of the batch."""

from typing import NamedTuple

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.core.calibration import MERGED, NATIVE, NGRAM, SHARED
from vllm_gsd.core.flatten import FlatTrees, flatten
from vllm_gsd.core.graph import ORIGIN_GRAMMAR, ORIGIN_NGRAM, ORIGIN_SHARED, GraphBatch, new_graphs, reset
from vllm_gsd.core.ngram import graft_ngrams
from vllm_gsd.core.planner import PROBE_REQUESTS, Planner
from vllm_gsd.core.verify import is_chain, path_to
from vllm_gsd.core.warmup import warm_up as compile_core
from vllm_gsd.runtime.grammar import ProposedTree
from vllm_gsd.runtime.measure import measure_costs
from vllm_gsd.runtime.requests import fallback_reason
from vllm_gsd.runtime.shared_suffixes import SharedSuffixes
from vllm_gsd.runtime.stats import GraphStats
from vllm_gsd.runtime.v1.drafting import Drafter
from vllm_gsd.runtime.v1.step import DraftTree, VerifyStep
from vllm_gsd.runtime.v1.step_clock import StepClock

# Shortest suffix whose earlier occurrence counts as an n-gram match.
MIN_NGRAM_MATCH = 2
# A grammar may forbid most of what was drafted: so many times the nodes that will be verified are proposed for it.
GRAMMAR_CHOICE = 4
# Committed tokens that merging may look back on, root included.
CONTEXT = 32


# Sources that metrics tell apart, besides grammars.
SOURCES = {"native": NATIVE, "merged": MERGED, "ngram": NGRAM, "shared": SHARED}

NO_NODES = DraftTree(*(np.zeros(0, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.bool_, np.float32)))


class Committed(NamedTuple):
    """Texts to grow graphs for."""

    requests: np.ndarray  # int64 [num_graphs], places in the batch
    length: np.ndarray  # int64 [num_requests], committed tokens of each request of the batch
    max_depth: np.ndarray  # int64 [num_requests], deepest node worth verifying
    grammar: np.ndarray  # bool [num_requests], whether a grammar chooses among the nodes
    token_ids: np.ndarray  # int32 [>= num_requests, max_model_len]


class GraphProposer:
    """``method="custom_class"`` proposer of vLLM's V1 runner.

    Args:
        vllm_config: the engine's configuration; ours is in ``additional_config["gsd"]``.
    """

    def __init__(self, vllm_config):
        self.config = GSDConfig.model_validate(vllm_config.additional_config["gsd"], strict=False)
        self.stats = GraphStats()
        self.trees: dict[str, DraftTree] = {}  # proposed, not verified yet
        self.grammar_trees: dict[str, ProposedTree] = {}  # proposed, not taken yet
        self.reasons: dict[str, str | None] = {}  # why a request has no graph
        self.max_model_len = vllm_config.model_config.max_model_len
        self.num_nodes = self.config.num_speculative_tokens if self.config.budget == "auto" else self.config.budget
        nodes = self.config.num_speculative_tokens
        capacity = 1 + min(2048, nodes * self.config.top_k * (self.config.max_depth + 1))
        self.graphs = new_graphs(vllm_config.scheduler_config.max_num_seqs, capacity)
        self.planner = Planner(self.config.top_k, self.config.max_depth, self.num_nodes)
        self.clock = StepClock(self.planner)
        self.copies = not {"ngram", "shared"}.isdisjoint(self.config.sources)  # whether hypotheses come for free
        self.shared = None
        if "shared" in self.config.sources:
            self.shared = SharedSuffixes(self.config.shared_responses)
        self.drafter = None
        if self.config.model is not None:
            self.drafter = Drafter(vllm_config, self.config, self.stats, self.planner, capacity)

    # --- start-up ---------------------------------------------------------------------------------

    def bind(self, runner) -> None:
        """Give the proposer the runner whose batch it drafts for."""
        self.runner = runner

    def load_model(self, target_model) -> None:
        """Load the draft model (vLLM calls this after the target is loaded)."""
        if self.drafter is not None:
            self.drafter.model.load()

    @property
    def layer_names(self) -> list[str]:
        """Names of the draft's attention layers."""
        return [] if self.drafter is None else self.drafter.model.layer_names

    def warm_up(self, num_tokens: int) -> None:
        """Compile what can be compiled."""
        if self.drafter is not None:
            self.drafter.model.run_idle(num_tokens)

    def initialize_attention(self) -> None:
        """Called once the KV cache and the attention groups exist."""
        compile_core()
        if self.drafter is not None:
            self.drafter.model.bind_attention(self.runner.attn_groups[0])
        if self.config.budget == "auto":
            with self.runner.maybe_setup_dummy_loras(self.runner.lora_config):
                self.planner.costs = measure_costs(self.runner, self.drafter)

    # --- between steps ----------------------------------------------------------------------------

    def forget(self, request_ids) -> None:
        """Requests are finished."""
        for request_id in request_ids:
            self.reasons.pop(request_id, None)
            self.trees.pop(request_id, None)
            if self.shared is not None and request_id in self.runner.requests:
                self.shared.finished(request_id, self.runner.requests[request_id])

    def remember(self, cache_salts: dict[str, str]) -> None:
        """New requests have these cache salts."""
        if self.shared is not None:
            self.shared.salts.update(cache_salts)

    def observe(self, step: VerifyStep, places: np.ndarray) -> None:
        """Learn what the target accepted of a step's graphs.

        Args:
            places: int32 [num_requests], where each walk ended.
        """
        counts = self.stats.counts
        starts = step.trees.starts
        emitting = ~self.runner.discard_request_mask.np[: len(places)]
        counts["target_steps"] += int(emitting.sum())
        verified = []
        for request in np.flatnonzero(emitting):
            tree = step.proposed[request]
            if tree is None:
                continue
            first, end = starts[request], starts[request + 1]
            count = int(end - first) - 1
            counts["nodes_verified"] += count
            counts["chain_requests"] += int(is_chain(step.trees.parent, first, end))
            path = path_to(step.trees.parent[first:end], places[request])
            self.stats.accepted_lengths[len(path)] += 1
            self.stats.drafted_depths[self.runner.input_batch.req_ids[request]] = int(step.depth[first:end].max())
            source = np.where(tree.via_merge, MERGED, NATIVE)
            source[tree.origin == ORIGIN_NGRAM] = NGRAM
            source[tree.origin == ORIGIN_SHARED] = SHARED
            from_grammar = tree.origin[:count] == ORIGIN_GRAMMAR
            accepted = np.zeros(count, np.bool_)
            accepted[np.asarray(path, np.int64) - 1] = True
            for name, index in SOURCES.items():
                counts[f"nodes_accepted_{name}"] += int((source[:count][accepted & ~from_grammar] == index).sum())
            counts["nodes_accepted_grammar"] += int((accepted & from_grammar).sum())
            columns = source[:count], tree.depth[:count], tree.survival[:count], accepted
            verified.append(tuple(column[~from_grammar] for column in columns))
        if verified:
            self.planner.calibration.observe(*(np.concatenate(column) for column in zip(*verified, strict=True)))

    # --- drafting ---------------------------------------------------------------------------------

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """Draft for every request of the batch.

        Args:
            sampled_token_ids: tokens each request has just been given; empty for unfinished prefills.
            num_tokens_no_spec: int32 [>= num_requests], committed tokens of each request.
            token_ids_cpu: int32 [>= num_requests, max_model_len], the tokens.
            slot_mappings: unused, part of vLLM's interface.

        Returns:
            the flattened graph of each request as a list of tokens (empty: nothing to verify).
        """
        batch = self.runner.input_batch
        num_requests = len(sampled_token_ids)
        request_ids = batch.req_ids[:num_requests]
        for request_id in request_ids:
            self.trees.pop(request_id, None)
        self.grammar_trees = {}  # only one rank's are ever taken
        length = num_tokens_no_spec[:num_requests].astype(np.int64)
        max_depth = self._max_depth(length)
        sampled = np.array([len(tokens) > 0 for tokens in sampled_token_ids])
        speculates = np.array([self._speculates(request_id) for request_id in request_ids])
        wanted = speculates & sampled & (max_depth > 0)
        self.planner.begin(num_requests, int(length.sum()))
        grammar = np.array([self._has_grammar(request_id) for request_id in request_ids])
        text = Committed(np.flatnonzero(wanted), length, max_depth, grammar, token_ids_cpu)
        trees = self._grow(text) if self.copies else None
        if self.drafter is not None:
            drafting = self._choose_drafting(text, trees, num_requests)
            known = np.where(sampled, length, self.runner.optimistic_seq_lens_cpu[:num_requests].numpy())
            # Prompts go through the draft along with the target, unless drafts don't pay for the time being.
            due = np.where(speculates & (drafting | (~wanted & self.planner.drafting)), known, 0)
            drafted, hidden = self.drafter.catch_up(batch, self.runner.draft_kv, due, drafting)
            if hidden is not None:
                text = text if trees is not None else text._replace(requests=np.flatnonzero(drafted))
                trees = self._grow(text, drafted[text.requests], hidden)
        proposals: list[list[int]] = [[] for _ in range(num_requests)]
        if trees is not None:
            self._propose(proposals, text, trees)
        for request in np.flatnonzero(wanted & grammar):
            if request_ids[request] not in self.grammar_trees:
                self._offer_to_grammar(request, NO_NODES, 0, max_depth)  # it may force some
        return proposals

    def _choose_drafting(self, text: Committed, found: FlatTrees | None, num_requests: int) -> np.ndarray:
        """Requests to draft for, bool [num_requests], given what other sources found for those in ``text``."""
        drafting = np.zeros(num_requests, np.bool_)
        count = len(text.requests)
        if count == 0:
            return drafting
        chances, left = np.zeros(0), 1.0
        if found is not None:
            real = np.arange(found.value.shape[1]) < np.minimum(found.size, self.num_nodes)[:, None]
            chances = found.value[real]
            left = 1.0 - float(found.value[real & (found.depth == 1)].sum()) / count
        chosen = text.requests
        if not self.planner.wants_drafts(count, chances, max(0.0, left)):
            self.stats.counts["drafts_skipped"] += count
            return drafting
        if self.planner.probing and count > PROBE_REQUESTS:
            # Those that cost the draft the least to catch up with.
            done = self.runner.draft_kv.length
            known = np.array([done[self.runner.input_batch.req_ids[request]] for request in chosen])
            chosen = chosen[np.argsort(text.length[chosen] - known, kind="stable")[:PROBE_REQUESTS]]
            self.stats.counts["drafts_skipped"] += count - PROBE_REQUESTS
        drafting[chosen] = True
        return drafting

    def _propose(self, proposals: list[list[int]], text: Committed, trees: FlatTrees) -> None:
        """Choose the nodes to verify, remember them, and write them to ``proposals``."""
        request_ids = self.runner.input_batch.req_ids
        requests, graphs = text.requests, self.graphs
        most = np.minimum(trees.size, self.num_nodes)
        origin = np.take_along_axis(graphs.origin[: len(requests)], trees.node, axis=1)
        copied = np.isin(origin, (ORIGIN_NGRAM, ORIGIN_SHARED)) & (np.arange(origin.shape[1]) < most[:, None])
        sizes = self.planner.choose(trees.value, most, text.length[requests], (most > 0) & ~copied.any(axis=1))
        self.stats.counts["nodes_cut"] += int((most - sizes).sum())
        for row, request in enumerate(requests):
            grammar = text.grammar[request]
            size = trees.size[row] if grammar else sizes[row]
            tree = DraftTree(
                token=trees.token[row, :size],
                parent=trees.parent[row, :size],
                depth=trees.depth[row, :size],
                origin=origin[row, :size],
                via_merge=trees.via_merge[row, :size],
                survival=trees.survival[row, :size],
            )
            if grammar:
                self._offer_to_grammar(request, tree, int(sizes[row]), text.max_depth)
            elif size > 0:
                self.trees[request_ids[request]] = tree
                proposals[request] = tree.token.tolist()

    def _offer_to_grammar(self, request: int, tree: DraftTree, budget: int, max_depth: np.ndarray) -> None:
        """Let the scheduler choose among nodes; upstream would take a list for a chain."""
        request_id = self.runner.input_batch.req_ids[request]
        self.trees[request_id] = tree
        self.grammar_trees[request_id] = ProposedTree(
            tree.token.tolist(),
            tree.parent.tolist(),
            budget,
            max_depth=int(min(max_depth[request], self.num_nodes)),
            room=self.num_nodes,
        )

    def _grow(self, text: Committed, drafted: np.ndarray | None = None, hidden=None) -> FlatTrees:
        """Grow the graph of every request in ``text`` and flatten it.

        Args:
            drafted: bool [num_graphs], graphs that the draft model has a part in, None for none; ``hidden``: its hidden
                states at their roots.
        """
        graphs = GraphBatch(*(array[: len(text.requests)] for array in self.graphs))
        length, max_depth = text.length[text.requests], text.max_depth[text.requests].astype(np.int32)
        for row, request in enumerate(text.requests):
            latest = text.token_ids[request, max(0, length[row] - CONTEXT) : length[row]]
            reset(graphs, row, latest.astype(np.int64))
        choice = np.where(text.grammar[text.requests], GRAMMAR_CHOICE, 1).astype(np.int32)
        num_nodes = self.num_nodes * choice
        if self.drafter is not None and drafted is not None:
            block_table = self.runner.input_batch.block_table[0]
            self.drafter.grow(graphs, drafted, text.requests, length, hidden, num_nodes, max_depth, block_table)
        if self.copies:
            deepest = np.minimum(max_depth, self.num_nodes)  # grammars roll back no further
            for row, request in enumerate(text.requests):
                self._copy(graphs, row, request, text.token_ids[request, : length[row]], int(deepest[row]))
        return flatten(graphs, num_nodes, max_depth, self.planner.calibration.factor)

    def _copy(self, graphs: GraphBatch, row: int, request: int, text: np.ndarray, deepest: int) -> None:
        """Graft what followed the end of the text (int32 [length]) earlier in it, and in other responses."""
        if "ngram" in self.config.sources:
            graft_ngrams(graphs, row, text, len(text), self.config.top_k, deepest, MIN_NGRAM_MATCH)
        if self.shared is not None:
            request_id = self.runner.input_batch.req_ids[request]
            state = self.runner.requests[request_id]
            self.shared.graft(graphs, row, request_id, state, text, self.num_nodes)

    def _has_grammar(self, request_id: str) -> bool:
        return self.runner.requests[request_id].sampling_params.structured_outputs is not None

    def take_grammar_trees(self) -> dict[str, ProposedTree]:
        """Graphs proposed for requests with structured output since the last call."""
        taken, self.grammar_trees = self.grammar_trees, {}
        return taken

    def _speculates(self, request_id: str) -> bool:
        if request_id not in self.reasons:
            reason = fallback_reason(self.runner.requests[request_id])
            self.reasons[request_id] = reason
            if reason is not None:
                self.stats.fallbacks[reason] += 1
        return self.reasons[request_id] is None

    def _max_depth(self, length: np.ndarray) -> np.ndarray:
        """Deepest node worth verifying for each request, int64: max_tokens and max_model_len end its text."""
        states = [self.runner.requests[request_id] for request_id in self.runner.input_batch.req_ids[: len(length)]]
        limits = (
            self.max_model_len if s.sampling_params.max_tokens is None else s.sampling_params.max_tokens for s in states
        )
        left = np.array([limit - len(s.output_token_ids) for limit, s in zip(limits, states, strict=True)], np.int64)
        # The bonus token takes the last place.
        return np.minimum(left, self.max_model_len - length) - 1
