"""vLLM's scheduler with grammars along graphs and truthful statistics."""

import time
from collections import Counter

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_gsd.engine.schedule.grammar import (
    GrammarTokens,
    JudgedTree,
    KeptTree,
    allowed_nodes,
    judged_tree,
    tree_bitmask,
    tree_fits,
)
from vllm_gsd.upstream import structured, wire
from vllm_gsd.upstream.instances import count_draft_tokens

# What of a step's statistics goes to the front end, and seconds between two times: some thirty metrics a step take as
# long as a walk.
COUNTED = ("counts", "fallbacks", "accepted_lengths")
TELL_EVERY = 0.25


class GraphScheduling(Scheduler):
    """Scheduling itself is upstream's: a flattened graph is accounted for exactly as a chain of that length."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.graph_stats: dict | None = None  # of this step
        self.untold: dict[str, Counter] = {name: Counter() for name in COUNTED}  # of steps that nobody heard of yet
        self.told = 0.0  # when somebody did
        self.state: dict[str, float] = {}  # the latest
        self.told_state: dict[str, float] = {}
        self.kept: dict[str, KeptTree | JudgedTree] = {}  # of requests with structured output
        self.nodes_invalid = 0  # not told yet
        self.grammar_tokens = GrammarTokens(self.structured_output_manager)

    # --- structured output ------------------------------------------------------------------------

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See upstream; graphs of requests with structured output are cut to what their grammars allow."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id, tree in wire.proposed_of(draft_token_ids).items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            kept = self.kept[request_id] = allowed_nodes(
                self.structured_output_manager, request, tree, self.grammar_tokens.after
            )
            self.nodes_invalid += max(0, min(tree.budget, len(tree.tokens)) - len(kept.places))
            structured.set_drafts(request, kept.tokens)
        drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        for request_id, parents in wire.parents_of(draft_token_ids).items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                structured.set_drafts(request, self._judge(request, list(drafts[request_id]), parents))

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output) -> None:
        """See upstream: the same, for a step that has its rows already."""
        drafts = dict(zip(draft_token_ids.req_ids, map(list, draft_token_ids.draft_token_ids), strict=True))
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, parents in wire.parents_of(draft_token_ids).items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and scheduled.get(request_id):
                tokens = drafts[request_id][: len(scheduled[request_id])]
                tokens = self._judge(request, tokens, parents)
                structured.set_scheduled_drafts(scheduler_output, request_id, tokens)

    def _judge(self, request, tokens: list[int], parents: list[int]) -> list[int]:
        """Remember what the grammar of ``request`` allows; upstream has taken its nodes for a chain and cut them."""
        tree = judged_tree(self.structured_output_manager, request, tokens, parents)
        self.kept[request.request_id] = tree
        self.nodes_invalid += tree.paths[: len(parents)].count(None)
        return tokens

    def schedule(self, *args, **kwargs):
        """See upstream; tells the workers which nodes were kept, and cache salts."""
        output = super().schedule(*args, **kwargs)
        for request_id in output.finished_req_ids:
            self.kept.pop(request_id, None)
        scheduled = output.scheduled_spec_decode_tokens
        wire.attach_kept(output, {i: self.kept[i] for i in scheduled if i in self.kept})
        new = [request.req_id for request in output.scheduled_new_reqs]
        wire.attach_salts(output, {i: salt for i in new if (salt := self.requests[i].cache_salt)})
        return output

    def get_grammar_bitmask(self, scheduler_output) -> GrammarOutput | None:
        """See upstream; one mask per node, along its path."""
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
        # What a grammar has not judged is not verified.
        judged = [
            scheduled.get(i, []) if tree_fits(self.kept.get(i), scheduled.get(i, [])) else [] for i in request_ids
        ]
        return GrammarOutput(request_ids, bitmask, [len(tokens) for tokens in judged])

    # --- statistics -------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output, model_runner_output):
        """See upstream; keeps the step's graph statistics for ``make_stats``."""
        self.graph_stats = wire.stats_of(model_runner_output)
        if self.graph_stats is not None and self.nodes_invalid:
            self.graph_stats["counts"]["nodes_invalid"] = self.nodes_invalid
            self.nodes_invalid = 0
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    ):
        """Count positions as depths: upstream takes places in the list for positions, which is true for chains only."""
        if not self.log_stats or not num_draft_tokens:
            return spec_decoding_stats
        depths = (self.graph_stats or {}).get("drafted_depths", {})
        depth = depths.get(request_id, 0)
        if depth == 0:
            return spec_decoding_stats  # a list that was not ours (placeholders): nothing was drafted
        if spec_decoding_stats is None:
            spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
        spec_decoding_stats.observe_draft(depth, num_accepted_tokens)
        count_draft_tokens(spec_decoding_stats, num_draft_tokens - depth)
        return spec_decoding_stats

    def make_stats(self, *args, **kwargs):
        """See upstream; adds ours now and then, and with the last step while there is work."""
        stats = super().make_stats(*args, **kwargs)
        news, self.graph_stats = self.graph_stats, None
        if stats is None:
            return stats
        if news is not None:
            for name, counter in self.untold.items():
                counter.update(news[name])
            tracked = max(news["state"]["tracked_requests"], len(self.kept))
            self.state = {**news["state"], "tracked_requests": tracked}
        now = time.monotonic()
        changed = any(self.untold.values()) or self.state != self.told_state
        if changed and (now - self.told >= TELL_EVERY or self._may_be_last()):
            told = {name: dict(counts) for name, counts in self.untold.items()}
            wire.attach_metrics(stats, {**told, "state": self.state})
            for counter in self.untold.values():
                counter.clear()
            self.told, self.told_state = now, self.state
        return stats

    def _may_be_last(self) -> bool:
        """Whether no step may follow: the front end finds stop strings, and ends such requests after a step."""
        return not self.running or any(request.sampling_params.stop for request in self.running)


class GraphScheduler(GraphScheduling):
    """Schedules a step once the one before is done."""


class GraphAsyncScheduler(GraphScheduling, AsyncScheduler):
    """Schedules a step while the one before runs."""
