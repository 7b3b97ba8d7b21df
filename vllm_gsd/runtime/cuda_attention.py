"""vLLM's CUDA attention backends, with our kernels for the rows that attend along a graph.

FlashAttention's and Triton's backends are registered again under their own names, so that ``--attention-backend`` and
vLLM's own choice go on working. Everything but graph rows goes to upstream's kernels untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_gsd.ops.merge_attention import merge_attention
from vllm_gsd.ops.paged_tree_attention import paged_tree_attention
from vllm_gsd.ops.xformers_attention import load_xformers, xformers_tree_attention
from vllm_gsd.runtime.tree_rows import TreeRows
from vllm_gsd.upstream import wire, workers

#: What ``"tree_attention"`` in a gsd.json may be.
IMPLEMENTATIONS = ("kernel", "flash_prefix", "xformers")

# One engine a process: set once where the engine's worker starts.
_chosen = "kernel"


def register(implementation: str = "kernel") -> None:
    """Put our backends in the place of upstream's, for engines of this process.

    Args:
        implementation: of the graph rows' attention. "kernel": ours, prefix and tree in one. "flash_prefix": the
            prefix by vLLM's FlashAttention, the tree by ours, merged. "xformers": all of it by xformers.

    Raises:
        ImportError: the implementation's package is missing.
        ValueError: there is no such implementation.
    """
    global _chosen
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"tree attention is {implementation!r}, but must be one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xformers":
        load_xformers()
    if implementation == "flash_prefix":
        _flash_attention()
    _chosen = implementation
    workers.take_over_attention(
        {
            "FLASH_ATTN": f"{__name__}.TreeFlashAttentionBackend",
            "TRITON_ATTN": f"{__name__}.TreeTritonAttentionBackend",
        }
    )


def require_tree_backend(backend: type, layer: str) -> None:
    """Refuse a layer whose backend would attend graphs as if they were chains.

    Raises:
        ValueError: one sentence that names the backend and what to choose.
    """
    if not issubclass(backend.get_impl_cls(), _TreeRowsImpl):  # type: ignore[attr-defined]
        raise ValueError(
            f"gsd verifies graphs with vLLM's FLASH_ATTN and TRITON_ATTN backends, but {layer} has "
            f"{backend.get_name()}; set --attention-backend to one of the two."  # type: ignore[attr-defined]
        )


class _TreeRowsImpl:
    """Mixed in before upstream's implementation class: rows named by the metadata's TreeRows are ours."""

    num_heads: int
    head_size: int
    scale: float
    sliding_window: tuple[int, int]
    logits_soft_cap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    kv_cache_dtype: str

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        """See upstream's ``forward``."""
        upstream = functools.partial(super().forward, layer)  # type: ignore[misc]
        tree = wire.tree_rows_of(attn_metadata)
        if tree is None:
            return upstream(query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported for rows of a graph")
        if tree.rows is None:
            self._tree(layer, query, kv_cache, tree, output)
            return output
        tree_output = output.new_empty((len(tree.rows), *output.shape[1:]))
        self._tree(layer, query.index_select(0, tree.rows), kv_cache, tree, tree_output)
        output.index_copy_(0, tree.rows, tree_output)
        if tree.plain_rows is not None:
            plain_output = output.new_empty((len(tree.plain_rows), *output.shape[1:]))
            # Keys and values of this step are in the cache by now; upstream reads them from there.
            upstream(query.index_select(0, tree.plain_rows), key, value, kv_cache, tree.plain_metadata, plain_output)
            output.index_copy_(0, tree.plain_rows, plain_output)
        return output

    def _tree(self, layer, query, kv_cache, tree: TreeRows, output) -> None:
        if self.alibi_slopes is not None:
            raise NotImplementedError("tree attention does not support ALiBi slopes")
        num_rows = len(tree.positions)
        heads = (num_rows, self.num_heads, self.head_size)
        # The cache in logical order: [num_blocks, kv_heads, block_size, 2 * head_size].
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        options: dict[str, Any] = {}
        if is_quantized_kv_cache(self.kv_cache_dtype):
            key_cache, value_cache = (cache.view(current_platform.fp8_dtype()) for cache in (key_cache, value_cache))
            options = {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}
        query = query[:num_rows].view(heads)
        if query.dtype != output.dtype:  # upstream quantises queries for an fp8 cache
            query = (query.to(torch.float32) * layer._q_scale).to(output.dtype)
        if tree.slot_positions is not None and _chosen != "xformers":
            options["slot_positions"] = tree.slot_positions
        _attention(_chosen)(
            output[:num_rows].view(heads), query, key_cache, value_cache, tree.block_table, tree.query_start_loc,
            tree.prefix_lens, tree.positions, tree.mask, self.scale,
            # Upstream keeps (how far to the left, how far to the right), both without the token itself.
            sliding_window=self.sliding_window[0] + 1, softcap=self.logits_soft_cap, sinks=self.sinks, **options,
            **({} if _chosen == "xformers" else {"max_rows": tree.max_rows}),
        )  # fmt: skip


class TreeFlashAttentionImpl(_TreeRowsImpl, FlashAttentionImpl):
    """One layer's attention beside FlashAttention."""


class TreeTritonAttentionImpl(_TreeRowsImpl, TritonAttentionImpl):
    """One layer's attention beside vLLM's Triton kernels."""


class _TreeRowsBuilder:
    """Mixed in before upstream's builder class: what may be in a full CUDA graph."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        """Batches whose rows are all attended as trees; none where that asks the host."""
        return AttentionCGSupport.NEVER if _chosen == "xformers" else AttentionCGSupport.UNIFORM_BATCH


class TreeFlashAttentionMetadataBuilder(_TreeRowsBuilder, FlashAttentionMetadataBuilder):
    """Of metadata for ``TreeFlashAttentionImpl``."""


class TreeTritonAttentionMetadataBuilder(_TreeRowsBuilder, TritonAttentionMetadataBuilder):
    """Of metadata for ``TreeTritonAttentionImpl``."""


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """Upstream's backend with a tree-aware implementation; same name, metadata and cache layout."""

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        """The builder class vLLM instantiates per group of layers."""
        return TreeFlashAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """The implementation class vLLM instantiates per layer."""
        return TreeFlashAttentionImpl


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Upstream's backend with a tree-aware implementation; same name, metadata and cache layout."""

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        """The builder class vLLM instantiates per group of layers."""
        return TreeTritonAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        """The implementation class vLLM instantiates per layer."""
        return TreeTritonAttentionImpl


def _attention(implementation: str) -> Callable[..., None]:
    implementations: dict[str, Callable[..., None]] = {
        "kernel": paged_tree_attention,
        "flash_prefix": _flash_prefix_attention,
        "xformers": xformers_tree_attention,
    }
    return implementations[implementation]


def _flash_attention() -> Callable[..., Any]:
    """The FlashAttention that vLLM brings.

    Raises:
        ImportError: this build of vLLM has none.
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
    output, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask, scale, *,
    sliding_window, softcap, sinks, max_rows, **options,
) -> None:  # fmt: skip
    """The prefix by FlashAttention, whole and without a causal mask; the tree by our kernel; both merged."""
    if sliding_window > 0 or sinks is not None or options:
        raise NotImplementedError(
            'with a sliding window, sinks or a quantised KV cache "tree_attention" must be "kernel"'
        )
    prefix, prefix_lse = _flash_attention()(
        query, key_cache, value_cache, max_seqlen_q=max_rows or len(query), cu_seqlens_q=query_start_loc,
        max_seqlen_k=block_table.shape[1] * key_cache.shape[1], seqused_k=prefix_lens, softmax_scale=scale,
        causal=False, softcap=softcap, block_table=block_table, return_softmax_lse=True,
    )  # fmt: skip
    parts = query.new_empty((2, *query.shape))
    lses = query.new_empty((2, *query.shape[:2]), dtype=torch.float32)
    parts[0], lses[0] = prefix, prefix_lse.transpose(0, 1)  # FlashAttention's is [heads, rows]
    paged_tree_attention(
        parts[1], query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
        scale, softcap=softcap, include_prefix=False, lse=lses[1], max_rows=max_rows, num_splits=1,
    )  # fmt: skip
    merge_attention(output, parts, lses, end_row=query_start_loc[-1:])
