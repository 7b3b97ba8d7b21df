"""The wrappers that teach vLLM ``"method": "gsd"`` when the plugin is loaded.

Each public wrapper takes an upstream symbol of ``inventory`` and returns its replacement. The replacement behaves like
the original for configurations without gsd.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_gsd.config import GSDConfig, GSDConfigError, is_gsd, read
from vllm_gsd.upstream import wire
from vllm_gsd.upstream.patch import When

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_cli_args(upstream: Callable[..., Any]) -> staticmethod:
    """Wrap ``EngineArgs.add_cli_args``: ``--speculative-config`` also accepts a path."""
    return with_option_type(upstream, _parse_option)


def with_option_type(upstream: Callable[..., Any], parse: Callable[[Callable[[str], Any], str], Any]) -> staticmethod:
    """Wrap ``EngineArgs.add_cli_args`` so that ``parse`` converts the value of ``--speculative-config``.

    ``parse`` takes upstream's own conversion function and the value.
    """

    @functools.wraps(upstream)
    def add_cli_args(parser: FlexibleArgumentParser, *args: Any, **kwargs: Any) -> FlexibleArgumentParser:
        parser = upstream(parser, *args, **kwargs)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.type = functools.partial(parse, action.type)
        return parser

    return staticmethod(add_cli_args)


def _parse_option(upstream_type: Callable[[str], Any], value: str) -> Any:
    if value in ("", "None") or value.strip() == "null":
        return upstream_type(value)
    try:
        if is_gsd(value):
            GSDConfig.load(value)  # report errors before any model is loaded
            end_in_one_sentence()
            return read(value)
        if value.lstrip().startswith("{"):
            return upstream_type(value)
        return read(value)
    except GSDConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def end_in_one_sentence() -> None:
    """Print a ``GSDConfigError`` that is raised after argument parsing as one sentence, without a traceback."""
    upstream = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, GSDConfigError):
            print(f"vllm: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            upstream(kind, error, traceback)

    sys.excepthook = excepthook


def create_engine_config(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EngineArgs.create_engine_config``: translate our config into one that ``SpeculativeConfig`` accepts.

    The wrapper raises ``GSDConfigError`` if gsd does not support the engine's settings.
    """

    @functools.wraps(upstream)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        value = self.speculative_config
        if value is None or not is_gsd(value):
            if isinstance(value, str):
                self.speculative_config = read(value)
            return upstream(self, *args, **kwargs)
        from vllm.platforms import current_platform

        from vllm_gsd.engine.support import check_engine, check_engine_args

        config = GSDConfig.load(value)
        v2, cpu = takes_v2(), current_platform.is_cpu()
        check_engine_args(self, config, v2)
        _check_symbols(v2, cpu, ray=self.distributed_executor_backend == "ray")
        ours = wire.engine_args(config, v2, cpu, self.additional_config, self.data_parallel_size > 1)
        # The arguments are restored afterwards, because some callers (such as Ray Data) build a configuration from the
        # same arguments twice.
        given = {name: getattr(self, name) for name in ours}
        model = self.model
        try:
            for name, value in ours.items():
                setattr(self, name, value)
            vllm_config = upstream(self, *args, **kwargs)
        finally:
            replaced = config.speculates and not wire.is_ours(self.speculative_config)
            for name, value in given.items():
                setattr(self, name, value)
            if replaced:  # vLLM serves the target of a speculators folder, with that folder as its draft
                raise GSDConfigError(
                    f'The model to serve, "{model}", is a draft in the format of the speculators package; serve its '
                    f'target "{self.model}", and name the draft as "model" in the gsd config.'
                )
        # Without speculation, either model runner works, so vLLM's choice is taken.
        check_engine(vllm_config, config, v2 if config.speculates else vllm_config.use_v2_model_runner)
        if vllm_config.model_config.attention_chunk_size is not None:
            vllm_config.model_config.hf_text_config.attention_chunk_size = None  # no text is longer than a chunk
        if config.speculates:
            wire.allow_traces(vllm_config, config)
        if config.speculates and vllm_config.scheduler_config.async_scheduling:
            vllm_config.scheduler_config.scheduler_cls = wire.ASYNC_SCHEDULER
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray" and cpu:
            from vllm_gsd.engine.parallel.ray_executor import CPURayExecutor

            parallel.distributed_executor_backend = CPURayExecutor
        return vllm_config

    return create_engine_config


def _check_symbols(v2: bool, cpu: bool, ray: bool) -> None:
    from vllm_gsd.upstream.install import check_engine_symbols

    when: list[When] = ["v2"] if v2 else ["v1"]
    if cpu:
        when.append("CPU")
    if cpu and v2:
        when.append("v2 on a CPU")
    if cpu and ray:
        when.append("Ray")
    check_engine_symbols(*when)


def takes_v2() -> bool:
    """Predict whether vLLM will use Model Runner V2 for an engine with gsd.

    ``VllmConfig.use_v2_model_runner`` gives the answer only after the configuration is built, but the configuration
    depends on the answer. ``engine.support.check_engine`` verifies the prediction.
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return envs.VLLM_USE_V2_MODEL_RUNNER
    return HAS_TRITON


def make_room_for_lora(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the defaults of ``EngineArgs``: with LoRA, a batch has room for a full graph of every request.

    The wrapper raises ``GSDConfigError`` if the user gave a smaller ``max_num_batched_tokens``.
    """

    @functools.wraps(upstream)
    def set_defaults(self: EngineArgs, *args: Any, **kwargs: Any) -> None:
        given = self.max_num_batched_tokens
        upstream(self, *args, **kwargs)
        speculative = self.speculative_config
        if not self.enable_lora or not isinstance(speculative, dict) or not wire.is_ours(speculative):
            return
        rows = speculative["num_speculative_tokens"] + 1
        needed = self.max_num_seqs * rows
        if given is None:
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, needed)
        elif given < needed:
            raise GSDConfigError(
                f"--max-num-batched-tokens is {given}, but with --enable-lora it must be at least {needed}, which is "
                f"--max-num-seqs ({self.max_num_seqs}) times the {rows} rows of a request; raise it or leave it out."
            )

    return set_defaults


def reserve_draft_slots(upstream: property) -> property:
    """Wrap ``VllmConfig.num_lookahead_tokens``: reserve KV slots for the nodes that the draft model runs."""

    def num_lookahead_tokens(self: VllmConfig) -> int:
        from vllm_gsd.engine.draft.limits import num_lookahead_tokens as ours

        config = wire.options_of(self)
        return upstream.__get__(self) if config is None else ours(config)

    return property(num_lookahead_tokens, doc=upstream.__doc__)


def accept_all_sampling_params(upstream: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``SamplingParams._validate_spec_decode``: gsd supports ``min_p`` and ``logit_bias``, and checks its own."""

    @functools.wraps(upstream)
    def _validate_spec_decode(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
        if wire.is_ours(speculative_config):
            wire.check_request(self, speculative_config)
        else:
            upstream(self, speculative_config)

    return _validate_spec_decode


def report_metrics(upstream: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``KVConnectorProm.__init__``, which Ray's variant inherits, to export our metrics too."""
    from vllm_gsd.engine.observe.metrics import GraphPrometheus

    @functools.wraps(upstream)
    def init(
        self: KVConnectorProm,
        vllm_config: VllmConfig,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        upstream(self, vllm_config, labelnames, per_engine_labelvalues)
        config = wire.options_of(vllm_config)
        if config is not None and config.speculates:
            self.prom_metrics = GraphPrometheus(self, labelnames, per_engine_labelvalues)

    return init


def leave_metrics_out_of_logs(upstream: type) -> type:
    """Replace ``KVConnectorLogging`` with a subclass that does not log our metrics."""
    from vllm_gsd.engine.observe.metrics import GraphKVConnectorLogging

    return GraphKVConnectorLogging
