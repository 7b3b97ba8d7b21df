"""The names under which our data travels on vLLM's objects; no other module contains them.

This module does not import vLLM, because processes without an engine use it to read the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_gsd.config import GSDConfig

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.metrics.stats import SchedulerStats

# --- classes that vLLM looks up by their dotted path -----------------------------------------------

_PROPOSER = "vllm_gsd.engine.v1.proposer.GraphProposer"
_SPECULATOR = "vllm_gsd.engine.v2.speculator.GraphSpeculator"
_WORKER_V1 = "vllm_gsd.engine.v1.worker.GraphCPUWorker"  # gsd uses V1 on CPUs only
_WORKER_V2_CPU = "vllm_gsd.engine.v2.cpu_worker.GraphCPUWorker"
_WORKER_V2_GPU = "vllm_gsd.engine.v2.gpu_worker.GraphGPUWorker"
_WORKER_KERNELS = "vllm_gsd.engine.kernels_only.KernelsCPUWorker"  # either runner, no speculation
_SCHEDULER = "vllm_gsd.engine.schedule.scheduler.GraphScheduler"
ASYNC_SCHEDULER = "vllm_gsd.engine.schedule.scheduler.GraphAsyncScheduler"

# The speculative config that stands for gsd with each of vLLM's model runners. ``model`` identifies the config as ours;
# vLLM itself reads it with V1 only. V2 rejects "custom_class". Of the methods that V2 accepts, only "ngram_gpu" loads
# no draft model, reserves no slots and keeps asynchronous scheduling; our speculator loads its draft itself.
_SPECULATIVE_V1 = {"method": "custom_class", "model": _PROPOSER}
_SPECULATIVE_V2 = {"method": "ngram_gpu", "model": _SPECULATOR}

# --- keys and attributes ---------------------------------------------------------------------------

# Keys of ``VllmConfig.additional_config``, which vLLM reserves for plugins and passes to every process.
_OPTIONS_KEY = "gsd"
# Key of ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
_REQUEST_KEY = "gsd"
_TRACE_KEY = "gsd_trace"
# Key of ``SchedulerStats.kv_connector_stats``, the only field on the way to the front end that holds an arbitrary dict.
# gsd does not support KV connectors, so no connector uses the field at the same time.
_METRICS_KEY = "gsd"
# Attributes of vLLM's objects, for ``attach`` and ``attached``. Dicts are by request id.
_TRACES = "gsd_traces"  # of SpeculativeConfig: True if requests may be traced
# Of AttentionMetadata: the TreeRows, or None if no row attends through the tree mask.
TREE_ROWS = "gsd_tree_rows"
STATS = "gsd_stats"  # of ModelRunnerOutput: a step's statistics, for the scheduler
# Of SchedulerOutput, for the workers: cache salts of new requests, and the scheduled part of each graph of a request
# with structured output, a GrammarTree.
SALTS = "gsd_cache_salts"
KEPT = "gsd_kept"
# Of DraftTokenIds, for the scheduler: the graphs of requests with structured output, each a ProposedTree. They do not
# travel in the list of draft tokens, because vLLM would treat the list as a chain.
PROPOSED = "gsd_trees"
# Of DraftTokenIds: the parent index of every node, where the nodes' rows are already scheduled (V2). The scheduler can
# neither add nor move nodes of these graphs.
PARENTS = "gsd_parents"
# The name of the draft's own tensor-parallel group.
DRAFT_GROUP = "gsd_draft"


def engine_args(
    config: GSDConfig, v2: bool, cpu: bool, additional_config: dict[str, Any] | None, data_parallel: bool = False
) -> dict[str, Any]:
    """The fields of ``EngineArgs`` that replace a gsd config.

    With data parallelism, vLLM captures CUDA graphs of all nodes only.
    """
    options = {"additional_config": with_options(additional_config, config)}
    if not config.speculates:  # everything but the worker stays as without speculation
        return {**options, "speculative_config": None, "worker_cls": _WORKER_KERNELS}
    nodes = config.num_speculative_tokens
    if v2 and config.budget != "auto":
        nodes = config.budget  # V2 schedules this many rows even if the graph has fewer nodes
    shares: Sequence[int] = ()
    if config.budget == "auto" and not data_parallel:
        shares = sorted({nodes, nodes // 4, 0}, reverse=True)  # so that a plan can leave nodes out
    return {
        **options,
        "speculative_config": speculative_config(v2, nodes, shares),
        "worker_cls": _WORKER_V1 if not v2 else _WORKER_V2_CPU if cpu else _WORKER_V2_GPU,
        "scheduler_cls": _SCHEDULER,
    }


def speculative_config(v2: bool, num_speculative_tokens: int, shares: Sequence[int] = ()) -> dict[str, Any]:
    """The speculative config that stands for gsd inside vLLM.

    With V2, ``shares`` are numbers of nodes to capture full CUDA graphs for. vLLM captures those of a schedule by batch
    size, which our scheduler does not follow.
    """
    config = {**(_SPECULATIVE_V2 if v2 else _SPECULATIVE_V1), "num_speculative_tokens": num_speculative_tokens}
    if v2 and shares:
        schedule = [(size, size, share) for size, share in enumerate(shares, start=1)]
        config["num_speculative_tokens_per_batch_size"] = schedule
    return config


def is_ours(speculative_config: SpeculativeConfig | dict[str, Any] | None) -> bool:
    """Whether a ``SpeculativeConfig``, or the dict it is built from, stands for gsd."""
    if isinstance(speculative_config, dict):
        model = speculative_config.get("model")
    else:
        model = getattr(speculative_config, "model", None)
    return model in (_PROPOSER, _SPECULATOR)


def with_options(additional_config: dict[str, Any] | None, config: GSDConfig) -> dict[str, Any]:
    """A copy of ``VllmConfig.additional_config`` that includes our options."""
    return {**(additional_config or {}), _OPTIONS_KEY: config.model_dump(mode="json")}


def options_of(vllm_config: VllmConfig) -> GSDConfig | None:
    """Our options in an engine's configuration, or None for an engine without gsd."""
    additional = vllm_config.additional_config
    options = additional.get(_OPTIONS_KEY) if isinstance(additional, dict) else None
    return None if options is None else GSDConfig.model_validate(options)


def note_compiled(vllm_config: VllmConfig, **facts: Any) -> None:
    """Record in an engine's configuration what its compiled code depends on, as values of JSON.

    vLLM names its compile cache after the configuration, and removes the guards that would detect a difference.
    """
    vllm_config.additional_config.update({f"gsd_{name}": value for name, value in facts.items()})


def opting_out() -> dict[str, Any]:
    """``SamplingParams.extra_args`` of a request that is decoded without a graph."""
    return {_REQUEST_KEY: False}


def asking_for_trace() -> dict[str, Any]:
    """``SamplingParams.extra_args`` of a request that is traced."""
    return {_TRACE_KEY: True}


def opts_out(sampling_params: SamplingParams) -> bool:
    """Whether a request asks to be decoded without a graph: ``SamplingParams(extra_args={"gsd": False})``."""
    # Over HTTP, vLLM converts false to 0.
    return bool(sampling_params.extra_args) and sampling_params.extra_args.get(_REQUEST_KEY) == 0


def allow_traces(vllm_config: VllmConfig, config: GSDConfig) -> None:
    """Tell the front end, which sees an engine's ``SpeculativeConfig`` only, whether requests may be traced."""
    if config.trace is not None:
        attach(vllm_config.speculative_config, _TRACES, True)


def asks_for_trace(sampling_params: SamplingParams) -> bool:
    """Whether a request asks to be traced: ``SamplingParams(extra_args={"gsd_trace": True})``."""
    return (sampling_params.extra_args or {}).get(_TRACE_KEY) == 1  # over HTTP, vLLM converts true to 1


def check_request(sampling_params: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
    """Check what a request asks of gsd.

    Raises:
        VLLMValidationError: a key is neither true nor false, or the engine allows no traces. A server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    asked = sampling_params.extra_args or {}
    for key in (_REQUEST_KEY, _TRACE_KEY):
        if asked.get(key, False) not in (0, 1):
            raise VLLMValidationError(f'The request\'s "{key}" is {asked[key]!r}, but must be true or false.')
    if asked.get(_TRACE_KEY, False) and not attached(speculative_config, _TRACES):
        raise VLLMValidationError(
            f'The request\'s "{_TRACE_KEY}" is true, but this server allows no traces; name a file as "trace" in its '
            f'gsd.json, or leave "{_TRACE_KEY}" out.'
        )


def attach(carrier: Any, name: str, value: Any) -> None:
    """Let one of vLLM's objects carry a value; the output of an asynchronous step carries it in its inner output."""
    setattr(getattr(carrier, "model_runner_output", carrier), name, value)


def attached(carrier: Any, name: str, otherwise: Any = None) -> Any:
    """The value that an object carries, or ``otherwise`` if it carries none."""
    return getattr(carrier, name, otherwise)


def has_drafted_rows(metadata: Any) -> bool:
    """Whether TREE_ROWS was attached to a layer's attention metadata: rows may hold drafted tokens."""
    return hasattr(metadata, TREE_ROWS)


def attach_metrics(scheduler_stats: SchedulerStats, numbers: dict[str, Any]) -> None:
    """Send our metrics to the front end with the scheduler's statistics."""
    scheduler_stats.kv_connector_stats = {_METRICS_KEY: numbers}


def metrics_of(kv_connector_stats: dict[str, Any]) -> dict[str, Any] | None:
    """Our metrics in the statistics that the front end received, or None if a KV connector sent them."""
    return kv_connector_stats.get(_METRICS_KEY)
