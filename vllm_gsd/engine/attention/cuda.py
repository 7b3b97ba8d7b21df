"""vLLM's CUDA attention backends, with our kernels for the rows that attend along token graphs.

Our subclasses of the FlashAttention and Triton backends are registered under the same names, so ``--attention-backend``
and vLLM's automatic choice still work. Upstream's kernels serve all other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_gsd.engine.attention.tree_rows import AttendsTrees, TreeBackend, TreeRows
from vllm_gsd.ops.attention.merge import merge_attention
from vllm_gsd.ops.attention.paged import paged_tree_attention
from vllm_gsd.ops.attention.paged_checks import MAX_HEAD_SIZE
from vllm_gsd.ops.attention.xformers import HEAD_SIZES, load_xformers, xformers_tree_attention
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
    from vllm.v1.attention.backend import AttentionLayer, AttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

# The backends that replace upstream's while layers are built.
BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: f"{__name__}.TreeFlashAttentionBackend",
    AttentionBackendEnum.TRITON_ATTN: f"{__name__}.TreeTritonAttentionBackend",
}
# A process has one engine, whose worker sets this once at start-up.
_chosen = "kernel"


def choose(implementation: str) -> None:
    """Choose the implementation of tree attention in this process: a value of gsd's key ``tree_attention``.

    Raises:
        ImportError: the implementation's package is missing.
    """
    global _chosen
    if implementation == "xformers":
        load_xformers()
    if implementation == "flash_prefix":
        _flash_attention()
    _chosen = implementation


class _TreeRowsImpl(AttendsTrees):
    """Mixin before upstream's implementation class. Our kernels serve the rows in the metadata's TreeRows."""

    num_heads: int
    head_size: int
    scale: float
    sliding_window: tuple[int, int]
    logits_soft_cap: float
    sinks: torch.Tensor | None
    kv_cache_dtype: str
    prefix_version: int | None = None  # of FlashAttention, for "flash_prefix"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if _chosen == "flash_prefix":
            self.prefix_version = get_flash_attn_version(
                head_size=self.head_size, requires_softcap=bool(self.logits_soft_cap)
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention as upstream's ``forward`` does, with our kernels for tree rows."""
        upstream = functools.partial(super().forward, layer)  # type: ignore[misc]
        tree = wire.attached(attn_metadata, wire.TREE_ROWS)
        if tree is None:
            return upstream(query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported for tree rows")

        def plain(rows: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
            # Upstream reads keys and values from the cache, which already holds those of this step.
            upstream(rows, key, value, kv_cache, metadata, out)

        return self.attend(plain, layer, query, kv_cache, tree, output)

    def refuses(self) -> tuple[str, str] | None:
        if self.head_size > MAX_HEAD_SIZE:
            return f"heads of size {self.head_size}, above {MAX_HEAD_SIZE}", "use a model with smaller heads"
        features = {
            "a sliding window": self.sliding_window[0] >= 0,
            "sinks": self.sinks is not None,
            "a quantised KV cache": is_quantized_kv_cache(self.kv_cache_dtype),
            "a soft cap": _chosen == "xformers" and bool(self.logits_soft_cap),
            f"heads of size {self.head_size}": _chosen == "xformers" and self.head_size not in HEAD_SIZES,
        }
        used = next((feature for feature, has in features.items() if has), None)
        if _chosen == "kernel" or used is None:
            return None
        return f'{used} with "tree_attention" "{_chosen}"', 'leave "tree_attention" at "kernel"'

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """No: tree rows are written without quantisation, so vLLM's compiler must not fuse it."""
        return False

    def _tree(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreeRows, output: torch.Tensor
    ) -> None:
        num_rows = len(tree.positions)
        heads = (num_rows, self.num_heads, self.head_size)
        # The cache's logical shape is [num_blocks, kv_heads, block_size, 2 * head_size].
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        options: dict[str, Any] = {}
        if is_quantized_kv_cache(self.kv_cache_dtype):
            key_cache, value_cache = (cache.view(current_platform.fp8_dtype()) for cache in (key_cache, value_cache))
            options = {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}
        query = query[:num_rows].view(heads)
        if query.dtype != output.dtype:  # upstream quantises queries if the cache is fp8
            scale = layer._q_scale.view(-1, 1)  # one for all heads, or one for the heads of each KV head
            scale = scale.repeat_interleave(self.num_heads // len(scale), dim=0) if len(scale) > 1 else scale
            query = (query.to(torch.float32) * scale).to(output.dtype)
        implementations: dict[str, Callable[..., None]] = {
            "kernel": paged_tree_attention,
            "flash_prefix": _flash_prefix_attention,
            "xformers": xformers_tree_attention,
        }
        implementations[_chosen](
            output[:num_rows].view(heads), query, key_cache, value_cache, tree, self.scale,
            # Upstream's window is (left, right), without the token itself.
            sliding_window=self.sliding_window[0] + 1, softcap=self.logits_soft_cap, sinks=self.sinks, **options,
            **({} if _chosen == "xformers" else {"max_rows": tree.max_rows}),
            **({"fa_version": self.prefix_version} if _chosen == "flash_prefix" else {}),
            **({"by_row": True} if envs.VLLM_BATCH_INVARIANT else {}),
        )  # fmt: skip


class TreeFlashAttentionImpl(_TreeRowsImpl, FlashAttentionImpl):
    """One layer's attention: FlashAttention, with tree rows on our kernels."""


class TreeTritonAttentionImpl(_TreeRowsImpl, TritonAttentionImpl):
    """One layer's attention: vLLM's Triton kernels, with tree rows on our kernels."""


class _TreeRowsBuilder:
    """Mixin before upstream's builder class. It declares which batches full CUDA graphs support."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Uniform batches, whose rows are all tree rows. xformers needs the host, so it supports none."""
        return AttentionCGSupport.NEVER if _chosen == "xformers" else AttentionCGSupport.UNIFORM_BATCH


class TreeFlashAttentionMetadataBuilder(_TreeRowsBuilder, FlashAttentionMetadataBuilder):
    """Builds metadata for ``TreeFlashAttentionImpl``."""


class TreeTritonAttentionMetadataBuilder(_TreeRowsBuilder, TritonAttentionMetadataBuilder):
    """Builds metadata for ``TreeTritonAttentionImpl``."""


class TreeFlashAttentionBackend(TreeBackend, FlashAttentionBackend):
    """Upstream's backend with tree attention."""

    builder, impl = TreeFlashAttentionMetadataBuilder, TreeFlashAttentionImpl


class TreeTritonAttentionBackend(TreeBackend, TritonAttentionBackend):
    """Upstream's backend with tree attention."""

    builder, impl = TreeTritonAttentionMetadataBuilder, TreeTritonAttentionImpl


def _flash_attention() -> Callable[..., Any]:
    """The FlashAttention function that ships with vLLM.

    Raises:
        ImportError: this build of vLLM has no FlashAttention.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ImportError(
            f'"tree_attention" is "flash_prefix", but vLLM\'s FlashAttention cannot be imported ({error}); '
            'choose "kernel"'
        ) from error
    return flash_attn_varlen_func


def _flash_prefix_attention(
    output: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tree: TreeRows,
    scale: float, *, sliding_window: int, softcap: float, sinks: torch.Tensor | None, max_rows: int | None,
    fa_version: int | None, **options: Any,
) -> None:  # fmt: skip
    """Merge FlashAttention over the whole prefix, without a causal mask, with our kernel's attention over the tree."""
    if sliding_window > 0 or sinks is not None or options:
        raise NotImplementedError(
            'with a sliding window, sinks or a quantised KV cache "tree_attention" must be "kernel"'
        )
    # FlashAttention 3 and 4 need the usual strides even of dimensions of size 1.
    keys, values = map(canonicalize_singleton_dim_strides, (key_cache, value_cache))
    prefix, prefix_lse = _flash_attention()(
        query, keys, values, max_seqlen_q=max_rows or len(query), cu_seqlens_q=tree.query_start_loc,
        max_seqlen_k=tree.block_table.shape[1] * key_cache.shape[1], seqused_k=tree.prefix_lens, softmax_scale=scale,
        causal=False, softcap=softcap, block_table=tree.block_table, return_softmax_lse=True, fa_version=fa_version,
    )  # fmt: skip
    parts = query.new_empty((2, *query.shape))
    lses = query.new_empty((2, *query.shape[:2]), dtype=torch.float32)
    parts[0], lses[0] = prefix, prefix_lse.transpose(0, 1)  # FlashAttention returns [heads, rows]
    paged_tree_attention(
        parts[1], query, key_cache, value_cache, tree, scale, softcap=softcap, include_prefix=False, lse=lses[1],
        max_rows=max_rows, num_splits=1,
    )  # fmt: skip
    merge_attention(output, parts, lses, end_row=tree.query_start_loc[-1:])
