"""Our metrics on vLLM's Prometheus endpoint.

Their names start with ``vllm:gsd_`` because ``LLM.get_metrics`` reads only names that start with ``vllm:``.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_gsd.upstream import wire

COUNTERS = {
    "target_steps": "Steps of the target, counted once per request that emitted tokens, with or without drafts.",
    "draft_rows": "Rows that the draft model computes: graph nodes, committed tokens, rows of blocks and, with V2, "
    "padding.",
    "draft_nodes": "Graph nodes that the draft model ran; 0 for drafts of whole blocks.",
    "draft_rows_invalid": "Draft rows without a valid softmax (NaN or infinite logits); nothing is drafted from them.",
    "draft_forwards": "Forward passes of the draft model.",
    "nodes_added": "Candidates added to token graphs, as nodes or as merged edges.",
    "nodes_merged": "Added candidates that became merged edges to existing nodes.",
    "nodes_pruned": "Candidates dropped because of theta_sib or the node budget.",
    "nodes_cut": "Graph nodes left out of verification because verifying them would not pay off (on V2, as expected).",
    "nodes_invalid": "Graph nodes dropped because the request's grammar forbids them.",
    "drafts_skipped": "Times that a request got no draft: it would not pay off, the draft had missed too much text or "
    "cannot read a text of this length, or a plain step was timed.",
    "drafting_switches": "Times that drafting was switched on or off because it started or ceased to pay off.",
    "nodes_verified": "Graph nodes that the target verified.",
    "nodes_accepted_native": "Accepted nodes that the draft model proposed on their own path.",
    "nodes_accepted_merged": "Accepted nodes that the walk reached through a merged edge.",
    "nodes_accepted_ngram": "Accepted nodes copied from the request's own text.",
    "nodes_accepted_shared": "Accepted nodes copied from responses to earlier requests.",
    "nodes_accepted_agreed": "Accepted nodes that both the draft model and a copied text proposed.",
    "nodes_accepted_grammar": "Accepted nodes proposed where the request's grammar allows only a few tokens.",
    "kv_rows_moved": "KV rows moved to contiguous slots after acceptance.",
    "chain_requests": "Verified graphs that were chains, counted once per request and step.",
    "cudagraphs_captured": "CUDA graphs captured at start-up: the target's full graphs and the draft's graphs.",
    "cudagraph_hits": "Forward passes of the target and the draft that replayed a CUDA graph.",
    "cudagraph_misses": "Forward passes of the target and the draft for which no CUDA graph was large enough.",
    "draft_seconds": "Seconds spent on drafting.",
    "verify_seconds": "Seconds spent on the target's forward pass and its preparation.",
    "walk_seconds": "Seconds spent on sampling along the graph.",
    "compaction_seconds": "Seconds spent on moving the KV of accepted nodes.",
}

GAUGES = {
    "drafting": "1 while drafting with the draft model pays off; 0 otherwise, without a draft model, or while it can "
    "read none of the texts, because of their length.",
    "tracked_requests": "Entries in the largest per-request table of gsd; 0 when no request is left.",
}

# Counters with the label "reason".
BY_REASON = {"fallbacks": "Requests decoded without a graph, by reason."}

HISTOGRAMS = {"accepted_length": "Accepted nodes per request and verification step."}


class GraphPrometheus:
    """Registers our metrics once per engine front end and records the changes of every step.

    Args:
        prom: vLLM's object, which has the metric classes: those of Prometheus, or of Ray.
        labelnames: the names of vLLM's labels.
        per_engine: the values of these labels, by engine index.
    """

    def __init__(self, prom: KVConnectorProm, labelnames: list[str], per_engine: dict[int, list[object]]):

        def metrics(kind: Any, texts: dict[str, str], **options: Any) -> dict[str, Any]:
            """By name and engine."""
            made = {
                name: kind(name=f"vllm:gsd_{name}", documentation=text, labelnames=labelnames, **options)
                for name, text in texts.items()
            }
            return {name: create_metric_per_engine(metric, per_engine) for name, metric in made.items()}

        self.counters = metrics(prom._counter_cls, COUNTERS)
        self.gauges = metrics(prom._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        buckets = [0.5, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64]  # Ray requires positive bounds
        self.accepted_length = metrics(prom._histogram_cls, HISTOGRAMS, buckets=buckets)["accepted_length"]
        self.per_engine = per_engine
        self.fallbacks = prom._counter_cls(
            name="vllm:gsd_fallbacks", documentation=BY_REASON["fallbacks"], labelnames=[*labelnames, "reason"]
        )

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the changes of one step, as sent by ``wire.attach_metrics``."""
        stats = wire.metrics_of(data)
        assert stats is not None  # gsd does not support KV connectors
        for name, amount in stats["counts"].items():
            self.counters[name][engine_idx].inc(amount)
        for name, value in stats["state"].items():
            self.gauges[name][engine_idx].set(value)
        for reason, amount in stats["fallbacks"].items():
            self.fallbacks.labels(*self.per_engine[engine_idx], reason).inc(amount)
        for length, times in stats["accepted_lengths"].items():
            for _ in range(times):
                self.accepted_length[engine_idx].observe(int(length))


class GraphKVConnectorLogging(KVConnectorLogging):
    """vLLM's ``KVConnectorLogging``, which does not log our metrics."""

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Log the statistics of a KV connector; ignore ours."""
        if wire.metrics_of(transfer_stats_data) is None:
            super().observe(transfer_stats_data)
