"""vLLM's scheduler, extended by grammars along token graphs and statistics that count depths."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_gsd.engine.schedule.grammar import GrammarTokens, GrammarTree, allowed_nodes, judged_tree, tree_bitmask
from vllm_gsd.upstream import structured, wire
from vllm_gsd.upstream.instances import count_draft_tokens, end_before_last_token

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

# Statistics that are summed over steps before they go to the front end.
COUNTED = ("counts", "fallbacks", "accepted_lengths")
# Seconds between two reports to the front end. Updating about thirty metrics takes as long as a walk.
REPORT_EVERY = 0.25


class GraphScheduling(Scheduler):
    """Upstream's scheduling. A flattened graph of n nodes is scheduled exactly like a chain of n draft tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # V2's runner, not a schedule by batch size, chooses how many of the scheduled nodes are verified. Without a
        # schedule, upstream adds placeholders to a request that starts with one token, so that full CUDA graphs serve
        # the batch. The request would wait where the placeholders do not fit the step. V1 on CPUs has no such graphs.
        most = self.scheduler_config.max_num_seqs
        rows = 1 + self.num_spec_tokens
        pads = self.use_v2_model_runner and most * rows <= self.max_num_scheduled_tokens
        # Upstream also pads what it then cuts to this threshold, which ends the engine.
        pads = pads and not 0 < self.scheduler_config.long_prefill_token_threshold < rows
        whole = [self.num_spec_tokens] * (1 + most)
        self.dynamic_sd_lookup: list[int] | None = None if pads else whole
        self.graph_stats: dict[str, Any] | None = None  # statistics of this step
        self.unreported: dict[str, Counter] = {name: Counter() for name in COUNTED}
        self.reported_at = 0.0
        self.state: dict[str, float] = {}  # the latest state
        self.reported_state: dict[str, float] = {}
        self.kept: dict[str, GrammarTree] = {}  # trees of requests with structured output
        self.nodes_invalid = 0  # not reported yet
        self.grammar_tokens = GrammarTokens(self.structured_output_manager)

    # --- structured output ------------------------------------------------------------------------

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Store draft tokens as upstream does. Grammars choose among the nodes of requests with structured output."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id, tree in wire.attached(draft_token_ids, wire.PROPOSED, {}).items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            kept = self.kept[request_id] = allowed_nodes(
                self.structured_output_manager, request, tree, self.grammar_tokens.after
            )
            self.nodes_invalid += tree.left_out(kept)
            structured.set_drafts(request, kept.tokens[1:])
        drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        for request_id, parents in wire.attached(draft_token_ids, wire.PARENTS, {}).items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                structured.set_drafts(request, self._judge(request, list(drafts[request_id]), parents))

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Record which nodes the grammar allows, for a step whose rows are already assigned (async scheduling)."""
        drafts = dict(zip(draft_token_ids.req_ids, map(list, draft_token_ids.draft_token_ids), strict=True))
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, parents in wire.attached(draft_token_ids, wire.PARENTS, {}).items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and scheduled.get(request_id):
                tokens = drafts[request_id][: len(scheduled[request_id])]
                tokens = self._judge(request, tokens, parents)
                structured.set_scheduled_drafts(scheduler_output, request_id, tokens)

    def _judge(self, request: Request, tokens: list[int], parents: list[int]) -> list[int]:
        """Record which nodes the grammar allows, and return all tokens. Upstream has cut them as a chain."""
        tree = judged_tree(self.structured_output_manager, request, tokens, parents)
        self.kept[request.request_id] = tree
        self.nodes_invalid += tree.paths[: len(parents)].count(None)
        return tokens

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as upstream does, and send the workers the grammars' trees and the cache salts."""
        output = super().schedule(*args, **kwargs)
        for request_id in output.finished_req_ids:
            self.kept.pop(request_id, None)
        scheduled = output.scheduled_spec_decode_tokens
        if not self.use_v2_model_runner:  # V2's workers have grammars of their own
            wire.attach(output, wire.KEPT, {i: self.kept[i] for i in scheduled if i in self.kept})
        new = [request.req_id for request in output.scheduled_new_reqs]
        wire.attach(output, wire.SALTS, {i: salt for i in new if (salt := self.requests[i].cache_salt)})
        return output

    def _prompts(self) -> int:
        """How many requests may take any room in the next step: those in their prompts, and one that may start."""
        waiting = bool(self.waiting or self.kv_holding_waiting)  # the latter are sessions of streaming input
        starts = waiting and len(self.running) < self.max_num_running_reqs
        return starts + sum(request.is_prefill_chunk for request in self.running)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Fill one bitmask per node, for the path to it."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if not scheduler_output.has_structured_output_requests:
            return None
        request_ids = [
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not request_ids:
            return None
        bitmask = tree_bitmask(self.structured_output_manager, self.requests, request_ids, scheduled, self.kept)
        # Draft tokens that no grammar has checked are not verified.
        drafts = [(self.kept.get(request_id), scheduled.get(request_id, [])) for request_id in request_ids]
        judged = [len(tokens) if tree is not None and tree.fits(tokens) else 0 for tree, tokens in drafts]
        return GrammarOutput(request_ids, bitmask, judged)

    # --- statistics -------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the output as upstream does, and keep the step's graph statistics for ``make_stats``."""
        self.graph_stats = wire.attached(model_runner_output, wire.STATS)
        if self.graph_stats is not None and self.nodes_invalid:
            counts = self.graph_stats["counts"]
            counts["nodes_invalid"] = counts.get("nodes_invalid", 0) + self.nodes_invalid
            self.nodes_invalid = 0
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """Count nothing here; see ``_acceptance``."""
        return spec_decoding_stats

    def _acceptance(self, verified: dict[tuple[int, int, int], int]) -> SpecDecodingStats | None:
        """Count acceptance by depth, and nodes as draft tokens.

        Upstream counts by index in the list of draft tokens, which is right for chains only, and all rows that were
        scheduled. It also counts at once, but on a GPU the worker learns a graph's size only after the step. Here,
        ``verified`` has the numbers of graphs by (depth, nodes, accepted nodes).
        """
        if not verified:
            return None
        stats = SpecDecodingStats.new(self.num_spec_tokens)
        for (depth, nodes, accepted), times in verified.items():
            for _ in range(times):
                stats.observe_draft(depth, accepted)
            count_draft_tokens(stats, times * (nodes - depth))
        return stats

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Add graph statistics to upstream's every REPORT_EVERY seconds, and when no step may follow."""
        news, self.graph_stats = self.graph_stats, None
        stats = super().make_stats(self._acceptance(news["verified"]) if news else None, *args, **kwargs)
        if stats is None:
            return stats
        if news is not None:
            for name in ("counts", "fallbacks"):
                self.unreported[name].update(news[name])
            for (_, _, accepted), times in news["verified"].items():
                self.unreported["accepted_lengths"][accepted] += times
            tracked = max(news["state"]["tracked_requests"], len(self.kept))
            self.state = {**news["state"], "tracked_requests": tracked}
        now = time.monotonic()
        changed = any(self.unreported.values()) or self.state != self.reported_state
        if changed and (now - self.reported_at >= REPORT_EVERY or self._may_be_last()):
            report = {name: dict(counts) for name, counts in self.unreported.items()}
            wire.attach_metrics(stats, {**report, "state": self.state})
            for counter in self.unreported.values():
                counter.clear()
            self.reported_at, self.reported_state = now, self.state
        return stats

    def _may_be_last(self) -> bool:
        """Whether this may be the last step. The front end, not the scheduler, ends requests at stop strings."""
        return not self.running or any(request.sampling_params.stop for request in self.running)


class GraphScheduler(GraphScheduling):
    """Schedules a step after the previous one has finished."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as ``GraphScheduling`` does, but let no request wait for the nodes of others."""
        drafts = [request.spec_token_ids for request in self.running]
        kept = cut_to_fit(drafts, self.max_num_scheduled_tokens, self._prompts())
        for request, tokens in zip(self.running, kept, strict=True):
            structured.set_drafts(request, tokens)
        return super().schedule(*args, **kwargs)

    def _handle_stopped_request(self, request: Request) -> bool:
        """End a text as upstream does. A session of streaming input goes on from its last token.

        A walk may have gone on behind a token that ends the text, and upstream would count what it accepted there.
        """
        end_before_last_token(request)
        return super()._handle_stopped_request(request)


class GraphAsyncScheduler(GraphScheduling, AsyncScheduler):
    """Schedules a step while the previous one runs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        options, most = wire.options_of(self.vllm_config), self.scheduler_config.max_num_seqs
        if options is not None and options.budget == "auto":
            fitting = nodes_that_fit(self.num_spec_tokens, self.max_num_scheduled_tokens, most)
            self.dynamic_sd_lookup = fitting or self.dynamic_sd_lookup
        self.planned = self.num_spec_tokens  # the most nodes that the latest plan verifies of a graph
        self.unneeded = 0  # steps of requests that had ended, which are still to be taken from the workers' counts

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as ``GraphScheduling`` does, but let no prompt wait for rows that the plan leaves out.

        Upstream reserves rows for all nodes, because it schedules a step before the worker has planned it. What is kept
        here is as of the plan before, so one row stays for the node that a probe may verify.
        """
        if self._prompts():
            for request in self.running:
                structured.set_drafts(request, request.spec_token_ids[: max(1, self.planned)])
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the output as ``GraphScheduling`` does, but count no step for requests that end while it runs."""
        output, stats = model_runner_output, wire.attached(model_runner_output, wire.STATS)
        ended = set(output.req_ids) - self.requests.keys() if output.sampled_token_ids else ()
        self.unneeded += sum(bool(output.sampled_token_ids[output.req_id_to_index[request]]) for request in ended)
        if stats is not None and (counted := min(self.unneeded, stats["counts"].get("target_steps", 0))):
            stats["counts"]["target_steps"] -= counted
            self.unneeded -= counted
        if stats is not None:
            self.planned = stats["planned"]
        return super().update_from_output(scheduler_output, model_runner_output)


def cut_to_fit(drafts: list[list[int]], num_tokens: int, more: int) -> list[list[int]]:
    """The first nodes of each running request, so few that all requests have room in a step.

    Upstream would give the first requests all their nodes, and let the others wait until these have finished.

    Args:
        drafts: the nodes of each running request.
        num_tokens: the most tokens of a step.
        more: how many requests use any room: those in their prompts, and another one that may start in the step.
    """
    left, sharing, share = num_tokens - len(drafts) - more, len(drafts) + more, 0
    if sum(map(len, drafts)) <= left:
        return drafts
    for size in sorted(map(len, drafts)):
        share = max(0, left // sharing)
        if size > share:
            break
        left, sharing = left - size, sharing - 1  # what it does not need is left to the others
    return [nodes[:share] for nodes in drafts]


def nodes_that_fit(num_nodes: int, num_tokens: int, num_requests: int) -> list[int] | None:
    """The nodes to schedule for each request, by the number of requests of a step; None if all nodes always fit.

    Upstream would let some requests wait for the nodes of others, which a plan may leave out anyway. The arguments are
    the most nodes of a graph, and the most tokens and requests of a step.
    """
    if num_requests * (1 + num_nodes) <= num_tokens:
        return None
    return [num_nodes, *(max(0, min(num_nodes, num_tokens // count - 1)) for count in range(1, num_requests + 1))]
