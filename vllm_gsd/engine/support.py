"""Start-up checks that reject unsupported engine arguments and features with a clear message."""

from importlib.util import find_spec

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_gsd.config import GSDConfig, GSDConfigError, check_draft_model
from vllm_gsd.config.draft_check import kind_of_model
from vllm_gsd.config.draft_kind import AUX_KINDS, LANGUAGE_MODEL
from vllm_gsd.engine.refusals import REFUSALS, Engine
from vllm_gsd.upstream import ray_ranks


def check_engine_args(args: EngineArgs, config: GSDConfig, v2: bool = False) -> None:
    """Reject engine arguments that gsd cannot work with, before the target's configuration is read.

    Raises:
        GSDConfigError: an engine argument conflicts with gsd.
    """
    if args.worker_cls != "auto":
        raise GSDConfigError(
            f'gsd brings its own worker class, but --worker-cls is "{args.worker_cls}"; leave it at "auto".'
        )
    if config.speculates and args.scheduler_cls is not None:
        raise GSDConfigError(
            f"gsd brings its own scheduler class, but --scheduler-cls is {args.scheduler_cls}; leave it out."
        )
    if args.spec_method or args.spec_model or args.spec_tokens:
        raise GSDConfigError(
            "--spec-method, --spec-model and --spec-tokens cannot be used with gsd; put the keys into the gsd config."
        )
    if config.speculates and args.watermark_config is not None:
        raise GSDConfigError("gsd does not support watermarking; leave --watermark-config out.")
    if config.speculates and args.async_scheduling and not v2:
        raise GSDConfigError("gsd does not support --async-scheduling with Model Runner V1; leave it out.")
    if args.distributed_executor_backend == "ray" and find_spec("ray") is None:
        raise GSDConfigError(
            '--distributed-executor-backend is "ray", but Ray is not installed here; pip install "vllm-gsd[ray]" or '
            'choose "mp".'
        )
    if args.distributed_executor_backend == "ray" and not ray_ranks.second_executor():
        raise GSDConfigError(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, but gsd supports vLLM's second Ray executor only; leave it unset."
        )


def check_engine(vllm_config: VllmConfig, config: GSDConfig, v2: bool = False) -> None:
    """Reject models and engine features that gsd does not support on the model runner that it is configured for.

    Raises:
        GSDConfigError: names the unsupported feature and an alternative.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    platform = "CPU" if current_platform.is_cpu() else "GPU" if current_platform.is_cuda() else ""
    engine = Engine(vllm_config, config, "V2" if v2 else "V1", platform, envs.VLLM_BATCH_INVARIANT)
    for refusal in REFUSALS:
        if message := refusal.message(engine):
            raise GSDConfigError(message)
    if vllm_config.use_v2_model_runner != v2:
        taken, expected = ("V1", "V2") if v2 else ("V2", "V1")
        raise GSDConfigError(
            f"vLLM takes Model Runner {taken} for this configuration, but gsd is prepared for {expected}; "
            f"set VLLM_USE_V2_MODEL_RUNNER={int(v2)}."
        )
    target = vllm_config.model_config
    check_draft_model(config, target.get_vocab_size(), target.model)
    if config.model is not None:
        _check_kind(kind_of_model(config.model), config, vllm_config)


def _check_kind(kind: str, config: GSDConfig, vllm_config: VllmConfig) -> None:
    """Reject what a kind of draft, see ``config.draft_kind``, cannot be used with."""
    target, tp = vllm_config.model_config, config.draft_tensor_parallel_size
    if kind in AUX_KINDS and not supports_eagle3(target.registry.resolve_model_cls(target.architectures, target)[0]):
        raise GSDConfigError(
            f'gsd does not support a draft of the kind "{kind}" with this target, as vLLM\'s class for '
            f"{target.architectures[0]} does not return the hidden states of inner layers; use a language model."
        )
    if kind != LANGUAGE_MODEL and tp not in (None, vllm_config.parallel_config.tensor_parallel_size):
        raise GSDConfigError(
            f'gsd does not support "draft_tensor_parallel_size" {tp} of a draft of the kind "{kind}", which is split '
            "as the target is; leave it out."
        )
