"""How vLLM learns ``"method": "gsd"`` where the plugin is loaded.

Each function takes what ``inventory`` names and returns what stands in its place; it does nothing for other configs.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from vllm_gsd.config import GSDConfig, GSDConfigError, is_gsd, read
from vllm_gsd.upstream import wire
from vllm_gsd.upstream.inventory import When


def add_cli_args(upstream: Callable[..., Any]) -> staticmethod:
    """``--speculative-config`` takes a path too."""
    return with_option_type(upstream, _parse_option)


def with_option_type(upstream: Callable[..., Any], parse: Callable[[Callable[[str], Any], str], Any]) -> staticmethod:
    """``EngineArgs.add_cli_args`` that reads ``--speculative-config`` by ``parse(type of upstream's, value)``."""

    @functools.wraps(upstream)
    def add_cli_args(parser, *args, **kwargs):
        parser = upstream(parser, *args, **kwargs)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.type = functools.partial(parse, action.type)
        return parser

    return staticmethod(add_cli_args)


def _parse_option(upstream_type, value: str) -> Any:
    if value in ("", "None"):
        return upstream_type(value)
    try:
        if is_gsd(value):
            GSDConfig.load(value)  # complain now, before anything is loaded
            end_in_one_sentence()
            return read(value)
        if value.lstrip().startswith("{"):
            return upstream_type(value)
        return read(value)
    except GSDConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def end_in_one_sentence() -> None:
    """Spare the command line's user the traceback where an engine with gsd is refused after parsing."""
    upstream = sys.excepthook

    def excepthook(kind, error, traceback):
        if isinstance(error, GSDConfigError):
            print(f"vllm: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            upstream(kind, error, traceback)

    sys.excepthook = excepthook


def create_engine_config(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our config into one that vLLM knows before ``SpeculativeConfig`` sees it."""

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
        v2, cpu = takes_v2(self), current_platform.is_cpu()
        _check_symbols(v2, cpu, ray=self.distributed_executor_backend == "ray")
        ours = wire.engine_args(config, v2, cpu, self.additional_config)
        # Put back in the end: some callers (Ray Data is one) make the same arguments' configuration twice.
        given = {name: getattr(self, name) for name in ours}
        try:
            for name, of_ours in ours.items():
                setattr(self, name, of_ours)
            vllm_config = upstream(self, *args, **kwargs)
        finally:
            for name, of_theirs in given.items():
                setattr(self, name, of_theirs)
        # Without speculation either runner serves, whichever vLLM takes.
        check_engine(vllm_config, config, v2 if config.speculates else vllm_config.use_v2_model_runner)
        if config.speculates and vllm_config.scheduler_config.async_scheduling:
            vllm_config.scheduler_config.scheduler_cls = wire.scheduler_class(asynchronous=True)
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


def takes_v2(args: Any) -> bool:
    """Whether vLLM will take Model Runner V2 for an engine with gsd, of these ``EngineArgs``.

    ``VllmConfig.use_v2_model_runner`` says so, but only once there is a config, and what is in that depends on it. As
    vLLM itself does, V1 is taken for what V2 cannot do yet, here: graphs beside adapters. ``runtime.support`` compares
    the answers.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return envs.VLLM_USE_V2_MODEL_RUNNER
    return HAS_TRITON and (not args.enable_lora or current_platform.is_cuda())


def make_room_for_lora(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """With LoRA, let a batch hold all rows that every request can have."""

    @functools.wraps(upstream)
    def set_defaults(self, *args, **kwargs):
        given = self.max_num_batched_tokens
        upstream(self, *args, **kwargs)
        speculative = self.speculative_config
        if not self.enable_lora or not isinstance(speculative, dict) or not wire.is_ours(speculative):
            return
        needed = self.max_num_seqs * (speculative["num_speculative_tokens"] + 1)
        if given is None:
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, needed)
        elif given < needed:
            raise GSDConfigError(
                f"--max-num-batched-tokens is {given}, but with --enable-lora it must be at least {needed}, which is "
                f"--max-num-seqs ({self.max_num_seqs}) times num_speculative_tokens + 1; raise it or leave it out."
            )

    return set_defaults


def reserve_draft_slots(upstream: property) -> property:
    """Reserve KV slots for drafted nodes."""

    def num_lookahead_tokens(self) -> int:
        from vllm_gsd.engine.draft.limits import num_lookahead_tokens as ours

        config = wire.options_of(self)
        return upstream.__get__(self) if config is None else ours(config)

    return property(num_lookahead_tokens, doc=upstream.__doc__)


def accept_all_sampling_params(upstream: Callable[..., None]) -> Callable[..., None]:
    """min_p and logit_bias go with a graph."""

    @functools.wraps(upstream)
    def _validate_spec_decode(self, speculative_config):
        if not wire.is_ours(speculative_config):
            upstream(self, speculative_config)

    return _validate_spec_decode


def report_metrics(upstream: type) -> type:
    """Show our counters in vLLM's Prometheus endpoint."""
    from vllm_gsd.engine.observe.metrics import GraphKVConnectorProm

    return GraphKVConnectorProm


def leave_metrics_out_of_logs(upstream: type) -> type:
    """Keep our counters out of what KV connectors log."""
    from vllm_gsd.engine.observe.metrics import GraphKVConnectorLogging

    return GraphKVConnectorLogging
