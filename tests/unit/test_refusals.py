"""Each row of the table of refusals rejects its feature on the right runner and platform, and reads existing fields."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.refusals import REFUSALS, Engine

PRUNING = SimpleNamespace(is_multimodal_pruning_enabled=lambda: True)
# Feature: (runner, platform, a configuration that uses it, a part of the message).
USED = {
    "other platforms than vLLM's CPU and CUDA platforms": ("V1", "", {}, "this platform yet"),
    "pooling models": ("V1", "CPU", {"model.runner_type": "pooling"}, "text-generation"),
    "encoder-decoder models": ("V1", "CPU", {"model.is_encoder_decoder": True}, "decoder-only"),
    "multi-head latent attention (MLA)": ("V2", "GPU", {"model.use_mla": True}, "MLA"),
    "Mamba, hybrid and attention-free models": ("V1", "CPU", {"model.is_hybrid": True}, "hybrid"),
    "texts longer than a chunk of chunked local attention (Llama 4)": (
        "V2",
        "GPU",
        {"model.attention_chunk_size": 8192, "model.max_model_len": 8193},
        "--max-model-len to at most 8192",
    ),
    "diffusion language models": ("V1", "CPU", {"vllm_config.diffusion_config": 1}, "diffusion"),
    'sliding windows of at most "num_speculative_tokens" tokens': (
        *("V1", "CPU", {"model.get_sliding_window": lambda: 16}),
        '(window 16) with "num_speculative_tokens" 16; set it below the window.',
    ),
    "pipeline parallelism": ("V1", "CPU", {"parallel.pipeline_parallel_size": 2}, "(size 2)"),
    "context parallelism": (
        "V1",
        "CPU",
        {"parallel.decode_context_parallel_size": 2},
        "--prefill-context-parallel-size to 1",
    ),
    "data parallelism of mixture-of-experts models": (
        *("V1", "CPU", {"parallel.data_parallel_size": 2, "model.is_moe": True}),
        "an idle engine's dummy step runs no draft; set --data-parallel-size to 1 and put a load balancer",
    ),
    "data parallelism over Ray": (
        *("V1", "CPU", {"parallel.data_parallel_size": 2, "parallel.data_parallel_backend": "ray"}),
        'leave it at "mp"',
    ),
    "pruned video tokens with M-RoPE (--video-pruning-rate)": (
        *("V1", "CPU", {"model.uses_mrope": True, "model.multimodal_config": PRUNING}),
        "--video-pruning-rate with M-RoPE",
    ),
    "images whose tokens attend to each other in both directions (Gemma 3, PaliGemma, large Gemma 4)": (
        *("V2", "GPU", {"model.is_mm_prefix_lm": True}),
        "--language-model-only",
    ),
    "micro-batching (DBO)": ("V2", "GPU", {"parallel.use_ubatching": True}, "--enable-dbo"),
    "KV connectors": ("V1", "CPU", {"vllm_config.kv_transfer_config": 1}, "--kv-transfer-config"),
    "encoder-cache connectors": ("V1", "CPU", {"vllm_config.ec_transfer_config": 1}, "--ec-transfer-config"),
    "quantised KV caches on CPUs": (
        "V1",
        "CPU",
        {"cache.cache_dtype": "fp8"},
        "(fp8) on the CPU; set --kv-cache-dtype",
    ),
    "quantised KV caches other than fp8 on GPUs": (
        *("V2", "GPU", {"cache.cache_dtype": "fp8_e5m2"}),
        '(fp8_e5m2) other than fp8 (e4m3); set --kv-cache-dtype to "auto" or "fp8".',
    ),
    "KV caches of another floating-point type than the model's": (
        *("V1", "CPU", {"cache.cache_dtype": "float16"}),
        "(float16) than the model's (torch.bfloat16); set --kv-cache-dtype",
    ),
    "fast prefill of layers that share KV": ("V1", "CPU", {"cache.kv_sharing_fast_prefill": True}, "fast-prefill"),
    "an engine with prompt embeddings enabled": ("V1", "CPU", {"model.enable_prompt_embeds": True}, "embeddings"),
    '"tree_attention" other than "kernel"': ("V1", "CPU", {"config.tree_attention": "xformers"}, "on the CPU"),
    '"tree_attention" other than "kernel" with float32': (
        *("V2", "GPU", {"config.tree_attention": "flash_prefix", "model.dtype": "torch.float32"}),
        "--dtype float32; leave",
    ),
    'batch invariance (VLLM_BATCH_INVARIANT) with "tree_attention" other than "kernel"': (
        *("V2", "GPU", {"config.tree_attention": "flash_prefix", "engine.batch_invariant": True}),
        'VLLM_BATCH_INVARIANT=1 with "tree_attention" "flash_prefix"; leave',
    ),
    "routed experts in outputs": (
        *("V2", "GPU", {"vllm_config.aux_output_config": SimpleNamespace(enabled=True)}),
        "--enable-return-routed-experts",
    ),
    'an empty list of "sources" on GPUs': ("V2", "GPU", {"config.sources": []}, '"sources" [] on a GPU; name a source'),
    '"tree_attention" "xformers" with KV blocks that are not a multiple of 64 tokens': (
        *("V2", "GPU", {"config.tree_attention": "xformers", "cache.block_size": 16}),
        "with KV blocks of 16 tokens; set --block-size to a multiple of 64.",
    ),
    "a draft's tensor-parallel size that is neither 1 nor the target's": (
        *("V1", "CPU", {"config.model": "draft", "config.draft_tensor_parallel_size": 2}),
        '"draft_tensor_parallel_size" 2; set it to 1 or to the target\'s size 1',
    ),
    "Model Runner V1 on GPUs": ("V1", "GPU", {}, "VLLM_USE_V2_MODEL_RUNNER unset"),
    "trace replay": ("V2", "GPU", {"model.enable_trace_replay": True}, "--enable-trace-replay"),
    "sampling masks": ("V2", "GPU", {"model.return_sampling_mask": True}, "--return-sampling-mask"),
    "batch-sharded sampling": ("V2", "GPU", {"parallel.enable_batch_sharded_sampling": True}, "leave --enable"),
}


def engine(runner: str, platform: str, **changes: dict) -> Engine:
    """An engine that uses only supported features, apart from those given by config."""
    model = {
        "runner_type": "generate",
        "get_sliding_window": lambda: None,
        **dict.fromkeys(("is_encoder_decoder", "use_mla", "is_hybrid"), False),
        **dict.fromkeys(("is_attention_free", "is_moe", "enable_prompt_embeds", "enable_trace_replay"), False),
        "return_sampling_mask": False,
        **dict.fromkeys(("uses_mrope", "is_mm_prefix_lm"), False),
        "multimodal_config": None,
        "attention_chunk_size": None,
        "max_model_len": 8192,
        "dtype": "torch.bfloat16",
    }
    sizes = ("pipeline", "decode_context", "prefill_context", "data", "tensor")
    parallel = {
        **{f"{size}_parallel_size": 1 for size in sizes},
        "data_parallel_backend": "mp",
        "use_ubatching": False,
        "enable_batch_sharded_sampling": False,
    }
    configs = ("diffusion", "kv_transfer", "ec_transfer", "lora")
    vllm_config = {
        **{f"{name}_config": None for name in configs},
        "aux_output_config": SimpleNamespace(enabled=False),
        "model_config": SimpleNamespace(**model | changes.get("model", {})),
        "parallel_config": SimpleNamespace(**parallel | changes.get("parallel", {})),
        "cache_config": SimpleNamespace(
            **{"cache_dtype": "auto", "kv_sharing_fast_prefill": False, "block_size": 16} | changes.get("cache", {})
        ),
    }
    config = GSDConfig.load({"method": "gsd", "model": None, **changes.get("config", {})})
    vllm_config |= changes.get("vllm_config", {})
    return Engine(SimpleNamespace(**vllm_config), config, runner, platform, **changes.get("engine", {}))


def split(changes: dict) -> dict[str, dict]:
    by_config: dict[str, dict] = {}
    for path, value in changes.items():
        name, key = path.split(".")
        by_config.setdefault(name, {})[key] = value
    return by_config


def messages(configured: Engine) -> list[str]:
    return [message for refusal in REFUSALS if (message := refusal.message(configured))]


def test_every_refusal_is_here():
    assert {refusal.feature for refusal in REFUSALS} == USED.keys()


@pytest.mark.parametrize("feature", USED)
def test_refused(feature):
    runner, platform, changes, part = USED[feature]
    refusals = messages(engine(runner, platform, **split(changes)))
    assert any(part in message for message in refusals)
    for message in refusals:
        assert message.startswith("gsd does not support ")
        assert message.endswith(".")
        assert "\n" not in message


@pytest.mark.parametrize(("runner", "platform"), [("V1", "CPU"), ("V2", "CPU"), ("V2", "GPU")])
def test_nothing_else_is_refused(runner, platform):
    assert messages(engine(runner, platform)) == []


@pytest.mark.parametrize(
    ("runner", "platform", "changes"),
    [
        ("V1", "CPU", {"vllm_config.lora_config": 1}),
        ("V2", "GPU", {"vllm_config.lora_config": 1}),
        ("V1", "CPU", {"model.get_sliding_window": lambda: 17}),
        ("V1", "CPU", {"model.is_mm_prefix_lm": True}),
        ("V1", "CPU", {"model.uses_mrope": True}),
        ("V1", "CPU", {"model.attention_chunk_size": 8192}),
        ("V2", "GPU", {"cache.cache_dtype": "fp8"}),
        ("V1", "CPU", {"cache.cache_dtype": "bfloat16"}),
        ("V2", "GPU", {"config.tree_attention": "xformers", "cache.block_size": 128}),
        ("V1", "CPU", {"parallel.data_parallel_size": 2}),
    ],
)
def test_what_is_refused_elsewhere_only(runner, platform, changes):
    assert messages(engine(runner, platform, **split(changes))) == []


def test_vllm_has_what_is_asked():
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig

    classes = {"model": ModelConfig, "parallel": ParallelConfig, "cache": CacheConfig, "vllm_config": VllmConfig}
    paths = {
        path for _, _, changes, _ in USED.values() for path in changes if not path.startswith(("config.", "engine."))
    }
    for name, key in (path.split(".") for path in paths | {"model.is_attention_free"}):
        fields = {field.name for field in dataclasses.fields(classes[name])}
        assigned = f"self.{key}" in inspect.getsource(classes[name])
        assert key in fields or hasattr(classes[name], key) or assigned, f"{name}.{key}"
