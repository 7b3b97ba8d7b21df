"""What gsd cannot serve: refused at start, one sentence each. The README lists the same."""

from importlib.util import find_spec

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_gsd.config import GSDConfig, GSDConfigError, check_draft_model
from vllm_gsd.draft_check import reads_features


def check_engine_args(args: EngineArgs, config: GSDConfig) -> None:
    """Refuse what can be known before the target's configuration is read.

    Raises:
        GSDConfigError: an engine argument contradicts gsd.
    """
    if args.worker_cls != "auto":
        raise GSDConfigError(
            f'gsd brings its own worker class, but --worker-cls is "{args.worker_cls}"; leave it at "auto".'
        )
    if args.scheduler_cls is not None:
        raise GSDConfigError(
            f"gsd brings its own scheduler class, but --scheduler-cls is {args.scheduler_cls}; leave it out."
        )
    if args.spec_method or args.spec_model or args.spec_tokens:
        raise GSDConfigError(
            "--spec-method, --spec-model and --spec-tokens are not for method gsd; put the keys into the gsd config."
        )
    if args.distributed_executor_backend == "ray" and find_spec("ray") is None:
        raise GSDConfigError(
            '--distributed-executor-backend is "ray", but Ray is not installed here; pip install "vllm-gsd[ray]" or '
            'choose "mp".'
        )
    if args.distributed_executor_backend == "ray" and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise GSDConfigError(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, but gsd goes with vLLM's second Ray executor only; leave it unset."
        )


def check_engine(vllm_config: VllmConfig, config: GSDConfig, v2: bool = False) -> None:
    """Refuse models and engine features that gsd does not support.

    Args:
        v2: whether all was prepared for Model Runner V2.

    Raises:
        GSDConfigError: naming the feature and what is supported.
    """
    with_runner = _unsupported_with_v2(vllm_config) if v2 else _unsupported_with_v1()
    features = [*_unsupported(vllm_config, config), *with_runner]
    for name, used, instead in features:
        if used:
            raise GSDConfigError(f"gsd does not support {name}; {instead}.")
    if vllm_config.use_v2_model_runner != v2:
        taken, expected = ("V1", "V2") if v2 else ("V2", "V1")
        raise GSDConfigError(
            f"vLLM takes Model Runner {taken} for this configuration, but gsd is prepared for {expected}; "
            f"set VLLM_USE_V2_MODEL_RUNNER={int(v2)}."
        )
    target = vllm_config.model_config
    check_draft_model(config, target.get_vocab_size(), target.model)
    tp = config.draft_tensor_parallel_size
    shares = config.model is not None and reads_features(config.model)
    if shares and tp not in (None, vllm_config.parallel_config.tensor_parallel_size):
        raise GSDConfigError(
            f'gsd does not support "draft_tensor_parallel_size" {tp} of a draft of EAGLE\'s kind, which shares the '
            "target's embedding; leave it out."
        )


def _unsupported(vllm_config: VllmConfig, config: GSDConfig):
    from vllm.platforms import current_platform

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    other_target = "use a decoder-only text model with attention layers alone"
    cpu, cuda = current_platform.is_cpu(), current_platform.is_cuda()
    yield "this platform yet", not (cpu or cuda), "run on vLLM's CPU or CUDA platform"
    yield "pooling models", model.runner_type != "generate", "use a text-generation model"
    yield "encoder-decoder models", model.is_encoder_decoder, other_target
    yield "models with M-RoPE positions", model.uses_mrope, other_target
    yield "multimodal models", model.is_multimodal_model, other_target
    yield "models with multi-head latent attention (MLA)", model.use_mla, other_target
    yield "Mamba, hybrid or attention-free models", model.is_hybrid or model.is_attention_free, other_target
    yield "diffusion language models", vllm_config.diffusion_config is not None, other_target
    window, nodes = model.get_sliding_window(), config.num_speculative_tokens
    yield (
        f'sliding-window attention (window {window}) with "num_speculative_tokens" {nodes}',
        window is not None and window <= nodes,
        "set it below the window",
    )
    yield (
        f"pipeline parallelism (size {parallel.pipeline_parallel_size})",
        parallel.pipeline_parallel_size > 1,
        "set --pipeline-parallel-size to 1",
    )
    yield (
        "context parallelism",
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "set the context-parallel sizes to 1",
    )
    yield (
        f"data parallelism (size {parallel.data_parallel_size}) of mixture-of-experts models",
        parallel.data_parallel_size > 1 and model.is_moe,
        "set --data-parallel-size to 1 and put a load balancer in front of several servers",
    )
    yield (
        '--data-parallel-backend "ray"',
        parallel.data_parallel_size > 1 and parallel.data_parallel_backend == "ray",
        'leave it at "mp"',
    )
    yield "micro-batching (DBO)", parallel.use_ubatching, "leave --enable-dbo off"
    yield ("KV connectors", vllm_config.kv_transfer_config is not None, "leave --kv-transfer-config out")
    yield (
        "encoder-cache connectors",
        vllm_config.ec_transfer_config is not None,
        "leave --ec-transfer-config out",
    )
    fp8 = ("fp8", "fp8_e4m3") if cuda else ()
    yield (
        f"a quantised KV cache ({cache.cache_dtype})",
        cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32", *fp8),
        'set --kv-cache-dtype to "auto"',
    )
    yield "fast prefill of layers that share KV", cache.kv_sharing_fast_prefill, "leave --kv-sharing-fast-prefill off"
    yield "prompt embeddings", model.enable_prompt_embeds, "leave --enable-prompt-embeds off"
    yield (
        f'"tree_attention" "{config.tree_attention}" on the CPU',
        cpu and config.tree_attention != "kernel",
        "leave it out: the choice is for GPUs",
    )
    tp = config.draft_tensor_parallel_size
    yield (
        f'"draft_tensor_parallel_size" {tp}',
        tp is not None and tp not in (1, parallel.tensor_parallel_size),
        f"set it to 1 or to the target's size {parallel.tensor_parallel_size}",
    )


def _unsupported_with_v1():
    """Where Model Runner V1 is not enough."""
    from vllm.platforms import current_platform

    yield "Model Runner V1 on GPUs", current_platform.is_cuda(), "leave VLLM_USE_V2_MODEL_RUNNER unset"


def _unsupported_with_v2(vllm_config: VllmConfig):
    """What only Model Runner V2 has, or what gsd does not do with it yet."""
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    yield "watermarking", vllm_config.watermark_config is not None, "leave it off"
    yield "trace replay", model.enable_trace_replay, "leave --enable-trace-replay off"
    yield "sampling masks", model.return_sampling_mask, "leave --return-sampling-mask off"
    yield "batch-sharded sampling", parallel.enable_batch_sharded_sampling, "leave it off"
    window = model.get_sliding_window()
    full = "use a model with full attention" if current_platform.is_cuda() else "set VLLM_USE_V2_MODEL_RUNNER=0"
    yield f"sliding-window attention (window {window}) with Model Runner V2 yet", window is not None, full
    without = "leave --enable-lora off" if current_platform.is_cuda() else "set VLLM_USE_V2_MODEL_RUNNER=0"
    yield "LoRA with Model Runner V2 yet", vllm_config.lora_config is not None, without
