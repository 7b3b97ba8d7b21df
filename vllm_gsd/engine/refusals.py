"""The table of features that gsd does not support. Start-up checks and the documentation use it; it imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_gsd.config import GSDConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

RUNNERS = ("V1", "V2")
PLATFORMS = ("CPU", "GPU")
# The paged kernel of xformers reads whole pages of this many tokens.
XFORMERS_PAGE = 64


@dataclass(frozen=True)
class Engine:
    """The properties of an engine that a refusal may check before the engine starts."""

    vllm_config: VllmConfig
    config: GSDConfig
    runner: str  # one of RUNNERS
    platform: str  # one of PLATFORMS, "" for any other platform
    batch_invariant: bool = False  # whether a row's result must not depend on the other rows of a batch

    @property
    def model(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def parallel(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    @property
    def cache_dtype(self) -> str:
        """The KV cache's data type as the user gave it."""
        return self.vllm_config.cache_config.cache_dtype

    @property
    def block_size(self) -> int:
        return self.vllm_config.cache_config.block_size

    @property
    def window(self) -> int | None:
        """The target's sliding window in tokens; None for full attention."""
        return self.model.get_sliding_window()


class Refusal(NamedTuple):
    """One unsupported feature. ``name`` and ``instead`` are format strings; ``e`` in them is the Engine."""

    feature: str  # its name in the documentation
    used: Callable[[Engine], bool]  # whether the engine uses the feature
    instead: str  # what the user can do instead
    name: str = ""  # its name in the error message, if it has another
    runners: tuple[str, ...] = RUNNERS
    platforms: tuple[str, ...] = (*PLATFORMS, "")

    def message(self, engine: Engine) -> str | None:
        """The error message, or None if the engine does not use the feature."""
        applies = engine.runner in self.runners and engine.platform in self.platforms
        if not applies or not self.used(engine):
            return None
        return f"gsd does not support {(self.name or self.feature).format(e=engine)}; {self.instead.format(e=engine)}."


_UNQUANTISED = ("bfloat16", "float16", "float32")


def _quantised_cache(e: Engine, *served: str) -> bool:
    return e.cache_dtype not in ("auto", *_UNQUANTISED, *served)


def _prunes_video(model: ModelConfig) -> bool:
    multimodal = model.multimodal_config  # None for text models, which may have M-RoPE, too
    return multimodal is not None and multimodal.is_multimodal_pruning_enabled()


_WITHOUT_GSD = "leave --speculative-config out, or use"

# Start-up reports the first refusal that applies.
REFUSALS = (
    Refusal(
        "other platforms than vLLM's CPU and CUDA platforms",
        lambda e: True,
        "run on vLLM's CPU or CUDA platform",
        name="this platform yet",
        platforms=("",),
    ),
    Refusal("pooling models", lambda e: e.model.runner_type != "generate", "use a text-generation model"),
    Refusal("encoder-decoder models", lambda e: e.model.is_encoder_decoder, f"{_WITHOUT_GSD} a decoder-only model"),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda e: e.model.use_mla,
        f"{_WITHOUT_GSD} a model with multi-head or grouped-query attention",
        name="models with multi-head latent attention (MLA)",
    ),
    Refusal(
        "Mamba, hybrid and attention-free models",
        lambda e: e.model.is_hybrid or e.model.is_attention_free,
        f"{_WITHOUT_GSD} a model all of whose layers attend (docs/hybrids.md says why)",
        name="Mamba, hybrid or attention-free models, whose recurrent states (Mamba, GDN) cannot follow branches",
    ),
    Refusal(
        "texts longer than a chunk of chunked local attention (Llama 4)",
        lambda e: e.model.attention_chunk_size is not None and e.model.max_model_len > e.model.attention_chunk_size,
        "set --max-model-len to at most {e.model.attention_chunk_size}",
        name="chunked local attention with --max-model-len {e.model.max_model_len} above a chunk's"
        " {e.model.attention_chunk_size} tokens",
    ),
    Refusal(
        "pruned video tokens with M-RoPE (--video-pruning-rate)",
        lambda e: e.model.uses_mrope and _prunes_video(e.model),
        "leave it out",
        name="--video-pruning-rate with M-RoPE, whose positions vLLM computes again within a step",
    ),
    Refusal(
        "images whose tokens attend to each other in both directions (Gemma 3, PaliGemma, large Gemma 4)",
        lambda e: e.model.is_mm_prefix_lm,
        "turn images off with --language-model-only",
        name="Model Runner V2 with images whose tokens attend to each other in both directions",
        runners=("V2",),
    ),
    Refusal(
        "diffusion language models",
        lambda e: e.vllm_config.diffusion_config is not None,
        f"{_WITHOUT_GSD} an autoregressive model",
    ),
    Refusal(
        'sliding windows of at most "num_speculative_tokens" tokens',
        lambda e: e.config.speculates and e.window is not None and e.window <= e.config.num_speculative_tokens,
        "set it below the window",
        name="sliding-window attention (window {e.window}) with"
        ' "num_speculative_tokens" {e.config.num_speculative_tokens}',
    ),
    Refusal(
        "pipeline parallelism",
        lambda e: e.parallel.pipeline_parallel_size > 1,
        "set --pipeline-parallel-size to 1",
        name="pipeline parallelism (size {e.parallel.pipeline_parallel_size})",
    ),
    Refusal(
        "context parallelism",
        lambda e: e.parallel.decode_context_parallel_size > 1 or e.parallel.prefill_context_parallel_size > 1,
        "set --decode-context-parallel-size and --prefill-context-parallel-size to 1",
    ),
    Refusal(
        "data parallelism of mixture-of-experts models",
        lambda e: e.parallel.data_parallel_size > 1 and e.model.is_moe,
        "set --data-parallel-size to 1 and put a load balancer in front of several servers",
        name="data parallelism (size {e.parallel.data_parallel_size}) of mixture-of-experts models, where every forward"
        " of an engine waits for the others' and an idle engine's dummy step runs no draft",
    ),
    Refusal(
        "data parallelism over Ray",
        lambda e: e.parallel.data_parallel_size > 1 and e.parallel.data_parallel_backend == "ray",
        'leave it at "mp"',
        name='--data-parallel-backend "ray"',
    ),
    Refusal("micro-batching (DBO)", lambda e: e.parallel.use_ubatching, "leave --enable-dbo off"),
    Refusal(
        "KV connectors",
        lambda e: e.vllm_config.kv_transfer_config is not None,
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    Refusal(
        "encoder-cache connectors",
        lambda e: e.vllm_config.ec_transfer_config is not None,
        "leave --ec-transfer-config out",
    ),
    Refusal(
        "quantised KV caches on CPUs",
        _quantised_cache,
        'set --kv-cache-dtype to "auto"',
        name="a quantised KV cache ({e.cache_dtype}) on the CPU",
        platforms=("CPU",),
    ),
    Refusal(
        "quantised KV caches other than fp8 on GPUs",
        lambda e: _quantised_cache(e, "fp8", "fp8_e4m3"),
        'set --kv-cache-dtype to "auto" or "fp8"',
        name="a quantised KV cache ({e.cache_dtype}) other than fp8 (e4m3)",
        platforms=("GPU",),
    ),
    Refusal(
        "KV caches of another floating-point type than the model's",
        lambda e: e.cache_dtype in _UNQUANTISED and f"torch.{e.cache_dtype}" != str(e.model.dtype),
        'set --kv-cache-dtype to "auto"',
        name="a KV cache of another type ({e.cache_dtype}) than the model's ({e.model.dtype})",
    ),
    Refusal(
        "fast prefill of layers that share KV",
        lambda e: e.vllm_config.cache_config.kv_sharing_fast_prefill,
        "leave --kv-sharing-fast-prefill off",
    ),
    Refusal(
        "an engine with prompt embeddings enabled",
        lambda e: e.model.enable_prompt_embeds,
        "leave --enable-prompt-embeds off",
        name="prompt embeddings",
    ),
    Refusal(
        '"tree_attention" other than "kernel"',
        lambda e: e.config.tree_attention != "kernel",
        "leave it out: the choice is for GPUs",
        name='"tree_attention" "{e.config.tree_attention}" on the CPU',
        platforms=("CPU",),
    ),
    Refusal(
        'an empty list of "sources" on GPUs',
        lambda e: not e.config.speculates,
        "name a source, because an empty list means our CPU kernels and nothing else",
        name='"sources" [] on a GPU',
        platforms=("GPU",),
    ),
    Refusal(
        '"tree_attention" other than "kernel" with float32',
        lambda e: e.config.tree_attention != "kernel" and str(e.model.dtype) == "torch.float32",
        'leave "tree_attention" at "kernel"',
        name='"tree_attention" "{e.config.tree_attention}" with --dtype float32',
        platforms=("GPU",),
    ),
    Refusal(
        f'"tree_attention" "xformers" with KV blocks that are not a multiple of {XFORMERS_PAGE} tokens',
        lambda e: e.config.tree_attention == "xformers" and e.block_size % XFORMERS_PAGE != 0,
        f"set --block-size to a multiple of {XFORMERS_PAGE}",
        name='"tree_attention" "xformers" with KV blocks of {e.block_size} tokens',
        platforms=("GPU",),
    ),
    Refusal(
        'batch invariance (VLLM_BATCH_INVARIANT) with "tree_attention" other than "kernel"',
        lambda e: e.batch_invariant and e.config.tree_attention != "kernel",
        'leave "tree_attention" at "kernel"',
        name='VLLM_BATCH_INVARIANT=1 with "tree_attention" "{e.config.tree_attention}"',
        platforms=("GPU",),
    ),
    Refusal(
        "a draft's tensor-parallel size that is neither 1 nor the target's",
        lambda e: e.config.draft_tensor_parallel_size not in (None, 1, e.parallel.tensor_parallel_size),
        "set it to 1 or to the target's size {e.parallel.tensor_parallel_size}",
        name='"draft_tensor_parallel_size" {e.config.draft_tensor_parallel_size}',
    ),
    Refusal(
        "Model Runner V1 on GPUs",
        lambda e: True,
        "leave VLLM_USE_V2_MODEL_RUNNER unset",
        runners=("V1",),
        platforms=("GPU",),
    ),
    Refusal(
        "routed experts in outputs",
        lambda e: e.config.speculates and e.vllm_config.aux_output_config.enabled,
        "leave it out",
        name="--enable-return-routed-experts, which reads rows that need not be those of accepted nodes",
    ),
    Refusal("trace replay", lambda e: e.model.enable_trace_replay, "leave --enable-trace-replay off", runners=("V2",)),
    Refusal(
        "sampling masks", lambda e: e.model.return_sampling_mask, "leave --return-sampling-mask off", runners=("V2",)
    ),
    Refusal(
        "batch-sharded sampling",
        lambda e: e.parallel.enable_batch_sharded_sampling,
        "leave --enable-batch-sharded-sampling off",
        runners=("V2",),
    ),
)
