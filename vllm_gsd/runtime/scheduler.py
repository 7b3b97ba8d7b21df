"""vLLM's scheduler with truthful statistics for graphs."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_gsd.runtime.metrics import STATS_KEY

# Attribute of ModelRunnerOutput under which the worker sends GraphStats.take().
OUTPUT_ATTRIBUTE = "gsd_stats"


class GraphScheduler(Scheduler):
    """Scheduling itself is upstream's: a flattened graph is accounted for exactly as a chain of that length."""

    graph_stats: dict | None = None

    def update_from_output(self, scheduler_output, model_runner_output):
        """See upstream; keeps the step's graph statistics for ``make_stats``."""
        self.graph_stats = getattr(model_runner_output, OUTPUT_ATTRIBUTE, None)
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
        spec_decoding_stats.num_draft_tokens += num_draft_tokens - depth
        return spec_decoding_stats

    def make_stats(self, *args, **kwargs):
        """See upstream; adds ours."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.graph_stats is not None:
            stats.kv_connector_stats = {STATS_KEY: self.graph_stats}
        self.graph_stats = None
        return stats
