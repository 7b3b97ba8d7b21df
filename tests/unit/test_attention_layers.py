"""Layers with a kind of attention that graphs do not support are refused by their own attributes, not by configs."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_gsd.config import GSDConfigError
from vllm_gsd.engine.attention import cuda as cuda_attention
from vllm_gsd.engine.attention.cpu import BACKENDS, TreeCPUAttentionBackend, TreeCPUAttentionImpl
from vllm_gsd.engine.attention.layers import check_draft_layers, check_kernel_blocks, check_target_layers, window_of
from vllm_gsd.upstream.workers import attention_backends

NAME = "model.layers.3.self_attn.attn"
NODES = 16
CPU = AttentionBackendEnum.CPU_ATTN


def layer(kind=Attention, impl=TreeCPUAttentionImpl, window=-1, alibi=None, attributes=(), **of_layer):
    """A layer with the attributes that vLLM's constructors would have set."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.impl = impl.__new__(impl)
    made.impl.sliding_window, made.impl.alibi_slopes = window, alibi
    made.impl.sinks, made.impl.logits_soft_cap = None, 0
    made.impl.head_size, made.impl.kv_cache_dtype = 64, "auto"
    for name, value in dict(attributes).items():
        setattr(made.impl, name, value)
    values = {"attn_backend": CPUAttentionBackend, "attn_type": AttentionType.DECODER, "head_size": 64}
    for name, value in {**values, "head_size_v": 64, **of_layer}.items():
        setattr(made, name, value)
    return {NAME: made}


def refusal(layers):
    with pytest.raises(GSDConfigError) as caught:
        check_target_layers(layers, NODES)
    message = str(caught.value)
    assert f"in layer {NAME}; " in message and message.endswith(".") and "\n" not in message
    return message


FLASH = cuda_attention.TreeFlashAttentionImpl


@pytest.mark.parametrize("window", [NODES, 3])
@pytest.mark.parametrize("impl", [TreeCPUAttentionImpl, FLASH])
def test_windows(impl, window):
    kept = window if impl is TreeCPUAttentionImpl else (window - 1, 0)
    message = refusal(layer(impl=impl, window=kept))
    assert f"sliding-window attention (window {window})" in message
    check_draft_layers(layer(impl=impl, window=kept))


@pytest.mark.parametrize(
    ("kept", "window"), [(-1, None), (0, None), (None, None), (7, 7), ((-1, -1), None), ((6, 0), 7)]
)
def test_window_of(kept, window):
    assert window_of(layer(window=kept)[NAME].impl) == window


def test_layers_that_are_served():
    for served in (
        layer(),
        layer(window=NODES + 1),
        layer(impl=FLASH, window=(-1, -1)),
        layer(impl=FLASH, window=(NODES, 0)),
    ):
        check_target_layers(served, NODES)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"kind": ChunkedLocalAttention}, "class ChunkedLocalAttention"),
        ({"impl": CPUAttentionBackendImpl}, r"backend CPU_ATTN \(vllm.v1.attention.backends.cpu_attn."),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only attention"),
        ({"head_size_v": 32}, "values of size 32 with keys of size 64"),
        ({"alibi": torch.ones(4)}, "ALiBi"),
        ({"impl": FLASH, "window": (-1, -1), "attributes": {"chunk_lookback": 0}}, "chunked attention"),
    ],
)
def test_kinds(keys, kind):
    assert re.search(kind, refusal(layer(**keys)))
    with pytest.raises(GSDConfigError, match=kind):
        check_draft_layers(layer(**keys))


@pytest.mark.parametrize("chosen", ["flash_prefix", "xformers"])
@pytest.mark.parametrize("keys", [{"window": (63, 0)}, {"attributes": {"sinks": torch.ones(4)}}])
def test_kernels_that_can_do_less(monkeypatch, chosen, keys):
    with_keys = {"window": (-1, -1), **keys}
    check_draft_layers(layer(impl=FLASH, **with_keys))
    monkeypatch.setattr(cuda_attention, "_chosen", chosen)
    assert f'"tree_attention" "{chosen}"' in refusal(layer(impl=FLASH, **with_keys))


def chosen_class():
    shape = selector.AttentionSelectorConfig(64, torch.float32, "auto", None)
    return selector._cached_get_attn_backend(backend=None, attn_selector_config=shape, num_heads=4)


def test_backends_are_ours_while_layers_are_built():
    assert chosen_class() is CPUAttentionBackend
    for _ in range(2):
        with attention_backends(BACKENDS):
            assert chosen_class() is TreeCPUAttentionBackend
        assert chosen_class() is CPUAttentionBackend
    with pytest.raises(RuntimeError, match="no memory"), attention_backends(BACKENDS):
        raise RuntimeError("no memory for the weights")
    assert chosen_class() is CPUAttentionBackend


def test_another_ones_backend_comes_back():
    other = "some_plugin.Backend"
    try:
        with attention_backends({CPU: other}), attention_backends(BACKENDS):
            assert CPU.get_class() is TreeCPUAttentionBackend
        assert not CPU.is_overridden()
        with attention_backends({CPU: other}):
            with attention_backends(BACKENDS):
                pass
            assert CPU.get_path() == other
    finally:
        CPU.clear_override()


def test_gpus_choose_a_backend_of_ours_where_one_fits(monkeypatch):
    """On some GPUs, vLLM's first choice is FlashInfer."""
    upstream = [AttentionBackendEnum[name] for name in ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")]
    platform = SimpleNamespace(_get_backend_priorities=lambda use_mla: upstream)
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", platform)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    with attention_backends(cuda_attention.BACKENDS):
        chosen = platform._get_backend_priorities(use_mla=False)
    assert [backend.name for backend in chosen] == ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"]
    assert platform._get_backend_priorities(use_mla=False) is upstream


def test_blocks_that_the_kernel_splits_are_refused():
    """Block tables hold the blocks of vLLM's KV cache manager, which our kernels read."""
    group = SimpleNamespace(
        kernel_block_size=None, kv_cache_spec=SimpleNamespace(block_size=256), backend=CPUAttentionBackend
    )
    check_kernel_blocks([group])
    group.kernel_block_size = 128
    with pytest.raises(GSDConfigError, match=r"blocks of 256 tokens .* CPU_ATTN, .* set --block-size to 128\."):
        check_kernel_blocks([group])
