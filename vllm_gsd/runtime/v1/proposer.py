"""The proposer in vLLM's speculative-decoding interface: a token graph for every request of the batch."""

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.core.calibration import MERGED, NATIVE, NGRAM
from vllm_gsd.core.flatten import flatten
from vllm_gsd.core.graph import ORIGIN_GRAMMAR, ORIGIN_NGRAM, GraphBatch, new_graphs, reset
from vllm_gsd.core.ngram import graft_ngrams
from vllm_gsd.core.planner import Planner
from vllm_gsd.core.verify import is_chain, path_to
from vllm_gsd.core.warmup import warm_up as compile_core
from vllm_gsd.runtime.grammar import ProposedTree
from vllm_gsd.runtime.measure import measure_costs
from vllm_gsd.runtime.requests import fallback_reason
from vllm_gsd.runtime.stats import GraphStats
from vllm_gsd.runtime.v1.drafting import Drafter
from vllm_gsd.runtime.v1.step import DraftTree, VerifyStep

# Shortest suffix whose earlier occurrence counts as an n-gram match.
MIN_NGRAM_MATCH = 2
# A grammar may forbid most of what was drafted: so many times the nodes that will be verified are proposed for it.
GRAMMAR_CHOICE = 4
# Committed tokens that merging may look back on, root included.
CONTEXT = 32


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
        self.planner = Planner(self.config.top_k)
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
            self.planner.costs = measure_costs(self.runner, self.drafter)

    # --- between steps ----------------------------------------------------------------------------

    def forget(self, request_ids) -> None:
        """Requests are finished."""
        for request_id in request_ids:
            self.reasons.pop(request_id, None)
            self.trees.pop(request_id, None)

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
            from_grammar = tree.origin[:count] == ORIGIN_GRAMMAR
            accepted = np.zeros(count, np.bool_)
            accepted[np.asarray(path, np.int64) - 1] = True
            for name, index in (("native", NATIVE), ("merged", MERGED), ("ngram", NGRAM)):
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
        length = num_tokens_no_spec[:num_requests].astype(np.int64)
        max_depth = self._max_depth(length)
        sampled = np.array([len(tokens) > 0 for tokens in sampled_token_ids])
        speculates = np.array([self._speculates(request_id) for request_id in request_ids])
        wanted = speculates & sampled & (max_depth > 0)
        self.planner.begin(num_requests, int(length.sum()))
        drafted, hidden = np.zeros(num_requests, np.bool_), None
        if self.drafter is not None:
            waiting = int(wanted.sum())
            drafts_now = wanted
            if waiting and not self.planner.wants_drafts(waiting):
                # What the draft has not seen it catches up on when it is wanted again.
                drafts_now = np.zeros_like(wanted)
                self.stats.counts["drafts_skipped"] += waiting
            known = np.where(sampled, length, self.runner.optimistic_seq_lens_cpu[:num_requests].numpy())
            due = np.where(speculates & (drafts_now | ~wanted), known, 0)
            drafted, hidden = self.drafter.catch_up(batch, self.runner.draft_kv, due, drafts_now)
        proposing = wanted if "ngram" in self.config.sources else drafted
        proposals: list[list[int]] = [[] for _ in range(num_requests)]
        requests = np.flatnonzero(proposing)
        if len(requests) == 0:
            return proposals
        graphs = GraphBatch(*(array[: len(requests)] for array in self.graphs))
        trees = self._grow(
            graphs, requests, length[requests], max_depth[requests], token_ids_cpu, drafted[requests], hidden
        )
        most = np.minimum(trees.size, self.num_nodes)
        sizes = self.planner.choose(trees.value, most, length[requests])
        self.stats.counts["nodes_cut"] += int((most - sizes).sum())
        for row, request in enumerate(requests):
            budget = int(sizes[row])
            if budget == 0:
                continue
            grammar = self._has_grammar(request_ids[request])
            size = trees.size[row] if grammar else budget
            self.trees[request_ids[request]] = DraftTree(
                token=trees.token[row, :size],
                parent=trees.parent[row, :size],
                depth=trees.depth[row, :size],
                origin=graphs.origin[row, trees.node[row, :size]],
                via_merge=trees.via_merge[row, :size],
                survival=trees.survival[row, :size],
            )
            tokens = trees.token[row, :size].tolist()
            if grammar:
                # The scheduler chooses among them; upstream would take a list for a chain.
                parents = trees.parent[row, :size].tolist()
                self.grammar_trees[request_ids[request]] = ProposedTree(
                    tokens, parents, budget, int(min(max_depth[request], self.num_nodes))
                )
            else:
                proposals[request] = tokens
        return proposals

    def _grow(self, graphs, requests, length, max_depth, token_ids_cpu, drafted, hidden):
        """Grow one graph per request from all sources, and flatten them."""
        for row, request in enumerate(requests):
            text = token_ids_cpu[request, max(0, length[row] - CONTEXT) : length[row]]
            reset(graphs, row, text.astype(np.int64))
        request_ids = self.runner.input_batch.req_ids
        choice = [GRAMMAR_CHOICE if self._has_grammar(request_ids[request]) else 1 for request in requests]
        num_nodes = self.num_nodes * np.array(choice, np.int32)
        if self.drafter is not None and hidden is not None:
            block_table = self.runner.input_batch.block_table[0]
            self.drafter.grow(graphs, drafted, requests, length, hidden, num_nodes, max_depth, block_table)
        if "ngram" in self.config.sources:
            for row, request in enumerate(requests):
                graft_ngrams(
                    graphs,
                    row,
                    token_ids_cpu[request],
                    int(length[row]),
                    self.config.top_k,
                    int(min(max_depth[row], self.num_nodes)),  # grammars roll back no further
                    MIN_NGRAM_MATCH,
                )
        return flatten(graphs, num_nodes, max_depth.astype(np.int32), self.planner.calibration.factor)

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
