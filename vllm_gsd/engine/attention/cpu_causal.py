"""A CPU attention backend for engines without speculation, with our kernel where it is faster than vLLM's."""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_gsd.engine.attention.cpu import TreeCPUAttentionBackend, TreeCPUAttentionMetadataBuilder
from vllm_gsd.engine.attention.tree_rows import TreeRows, TreeRowsOnly, causal_rows, serves_chains
from vllm_gsd.upstream import wire

# Replaces upstream's backend while the layers are built.
BACKENDS = {AttentionBackendEnum.CPU_ATTN: f"{__name__}.CausalCPUAttentionBackend"}


class CausalCPUAttentionMetadataBuilder(TreeCPUAttentionMetadataBuilder):
    """Leaves other data types than bfloat16 and single rows to upstream's kernel, where ours is no faster."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # With a sliding-window specification vLLM frees the blocks behind the window.
        whole = type(kv_cache_spec) is FullAttentionSpec
        self.ours = whole and serves_chains(vllm_config, device, vllm_config.model_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> Any:
        common = common_attn_metadata
        if not self.ours or common.causal is not True or common.num_actual_tokens == 1:
            return super().build(common_prefix_len, common, *args, **kwargs)
        metadata = TreeRowsOnly()
        wire.attach(metadata, wire.TREE_ROWS, rows_of(common))
        return metadata


class CausalCPUAttentionBackend(TreeCPUAttentionBackend):
    """Its metadata builder attaches the rows for our kernel, so it works with any model runner."""

    builder = CausalCPUAttentionMetadataBuilder


def rows_of(common: CommonAttentionMetadata) -> TreeRows:
    """Describe all rows of a batch as rows of text."""
    count = common.num_reqs
    starts, seq_lens = common.query_start_loc[: count + 1], common.seq_lens[:count]
    # A request's last row is the last of its text.
    ends = (seq_lens - starts[1:]).repeat_interleave(starts[1:] - starts[:-1])
    positions = torch.arange(common.num_actual_tokens) + ends
    return causal_rows(starts, seq_lens, common.block_table_tensor[:count], positions)
