"""Our metrics in vLLM's Prometheus endpoint, all named ``vllm:gsd_*`` (the offline reader shows only ``vllm:*``)."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_gsd.upstream import wire

COUNTERS = {
    "target_steps": "Target steps of requests that emitted tokens, steps without drafts counted too.",
    "draft_rows": "Rows the draft model ran, graph nodes and committed tokens together.",
    "draft_nodes": "Graph nodes the draft model ran.",
    "draft_rows_invalid": "Draft rows whose logits have no softmax (NaN or infinity): nothing is drafted from them.",
    "draft_forwards": "Forward passes of the draft model.",
    "nodes_added": "Candidates that became nodes of a token graph.",
    "nodes_merged": "Candidates merged with an existing node instead of being drafted again.",
    "nodes_pruned": "Candidates dropped by theta_sib or the node budget.",
    "nodes_cut": "Nodes of flattened graphs left out because verifying them would not pay.",
    "nodes_invalid": "Places of graphs left empty because grammars forbid their nodes.",
    "drafts_skipped": "Request-steps that were not drafted for because it would not pay.",
    "drafting_switches": "Times that drafting was taken up or given up because that paid.",
    "nodes_verified": "Nodes of flattened graphs that the target verified.",
    "nodes_accepted_native": "Accepted nodes drafted on their own path.",
    "nodes_accepted_merged": "Accepted nodes reached over a merged edge.",
    "nodes_accepted_ngram": "Accepted nodes copied from the request's own text.",
    "nodes_accepted_shared": "Accepted nodes copied from responses to earlier requests.",
    "nodes_accepted_agreed": "Accepted nodes that were drafted and copied alike.",
    "nodes_accepted_grammar": "Accepted nodes that the request's grammar left little choice about.",
    "kv_rows_moved": "KV rows moved to contiguous slots after acceptance.",
    "chain_requests": "Request-steps whose graph was a chain.",
    "cudagraphs_captured": "CUDA graphs captured at start, the target's full ones and the draft's.",
    "cudagraph_hits": "Forward passes of target and draft that replayed CUDA graphs.",
    "cudagraph_misses": "Forward passes of target and draft that no CUDA graph fitted.",
    "draft_seconds": "Seconds spent drafting.",
    "verify_seconds": "Seconds spent in the target's forward pass and its preparation.",
    "walk_seconds": "Seconds spent sampling along the graph.",
    "compaction_seconds": "Seconds spent moving accepted KV.",
}

GAUGES = {
    "drafting": "1 while drafts of the draft model pay, 0 while they do not or there is none.",
    "tracked_requests": "Most requests that any table of gsd holds; 0 when no request is left.",
}

# Counted by the label "reason".
BY_REASON = {
    "fallbacks": "Requests decoded without a graph, by reason.",
}

HISTOGRAMS = {
    "accepted_length": "Accepted nodes per request and target step.",
}


class GraphPrometheus:
    """Registers our metrics once per engine front end and records each step's changes."""

    def __init__(self, prom: KVConnectorProm, labelnames: list[str], per_engine: dict[int, list[object]]):
        self.counters = {
            name: create_metric_per_engine(
                prom._counter_cls(name=f"vllm:gsd_{name}", documentation=text, labelnames=labelnames),
                per_engine,
            )
            for name, text in COUNTERS.items()
        }
        self.gauges = {
            name: create_metric_per_engine(
                prom._gauge_cls(
                    name=f"vllm:gsd_{name}",
                    documentation=text,
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                ),
                per_engine,
            )
            for name, text in GAUGES.items()
        }
        self.per_engine = per_engine
        self.fallbacks = prom._counter_cls(
            name="vllm:gsd_fallbacks",
            documentation=BY_REASON["fallbacks"],
            labelnames=[*labelnames, "reason"],
        )
        self.accepted_length = create_metric_per_engine(
            prom._histogram_cls(
                name="vllm:gsd_accepted_length",
                documentation=HISTOGRAMS["accepted_length"],
                buckets=[0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64],
                labelnames=labelnames,
            ),
            per_engine,
        )

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's changes, as made by ``GraphStats.take``."""
        stats = wire.metrics_of(data)
        assert stats is not None  # no KV connector is beside gsd
        for name, amount in stats["counts"].items():
            self.counters[name][engine_idx].inc(amount)
        for name, value in stats["state"].items():
            self.gauges[name][engine_idx].set(value)
        for reason, amount in stats["fallbacks"].items():
            self.fallbacks.labels(*self.per_engine[engine_idx], reason).inc(amount)
        for length, times in stats["accepted_lengths"].items():
            for _ in range(times):
                self.accepted_length[engine_idx].observe(int(length))


class GraphKVConnectorProm(KVConnectorProm):
    """Upstream's class, recording our numbers for engines that speculate by gsd."""

    def __init__(self, vllm_config, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, labelnames, per_engine_labelvalues)
        config = wire.options_of(vllm_config)
        if config is not None and config.speculates:
            self.prom_metrics = GraphPrometheus(self, labelnames, per_engine_labelvalues)


class GraphKVConnectorLogging(KVConnectorLogging):
    """Upstream's class, leaving our numbers to Prometheus."""

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Log KV-transfer numbers; ours are not among them."""
        if wire.metrics_of(transfer_stats_data) is None:
            super().observe(transfer_stats_data)
