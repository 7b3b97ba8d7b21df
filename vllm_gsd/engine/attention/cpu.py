"""vLLM's CPU attention backend, with our kernel for the rows that attend along a graph.

In bfloat16 all rows go to our kernel. In other types, on processors with AMX, and with ``"cpu_kernels"`` "off", plain
decodes, prompts and chains go to upstream's, untouched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from vllm import _custom_ops as vllm_ops
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_gsd.engine.attention.tree_rows import AttendsTrees, TreeBackend, TreeRows, TreeRowsOnly, serves_chains
from vllm_gsd.ops.attention.cpu import tree_attention
from vllm_gsd.ops.kv_move.cpu import write_kv
from vllm_gsd.ops.kv_move.layout import KVLayout, pages_of
from vllm_gsd.upstream import wire

# What takes the place of upstream's while the layers are built.
BACKENDS = {AttentionBackendEnum.CPU_ATTN: f"{__name__}.TreeCPUAttentionBackend"}


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Upstream's builder, which builds nothing if our kernel attends every row."""

    idle = False

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return TreeRowsOnly() if TreeCPUAttentionMetadataBuilder.idle else super().build(*args, **kwargs)


@contextmanager
def no_rows_left(idle: bool) -> Iterator[None]:
    """Inside this context, build no metadata for upstream's kernel if ``idle``: our kernel attends every row then."""
    TreeCPUAttentionMetadataBuilder.idle = idle
    try:
        yield
    finally:
        TreeCPUAttentionMetadataBuilder.idle = False


class TreeCPUAttentionImpl(AttendsTrees, CPUAttentionBackendImpl):
    """One layer's attention."""

    # A KV cache, and upstream's two views of it; made once, not in every step.
    _halves: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        # Whether upstream's kernel reads the cache, too.
        self.shares_cache = not serves_chains(config, torch.device("cpu"), config.model_config)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``CPUAttentionBackendImpl.forward``; rows named by the metadata's TreeRows use our kernel.

        Keys and values go into the cache first.
        """
        if attn_metadata is None:
            # An idle run. What upstream leaves in the output would decide which experts the rows choose.
            return output.zero_()
        tree = wire.attached(attn_metadata, wire.TREE_ROWS)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            slots = get_forward_context().slot_mapping.get(layer.layer_name)
            if slots is not None:
                if self.shares_cache and wire.has_drafted_rows(attn_metadata):
                    # The target may compute NaN for a drafted token, as Gemma 3n does for its padding token. Our kernel
                    # skips what a row does not attend. Upstream's kernel multiplies it by 0, which keeps the NaN, and
                    # reads what rejected nodes left behind a request's last key.
                    key, value = torch.nan_to_num(key), torch.nan_to_num(value)
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        upstream = super().forward
        if tree is None:
            return upstream(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)

        def plain(rows: torch.Tensor, metadata: Any, out: torch.Tensor) -> None:
            upstream(layer, rows, key, value, kv_cache, metadata, out)

        return self.attend(plain, layer, query, kv_cache, tree, output)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):
            return
        if not self.shares_cache:
            write_kv(kv_cache, self._layout(layer, kv_cache), key, value, slot_mapping)
            return
        if self._halves is None or self._halves[0] is not kv_cache:
            self._halves = (kv_cache, *pages_of(kv_cache))
        _, keys, values = self._halves
        vllm_ops.cpu_attn_reshape_and_cache(
            key, value, keys, values, slot_mapping, layer.isa, k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float, kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip

    def _tree(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreeRows, output: torch.Tensor
    ) -> None:
        tree_attention(
            output, query, kv_cache, self._layout(layer, kv_cache), tree, self.scale,
            sliding_window=self.sliding_window, softcap=self.logits_soft_cap, sinks=self.sinks,
        )  # fmt: skip

    def _layout(self, layer: Any, kv_cache: torch.Tensor) -> KVLayout:
        return kv_layout(layer.isa, kv_cache.shape[2], self.head_size, kv_cache.dtype)


class TreeCPUAttentionBackend(TreeBackend, CPUAttentionBackend):
    """Upstream's backend with a tree-aware implementation."""

    builder, impl = TreeCPUAttentionMetadataBuilder, TreeCPUAttentionImpl
    # Saves a Python call per layer, some 20 microseconds.
    forward_includes_kv_cache_update = True


@lru_cache
def kv_layout(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> KVLayout:
    """How upstream orders the elements of a KV page on this machine, found by writing through its own op."""
    write = partial(vllm_ops.cpu_attn_reshape_and_cache, isa=isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    return KVLayout.probe(write, block_size, head_size, dtype)
