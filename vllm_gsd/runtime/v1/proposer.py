"""The proposer: grows a token graph for every request of the batch, one draft forward a level."""

import time
from collections.abc import Callable

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_gsd.config import GSDConfig
from vllm_gsd.core.controller import DraftController
from vllm_gsd.core.draft_level import level_rows, new_draft_slots
from vllm_gsd.core.flatten import flatten
from vllm_gsd.core.graph import ORIGIN_NGRAM, new_graphs, reset
from vllm_gsd.core.growth import add_candidates, next_frontier
from vllm_gsd.core.ngram import graft_ngrams
from vllm_gsd.core.verify import is_chain, path_to
from vllm_gsd.ops.topk_softmax import topk_softmax
from vllm_gsd.runtime.draft_model import DraftModel
from vllm_gsd.runtime.limits import draft_kv_slots
from vllm_gsd.runtime.requests import fallback_reason
from vllm_gsd.runtime.stats import GraphStats
from vllm_gsd.runtime.tree_rows import TreeRows
from vllm_gsd.runtime.v1.step import DraftTree, VerifyStep

logger = init_logger("vllm.gsd")

# Shortest suffix whose earlier occurrence counts as an n-gram match.
MIN_NGRAM_MATCH = 2


class GraphProposer:
    """``method="custom_class"`` proposer of vLLM's V1 runner.

    Args:
        vllm_config: the engine's configuration; ours is in ``additional_config["gsd"]``.
    """

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.config = GSDConfig.model_validate(vllm_config.additional_config["gsd"])
        self.stats = GraphStats()
        self.trees: dict[str, DraftTree] = {}
        self.reasons: dict[str, str | None] = {}
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_slots = draft_kv_slots(self.config)
        num_requests = vllm_config.scheduler_config.max_num_seqs
        nodes = self.config.num_speculative_tokens
        capacity = 1 + min(2048, nodes * self.config.top_k * (self.config.max_depth + 1))
        self.graphs = new_graphs(num_requests, capacity)
        self.slots = new_draft_slots(num_requests, capacity, self.max_slots)
        self.frontier = np.zeros((num_requests, nodes), np.int32)
        self.controller = DraftController(self.config.max_depth)
        self.draft = None
        if self.config.model is not None:
            self.draft = DraftModel(
                vllm_config, self.config.model, self.config.draft_tensor_parallel_size
            )

    # --- start-up ---------------------------------------------------------------------------------

    def bind(self, runner) -> None:
        """Give the proposer the runner whose batch it drafts for."""
        self.runner = runner

    def load_model(self, target_model) -> None:
        """Load the draft model (vLLM calls this after the target is loaded)."""
        if self.draft is not None:
            self.draft.load()

    @property
    def layer_names(self) -> list[str]:
        """Names of the draft's attention layers."""
        return [] if self.draft is None else self.draft.layer_names

    def warm_up(self) -> None:
        """Compile what can be compiled."""
        if self.draft is not None:
            self.draft.run_idle(min(64, self.vllm_config.scheduler_config.max_num_batched_tokens))

    def initialize_attention(self) -> None:
        """Called once the KV cache and the attention groups exist."""
        if self.draft is not None:
            self.draft.bind_attention(self.runner.attn_groups[0])

    def measure_costs(self) -> None:
        """Time a draft level against a target step on this machine, once."""
        if self.draft is None:
            return
        nodes = self.config.num_speculative_tokens
        level = _median_seconds(lambda: topk_softmax(self.draft.run_idle(2), self.config.top_k))
        step = _median_seconds(lambda: self.runner.run_idle(nodes + 1))
        self.controller.level_cost = level / step
        logger.info("gsd: a draft level takes %.2f ms, a target step %.2f ms", 1e3 * level, 1e3 * step)

    # --- between steps ----------------------------------------------------------------------------

    def take_trees(self) -> dict[str, DraftTree]:
        """The graphs proposed in the last step, by request."""
        trees, self.trees = self.trees, {}
        return trees

    def forget(self, request_ids) -> None:
        """Requests are finished."""
        for request_id in request_ids:
            self.reasons.pop(request_id, None)

    def observe(self, step: VerifyStep, places: np.ndarray) -> None:
        """Learn what the target accepted of a step's graphs.

        Args:
            places: int32 [num_requests], where each walk ended.
        """
        counts = self.stats.counts
        starts = step.trees.starts
        emitting = ~self.runner.discard_request_mask.np[: len(places)]
        counts["target_steps"] += int(emitting.sum())
        for request in np.flatnonzero(emitting):
            tree = step.proposed[request]
            if tree is None:
                continue
            first, end = starts[request], starts[request + 1]
            counts["nodes_verified"] += int(end - first) - 1
            counts["chain_requests"] += int(is_chain(step.trees.parent, first, end))
            path = path_to(step.trees.parent[first:end], places[request])
            self.stats.accepted_lengths[len(path)] += 1
            self.controller.observe(tree.promised, len(path))
            self.stats.drafted_depths[self.runner.input_batch.req_ids[request]] = int(step.depth[first:end].max())
            for place in path:
                if tree.origin[place - 1] == ORIGIN_NGRAM:
                    counts["nodes_accepted_ngram"] += 1
                elif tree.via_merge[place - 1]:
                    counts["nodes_accepted_merged"] += 1
                else:
                    counts["nodes_accepted_native"] += 1

    # --- drafting ---------------------------------------------------------------------------------

    def propose(
        self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None
    ) -> list[list[int]]:
        """Draft for every request of the batch.

        Args:
            sampled_token_ids: tokens each request has just been given; empty for unfinished prefills.
            num_tokens_no_spec: int32 [>= num_requests], committed tokens of each request.
            token_ids_cpu: int32 [>= num_requests, max_model_len], the tokens.

        Returns:
            the flattened graph of each request as a list of tokens (empty: nothing to verify).
        """
        batch = self.runner.input_batch
        num_requests = len(sampled_token_ids)
        speculates = np.array([self._speculates(request_id) for request_id in batch.req_ids[:num_requests]])
        sampled = np.array([len(tokens) > 0 for tokens in sampled_token_ids])
        length = num_tokens_no_spec[:num_requests].astype(np.int64)
        drafts = speculates & sampled & (self._max_depth(length) > 0)
        logits = None
        if self.draft is not None:
            known = np.where(sampled, length, self._computed_tokens(num_requests))
            waiting = int(drafts.sum())
            if waiting and not self.controller.wants(1, waiting, waiting):
                # Drafting doesn't pay now. What the draft has not seen it catches up on when it does.
                speculates = speculates & ~drafts
            logits = self._catch_up(np.where(speculates, known, 0), drafts & speculates, token_ids_cpu)
            if "ngram" not in self.config.sources:
                drafts &= speculates
        requests = np.flatnonzero(drafts)
        if len(requests) == 0:
            return [[] for _ in range(num_requests)]
        return self._propose_for(requests, length[requests], token_ids_cpu, logits, num_requests)

    def _propose_for(self, requests, length, token_ids_cpu, root_logits, num_requests) -> list[list[int]]:
        count = len(requests)
        graphs = type(self.graphs)(*(array[:count] for array in self.graphs))
        for row, request in enumerate(requests):
            text = token_ids_cpu[request, max(0, length[row] - 32) : length[row]]
            reset(graphs, row, text.astype(np.int64))
        budget = self.config.num_speculative_tokens if self.config.budget == "auto" else self.config.budget
        num_nodes = np.full(count, budget, np.int32)
        max_depth = self._max_depth(length, requests)
        self.promised: list[list[float]] = [[1.0] for _ in requests]
        if self.draft is not None and root_logits is not None:
            self._grow(graphs, requests, length, root_logits, num_nodes, max_depth)
        if "ngram" in self.config.sources:
            for row, request in enumerate(requests):
                graft_ngrams(
                    graphs,
                    row,
                    token_ids_cpu[request],
                    int(length[row]),
                    self.config.top_k,
                    int(min(max_depth[row], budget)),
                    MIN_NGRAM_MATCH,
                )
        trees = flatten(graphs, num_nodes, max_depth.astype(np.int32))
        result: list[list[int]] = [[] for _ in range(num_requests)]
        for row, request in enumerate(requests):
            size = trees.size[row]
            if size == 0:
                continue
            nodes = trees.node[row, :size]
            self.trees[self.runner.input_batch.req_ids[request]] = DraftTree(
                token=trees.token[row, :size],
                parent=trees.parent[row, :size],
                depth=trees.depth[row, :size],
                origin=graphs.origin[row, nodes],
                via_merge=trees.via_merge[row, :size],
                promised=self.promised[row] if root_logits is not None else [],
            )
            result[request] = trees.token[row, :size].tolist()
        return result

    def _grow(self, graphs, requests, length, root_logits, num_nodes, max_depth) -> None:
        config = self.config
        count = len(requests)
        frontier = self.frontier[:count]
        frontier[:, 0] = 0
        frontier_len = np.ones(count, np.int32)
        slots = type(self.slots)(self.slots.used[:count], self.slots.mask[:count])
        slots.used[:] = 0
        block_table = self.runner.input_batch.block_table[0]
        block_rows = torch.from_numpy(requests)
        block_table_rows = block_table.block_table.cpu[block_rows]
        capacity = block_table.num_blocks_per_row[requests].astype(np.int64) * block_table.block_size
        room = np.minimum(self.max_slots, capacity - length).astype(np.int32)
        logits = root_logits
        for level in range(1, config.max_depth + 1):
            first_new = graphs.size.copy()
            probs, tokens = topk_softmax(logits, config.top_k)
            counts = add_candidates(
                graphs,
                frontier,
                frontier_len,
                tokens.numpy(),
                probs.numpy(),
                num_nodes,
                config.theta_sib,
                config.merge_ngram,
            )
            self.stats.counts["nodes_added"] += counts.added
            self.stats.counts["nodes_merged"] += counts.merged
            self.stats.counts["nodes_pruned"] += counts.pruned
            if level == config.max_depth:
                break
            room_now = np.where(max_depth > level, room - slots.used, 0).astype(np.int32)
            promised = next_frontier(
                graphs, first_new, num_nodes, room_now, np.float32(config.theta_prob), frontier, frontier_len
            )
            if not self.controller.wants(level + 1, promised, count):
                break
            for row in range(count):
                survival = graphs.survival[row, frontier[row, : frontier_len[row]]].sum()
                self.promised[row].append(float(survival))
            hidden = self._run_level(graphs, slots, frontier, frontier_len, length, block_table_rows, block_table)
            logits = self.draft.logits(hidden)

    def _run_level(self, graphs, slots, frontier, frontier_len, length, block_table_rows, block_table):
        """One draft forward over the frontier nodes of all requests."""
        num_rows = int(frontier_len.sum())
        token = np.empty(num_rows, np.int64)
        depth = np.empty(num_rows, np.int32)
        slot = np.empty(num_rows, np.int32)
        mask = np.empty((num_rows, slots.mask.shape[2]), np.int64)
        level_rows(graphs, slots, frontier, frontier_len, token, depth, slot, mask)
        request_of_row = np.repeat(np.arange(len(frontier_len)), frontier_len)
        base = length[request_of_row]
        positions = base - 1 + depth
        tree = TreeRows(
            query_start_loc=torch.from_numpy(np.concatenate([[0], np.cumsum(frontier_len)]).astype(np.int32)),
            prefix_lens=torch.from_numpy(length.astype(np.int32)),
            block_table=block_table_rows,
            positions=torch.from_numpy(positions),
            mask=torch.from_numpy(mask),
            rows=None,
        )
        flat_slots = _slots_of(block_table_rows.numpy(), request_of_row, base + slot, block_table.block_size)
        self.stats.counts["draft_rows"] += num_rows
        self.stats.counts["draft_nodes"] += num_rows
        self.stats.counts["draft_forwards"] += 1
        return self.draft.run_level(token, positions, flat_slots, tree)

    def _catch_up(self, known, drafts, token_ids_cpu):
        """Run the draft over committed text it has no KV for yet.

        Args:
            known: int64 [num_requests], tokens of each request whose draft KV is wanted; 0 for none.
            drafts: bool [num_requests], requests that are drafted for; updated where the last token has no slot.

        Returns:
            logits [sum(drafts), vocab] after the last token of each drafted request, None without any.
        """
        batch = self.runner.input_batch
        tracker = self.runner.draft_kv
        block_table = batch.block_table[0]
        num_requests = len(known)
        capacity = block_table.num_blocks_per_row[:num_requests].astype(np.int64) * block_table.block_size
        drafts &= known <= capacity
        known = np.minimum(known, capacity)
        done = np.array([tracker.length[request_id] for request_id in batch.req_ids[:num_requests]], np.int64)
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        hidden_of = [None] * num_requests
        while True:
            missing = np.maximum(known - done, 0)
            # Fill the forward request by request; what does not fit waits for the next one.
            counts = np.clip(budget - (np.cumsum(missing) - missing), 0, missing)
            running = np.flatnonzero(counts)
            if len(running) == 0:
                break
            counts = counts[running]
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            request_of_row = np.repeat(running, counts)
            positions = done[request_of_row] + np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
            tokens = token_ids_cpu[request_of_row, positions].astype(np.int64)
            slots = _slots_of(block_table.block_table.np, request_of_row, positions, block_table.block_size)
            done[running] += counts
            hidden = self.draft.run_causal(
                tokens,
                positions,
                slots,
                starts,
                done[running].astype(np.int32),
                block_table.block_table.cpu[torch.from_numpy(running)],
            )
            self.stats.counts["draft_rows"] += int(starts[-1])
            self.stats.counts["draft_forwards"] += 1
            for index, request in enumerate(running):
                tracker.advance(batch.req_ids[request], int(done[request]))
                hidden_of[request] = hidden[starts[index + 1] - 1]
        # Nothing was missing where the request's KV is complete already, which leaves no logits to draft from.
        drafts &= np.array([row is not None for row in hidden_of])
        rows = [hidden_of[request] for request in np.flatnonzero(drafts)]
        return self.draft.logits(torch.stack(rows)) if rows else None

    # --- limits -----------------------------------------------------------------------------------

    def _speculates(self, request_id: str) -> bool:
        if request_id not in self.reasons:
            reason = fallback_reason(self.runner.requests[request_id])
            self.reasons[request_id] = reason
            if reason is not None:
                self.stats.fallbacks[reason] += 1
        return self.reasons[request_id] is None

    def _computed_tokens(self, num_requests: int) -> np.ndarray:
        return self.runner.optimistic_seq_lens_cpu[:num_requests].numpy().astype(np.int64)

    def _max_depth(self, length: np.ndarray, requests: np.ndarray | None = None) -> np.ndarray:
        """Deepest node worth verifying, int64: max_tokens and max_model_len end a request's text."""
        batch = self.runner.input_batch
        indices = range(len(length)) if requests is None else requests
        states = [self.runner.requests[batch.req_ids[index]] for index in indices]
        left = np.array([s.sampling_params.max_tokens - len(s.output_token_ids) for s in states], np.int64)
        # The bonus token takes the last place.
        return np.minimum(left, self.max_model_len - length) - 1


def _median_seconds(run: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times + 2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[2:]))  # the first runs warm caches


def _slots_of(block_table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Physical KV slots, int64, of logical positions of the given rows of a block table."""
    blocks = block_table[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size

