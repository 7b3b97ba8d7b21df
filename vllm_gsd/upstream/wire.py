"""The names under which something of ours travels through vLLM's objects; no other module spells them.

It imports nothing of vLLM: the configuration is read in processes that have no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_gsd.config import GSDConfig

if TYPE_CHECKING:
    from vllm_gsd.engine.attention.tree_rows import TreeRows
    from vllm_gsd.engine.schedule.grammar import JudgedTree, KeptTree, ProposedTree

# --- classes that vLLM looks up by their dotted path -----------------------------------------------

_PROPOSER = "vllm_gsd.engine.v1.proposer.GraphProposer"
_SPECULATOR = "vllm_gsd.engine.v2.speculator.GraphSpeculator"
_WORKER_V1 = "vllm_gsd.engine.v1.worker.GraphCPUWorker"  # for CPUs only
_WORKER_V2_CPU = "vllm_gsd.engine.v2.cpu_worker.GraphCPUWorker"
_WORKER_V2_GPU = "vllm_gsd.engine.v2.gpu_worker.GraphGPUWorker"
_WORKER_KERNELS = "vllm_gsd.engine.kernels_only.KernelsCPUWorker"  # either runner, no speculation
_SCHEDULER = "vllm_gsd.engine.schedule.scheduler.GraphScheduler"
_ASYNC_SCHEDULER = "vllm_gsd.engine.schedule.scheduler.GraphAsyncScheduler"
CPU_ATTENTION = "vllm_gsd.engine.attention.cpu.TreeCPUAttentionBackend"
CAUSAL_CPU_ATTENTION = "vllm_gsd.engine.attention.cpu_causal.CausalCPUAttentionBackend"

# How each of vLLM's model runners is told of gsd; ``model`` is our mark, vLLM looks at it with V1 only.
# V2 refuses "custom_class". Of the methods it takes, "ngram_gpu" alone brings nothing along: no draft model (ours is
# loaded by ourselves, and ``"model": null`` is nothing special), no slots, and async scheduling stays on.
_SPECULATIVE_V1 = {"method": "custom_class", "model": _PROPOSER}
_SPECULATIVE_V2 = {"method": "ngram_gpu", "model": _SPECULATOR}

# --- keys and attributes ---------------------------------------------------------------------------

# Of ``VllmConfig.additional_config``, the field that vLLM keeps for plugins; it reaches every process.
_OPTIONS_KEY = "gsd"
# Beside it, and so in the name of vLLM's cache of compiled code.
_PACKED_KEY = "gsd_packed_weights"
# Of ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
_REQUEST_KEY = "gsd"
# Of ``SchedulerStats.kv_connector_stats``, the one field that is an open dict on the way to the front end. KV
# connectors are refused beside gsd, so nobody else uses it then.
_METRICS_KEY = "gsd"
_TREE_ROWS = "gsd_tree_rows"  # of the attention metadata of a forward pass
_STATS = "gsd_stats"  # of ModelRunnerOutput
_SALTS = "gsd_cache_salts"  # of SchedulerOutput
_KEPT = "gsd_kept"  # of SchedulerOutput
_PROPOSED = "gsd_trees"  # of DraftTokenIds
_PARENTS = "gsd_parents"  # of DraftTokenIds
# A tensor-parallel group that the draft has to itself.
DRAFT_GROUP = "gsd_draft"


def engine_args(config: GSDConfig, v2: bool, cpu: bool, additional_config: dict[str, Any] | None) -> dict[str, Any]:
    """What ``EngineArgs`` have in the place of a config of ours, by their fields.

    Args:
        config: ours; v2: whether vLLM will take Model Runner V2; cpu: whether vLLM runs on the CPU.
        additional_config: that of the arguments.
    """
    options = {"additional_config": with_options(additional_config, config)}
    if not config.speculates:  # all but the worker is as without speculation
        return {**options, "speculative_config": None, "worker_cls": _WORKER_KERNELS}
    nodes = config.num_speculative_tokens
    if v2 and config.budget != "auto":
        nodes = config.budget  # rows are scheduled whether there are nodes for them or not
    return {
        **options,
        "speculative_config": speculative_config(v2, nodes),
        "worker_cls": worker_class(v2, cpu),
        "scheduler_cls": scheduler_class(asynchronous=False),
    }


def speculative_config(v2: bool, num_speculative_tokens: int) -> dict[str, Any]:
    """The speculative config that stands for gsd where vLLM reads it."""
    return {**(_SPECULATIVE_V2 if v2 else _SPECULATIVE_V1), "num_speculative_tokens": num_speculative_tokens}


def is_ours(speculative_config: Any) -> bool:
    """Whether a ``SpeculativeConfig``, or the dict it is made from, is one of :func:`speculative_config`."""
    if isinstance(speculative_config, dict):
        model = speculative_config.get("model")
    else:
        model = getattr(speculative_config, "model", None)
    return model in (_PROPOSER, _SPECULATOR)


def worker_class(v2: bool, cpu: bool) -> str:
    """Dotted path of the worker class."""
    if not v2:
        return _WORKER_V1
    return _WORKER_V2_CPU if cpu else _WORKER_V2_GPU


def scheduler_class(asynchronous: bool) -> str:
    """Dotted path of the scheduler class."""
    return _ASYNC_SCHEDULER if asynchronous else _SCHEDULER


def with_options(additional_config: dict[str, Any] | None, config: GSDConfig) -> dict[str, Any]:
    """A ``VllmConfig.additional_config`` with our options in it."""
    return {**(additional_config or {}), _OPTIONS_KEY: config.model_dump(mode="json")}


def options_of(vllm_config: Any) -> GSDConfig | None:
    """Our options inside an engine's configuration; None for an engine without gsd."""
    additional = vllm_config.additional_config
    options = additional.get(_OPTIONS_KEY) if isinstance(additional, dict) else None
    return None if options is None else GSDConfig.model_validate(options)


def note_packed_weights(vllm_config: Any, packing: Any) -> None:
    """Say in an engine's configuration how weights are packed for our kernel, None if they are not.

    Compiled code has the layout of packed weights in it, and vLLM drops the guards that would notice another one.
    """
    vllm_config.additional_config[_PACKED_KEY] = packing


def opts_out(sampling_params: Any) -> bool:
    """Whether a request has asked to be decoded without a graph: ``SamplingParams(extra_args={"gsd": False})``."""
    # Over HTTP vLLM makes a number of false.
    return bool(sampling_params.extra_args) and sampling_params.extra_args.get(_REQUEST_KEY) == 0


def attach_tree_rows(metadata: Any, rows: TreeRows) -> None:
    """Tell a layer's attention which rows attend along a graph, and how."""
    setattr(metadata, _TREE_ROWS, rows)


def tree_rows_of(metadata: Any) -> TreeRows | None:
    """What :func:`attach_tree_rows` attached; None: no row attends along a graph."""
    return getattr(metadata, _TREE_ROWS, None)


def attach_stats(output: Any, stats: dict[str, Any]) -> None:
    """Send a step's statistics to the scheduler, with the ``ModelRunnerOutput`` or what will become it."""
    setattr(getattr(output, "model_runner_output", output), _STATS, stats)


def stats_of(output: Any) -> dict[str, Any] | None:
    """The statistics that the worker sent with a ``ModelRunnerOutput``."""
    return getattr(output, _STATS, None)


def attach_metrics(scheduler_stats: Any, numbers: dict[str, Any]) -> None:
    """Send numbers to the front end with a ``SchedulerStats``."""
    scheduler_stats.kv_connector_stats = {_METRICS_KEY: numbers}


def metrics_of(kv_connector_stats: dict[str, Any]) -> dict[str, Any] | None:
    """Our numbers among what the front end got; None if they are a KV connector's."""
    return kv_connector_stats.get(_METRICS_KEY)


def attach_salts(scheduler_output: Any, salts: dict[str, str]) -> None:
    """Send the cache salts of requests that are new to the workers and have one."""
    setattr(scheduler_output, _SALTS, salts)


def salts_of(scheduler_output: Any) -> dict[str, str]:
    """Cache salts by request."""
    return getattr(scheduler_output, _SALTS, {})


def attach_proposed(drafts: Any, trees: dict[str, ProposedTree]) -> None:
    """Send graphs of requests with structured output to the scheduler.

    They do not travel in the list of draft tokens: vLLM would take it for a chain.
    """
    setattr(drafts, _PROPOSED, trees)


def proposed_of(drafts: Any) -> dict[str, ProposedTree]:
    """Graphs of requests with structured output, by request."""
    return getattr(drafts, _PROPOSED, {})


def attach_parents(drafts: Any, parents: dict[str, list[int]]) -> None:
    """Send the places of the nodes' parents, where nodes have their rows already: none can be added or moved up."""
    setattr(drafts, _PARENTS, parents)


def parents_of(drafts: Any) -> dict[str, list[int]]:
    """Places of the nodes' parents, by request."""
    return getattr(drafts, _PARENTS, {})


def attach_kept(scheduler_output: Any, kept: Mapping[str, KeptTree | JudgedTree]) -> None:
    """Tell the workers what of graphs of requests with structured output is scheduled."""
    setattr(scheduler_output, _KEPT, kept)


def kept_of(scheduler_output: Any) -> Mapping[str, Any]:
    """What of graphs of requests with structured output is scheduled, by request."""
    return getattr(scheduler_output, _KEPT, {})
