"""Checks that a model's attention layers can attend along token graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec, replace_as

from vllm_gsd.config import GSDConfigError
from vllm_gsd.engine.attention.tree_rows import AttendsTrees

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup


def attention_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """All layers built so far that have a KV cache or other state, by name."""
    layer_type: Any = AttentionLayerBase
    return get_layers_from_vllm_config(vllm_config, layer_type)


def check_target_layers(layers: Mapping[str, AttentionLayerBase], nodes: int) -> None:
    """Check the target's layers themselves, since its configuration may not reveal how they attend.

    Attention among the at most ``nodes`` nodes of a tree ignores sliding windows, so these must be longer.

    Raises:
        GSDConfigError: names the first unsupported layer and the reason.
    """
    check_draft_layers(layers)
    for name, layer in layers.items():
        window = window_of(layer.impl)
        if window is not None and window <= nodes:
            kind = f'sliding-window attention (window {window}) with "num_speculative_tokens" {nodes}'
            _refuse(kind, name, "set it below the window")


def check_draft_layers(layers: Mapping[str, AttentionLayerBase]) -> None:
    """Check that layers are of a kind that can attend along token graphs.

    Raises:
        GSDConfigError: names the first unsupported layer and the reason.
    """
    for name, layer in layers.items():
        if type(layer) is not Attention:  # subclasses select other keys or store other state
            _refuse(f"attention of class {type(layer).__name__}", name, _OTHER)
        if not isinstance(layer.impl, AttendsTrees):
            backend = layer.attn_backend
            _refuse(
                f"the attention backend {backend.get_name()} ({backend.__module__}.{backend.__qualname__})",
                name,
                "leave --attention-backend out, or set it to FLASH_ATTN or TRITON_ATTN on a GPU",
            )
        if layer.attn_type != AttentionType.DECODER:
            _refuse(f"{AttentionType(layer.attn_type).value} attention", name, _OTHER)
        if layer.head_size_v != layer.head_size:
            _refuse(f"values of size {layer.head_size_v} with keys of size {layer.head_size}", name, _OTHER)
        if layer.impl.alibi_slopes is not None:
            _refuse("ALiBi", name, _OTHER)
        if getattr(layer.impl, "chunk_lookback", -1) > -1:
            _refuse("chunked attention", name, _OTHER)
        if (refused := layer.impl.refuses()) is not None:
            feature, instead = refused
            _refuse(feature, name, instead)


def without_windows(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """KV cache specs that keep all tokens, even outside sliding windows, so that all layers share one block table.

    Only the attention then applies the windows. Upstream does the same for models that mix layers with and without
    windows where its hybrid KV cache is off, as on CPUs.
    """
    return {
        name: replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",), sliding_window=None)
        if type(spec) is SlidingWindowSpec
        else spec
        for name, spec in specs.items()
    }


def window_of(impl: AttentionImpl) -> int | None:
    """Sliding window of an attention implementation, including the row's own key; None for full attention."""
    window = impl.sliding_window
    if isinstance(window, tuple):  # GPU backends store (left, right) without the row itself; -1 is unlimited
        window = window[0] + 1
    return None if window is None or window <= 0 else window


_OTHER = "use a decoder-only model with vLLM's plain attention layers only"


def _refuse(kind: str, layer: str, instead: str) -> None:
    raise GSDConfigError(f"gsd does not support {kind} in layer {layer}; {instead}.")


def check_kv_groups(kv_cache_config: KVCacheConfig) -> None:
    """Check that all layers share one block table.

    Raises:
        ValueError: the layers of target and draft are in more than one KV cache group.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError(
            f"gsd needs all layers of target and draft in one KV cache group, but this pair has "
            f"{len(kv_cache_config.kv_cache_groups)} groups; use another draft."
        )


def check_kernel_blocks(groups: Iterable[AttentionGroup]) -> None:
    """Check that the attention kernels address the same KV blocks as block tables do.

    Raises:
        GSDConfigError: an attention backend splits the blocks, and maps block tables only in its own metadata.
    """
    for group in groups:
        if group.kernel_block_size is not None:
            raise GSDConfigError(
                f"gsd does not support KV blocks of {group.kv_cache_spec.block_size} tokens with the attention backend "
                f"{group.backend.get_name()}, which splits them into blocks of {group.kernel_block_size} tokens; set "
                f"--block-size to {group.kernel_block_size}."
            )
