"""The wraps through which vLLM learns ``"method": "gsd"``. All of them do nothing for other configs."""

import argparse
import functools
import sys
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import HAS_TRITON

from vllm_gsd.config import GSDConfig, GSDConfigError, is_gsd, read

# Where our options travel inside VllmConfig: it is the field upstream keeps for plugins, and it reaches every process.
ADDITIONAL_KEY = "gsd"
# How each of upstream's model runners is told of gsd; ``model`` is our mark, upstream looks at it with V1 only.
# V2 refuses "custom_class". Of the methods it takes, "ngram_gpu" alone brings nothing along: no draft model (ours is
# loaded by ourselves, and ``"model": null`` is nothing special), no slots, and async scheduling stays on.
SPECULATIVE_V1 = {"method": "custom_class", "model": "vllm_gsd.engine.v1.proposer.GraphProposer"}
SPECULATIVE_V2 = {"method": "ngram_gpu", "model": "vllm_gsd.engine.v2.speculator.GraphSpeculator"}
WORKER_V1 = "vllm_gsd.engine.v1.worker.GraphCPUWorker"  # for CPUs only
WORKER_V2_CPU = "vllm_gsd.engine.v2.cpu_worker.GraphCPUWorker"
WORKER_V2_GPU = "vllm_gsd.engine.v2.gpu_worker.GraphGPUWorker"


def install() -> None:
    """Apply all wraps once."""
    _accept_config_files()
    _translate_config()
    _make_room_for_lora()
    _reserve_draft_slots()
    _accept_all_sampling_params()
    _report_metrics()


def gsd_config(vllm_config: VllmConfig) -> GSDConfig | None:
    """Our options inside an engine's configuration, None for an engine without gsd."""
    additional = vllm_config.additional_config
    options = additional.get(ADDITIONAL_KEY) if isinstance(additional, dict) else None
    return None if options is None else GSDConfig.model_validate(options)


def _accept_config_files() -> None:
    """``--speculative-config`` takes a path too.

    Upstream parses the option's value as JSON only. Goes when upstream accepts a path (as it does for --config).
    """
    upstream = EngineArgs.add_cli_args

    @functools.wraps(upstream)
    def add_cli_args(parser):
        parser = upstream(parser)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.type = functools.partial(_parse_option, action.type)
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _parse_option(upstream_type, value: str) -> Any:
    try:
        if is_gsd(value):
            GSDConfig.load(value)  # complain now, before anything is loaded
            _end_in_one_sentence()
            return read(value)
        if value.lstrip().startswith("{") or value in ("", "None"):
            return upstream_type(value)
        return read(value)
    except GSDConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _end_in_one_sentence() -> None:
    """Spare the command line's user the traceback where an engine with gsd is refused after parsing."""
    upstream = sys.excepthook

    def excepthook(kind, error, traceback):
        if isinstance(error, GSDConfigError):
            print(f"vllm: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            upstream(kind, error, traceback)

    sys.excepthook = excepthook


def _translate_config() -> None:
    """Turn our config into one that upstream knows before ``SpeculativeConfig`` sees it.

    ``SpeculativeConfig`` rejects unknown keys and its ``method`` is a closed list. Goes with a registry of methods.
    """
    upstream = EngineArgs.create_engine_config

    @functools.wraps(upstream)
    def create_engine_config(self, *args, **kwargs):
        value = self.speculative_config
        if value is None or not is_gsd(value):
            if isinstance(value, str):
                self.speculative_config = read(value)
            return upstream(self, *args, **kwargs)
        from vllm.platforms import current_platform

        from vllm_gsd.engine.support import check_engine, check_engine_args

        config = GSDConfig.load(value)
        check_engine_args(self, config)
        v2 = takes_v2(self)
        nodes = config.num_speculative_tokens
        if v2 and config.budget != "auto":
            nodes = config.budget  # rows are scheduled whether there are nodes for them or not
        ours = {
            "speculative_config": {**(SPECULATIVE_V2 if v2 else SPECULATIVE_V1), "num_speculative_tokens": nodes},
            "additional_config": {**(self.additional_config or {}), ADDITIONAL_KEY: config.model_dump(mode="json")},
            "worker_cls": WORKER_V1 if not v2 else WORKER_V2_CPU if current_platform.is_cpu() else WORKER_V2_GPU,
            "scheduler_cls": "vllm_gsd.engine.schedule.scheduler.GraphScheduler",
        }
        # Put back in the end: some callers (Ray Data is one) make the same arguments' configuration twice.
        given = {name: getattr(self, name) for name in ours}
        try:
            for name, of_ours in ours.items():
                setattr(self, name, of_ours)
            vllm_config = upstream(self, *args, **kwargs)
        finally:
            for name, of_theirs in given.items():
                setattr(self, name, of_theirs)
        check_engine(vllm_config, config, v2)
        if vllm_config.scheduler_config.async_scheduling:
            vllm_config.scheduler_config.scheduler_cls = "vllm_gsd.engine.schedule.scheduler.GraphAsyncScheduler"
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray" and current_platform.is_cpu():
            from vllm_gsd.engine.parallel.ray_executor import CPURayExecutor

            parallel.distributed_executor_backend = CPURayExecutor
        return vllm_config

    EngineArgs.create_engine_config = create_engine_config


def takes_v2(args: EngineArgs) -> bool:
    """Whether upstream will take Model Runner V2 for an engine with gsd.

    ``VllmConfig.use_v2_model_runner`` says so, but only once there is a config, and what is in that depends on it. As
    upstream itself does, V1 is taken for what V2 cannot do yet, here: graphs beside adapters. ``runtime.support``
    compares the answers.
    """
    from vllm.platforms import current_platform

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return envs.VLLM_USE_V2_MODEL_RUNNER
    return HAS_TRITON and (not args.enable_lora or current_platform.is_cuda())


def _is_ours(speculative_config) -> bool:
    """Whether a ``SpeculativeConfig``, or the dict it is made from, is one that we translated."""
    if isinstance(speculative_config, dict):
        model = speculative_config.get("model")
    else:
        model = getattr(speculative_config, "model", None)
    return model in (SPECULATIVE_V1["model"], SPECULATIVE_V2["model"])


def _make_room_for_lora() -> None:
    """With LoRA, let a batch hold all rows that every request can have.

    Upstream refuses a smaller one beside LoRA and speculation, and its defaults are smaller. Goes when they are not.
    """
    upstream = EngineArgs._set_default_max_num_seqs_and_batched_tokens_args

    @functools.wraps(upstream)
    def set_defaults(self, *args, **kwargs):
        given = self.max_num_batched_tokens
        upstream(self, *args, **kwargs)
        speculative = self.speculative_config
        if not self.enable_lora or not isinstance(speculative, dict) or not _is_ours(speculative):
            return
        needed = self.max_num_seqs * (speculative["num_speculative_tokens"] + 1)
        if given is None:
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, needed)
        elif given < needed:
            raise GSDConfigError(
                f"--max-num-batched-tokens is {given}, but with --enable-lora it must be at least {needed}, which is "
                f"--max-num-seqs ({self.max_num_seqs}) times num_speculative_tokens + 1; raise it or leave it out."
            )

    EngineArgs._set_default_max_num_seqs_and_batched_tokens_args = set_defaults


def _reserve_draft_slots() -> None:
    """Reserve KV slots for drafted nodes.

    Upstream's margin is 0 for ``custom_class``. Goes when a proposer can state its own.
    """
    upstream = VllmConfig.num_lookahead_tokens
    assert isinstance(upstream, property) and upstream.fget is not None
    upstream_get = upstream.fget

    def num_lookahead_tokens(self) -> int:
        from vllm_gsd.engine.draft.limits import num_lookahead_tokens as ours

        config = gsd_config(self)
        return upstream_get(self) if config is None else ours(config)

    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens, doc=upstream.__doc__)


def _accept_all_sampling_params() -> None:
    """min_p and logit_bias go with a graph.

    Upstream refuses them beside any speculation, because its rejection sampler leaves them out. Goes when it asks the
    method. (Its other half, ``build_logitsprocs``, is wrapped by ``runtime.v1.worker`` where processors are made.)
    """
    upstream = SamplingParams._validate_spec_decode

    @functools.wraps(upstream)
    def _validate_spec_decode(self, speculative_config):
        if not _is_ours(speculative_config):
            upstream(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode


def _report_metrics() -> None:
    """Show our counters in vLLM's Prometheus endpoint.

    There is no hook for a proposer's metrics; goes when there is one.
    """
    from vllm.v1.metrics import loggers

    from vllm_gsd.engine.observe.metrics import GraphKVConnectorLogging, GraphKVConnectorProm

    loggers.PrometheusStatLogger._kv_connector_cls = GraphKVConnectorProm
    loggers.KVConnectorLogging = GraphKVConnectorLogging
