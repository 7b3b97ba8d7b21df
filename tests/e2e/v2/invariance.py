"""Runs an engine in vLLM's batch-invariant mode and records how its rows are attended."""

import os

CALLS: list[tuple[bool, int]] = []  # of our kernel: whether by row, and the number of rows
LEFT: list[int] = []  # the most rows of a request in each call of vLLM's kernel


def be_batch_invariant() -> None:
    """Set the mode before vLLM is configured."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


def record_calls(llm) -> None:
    """Record the calls of both kernels from now on."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from vllm_gsd.engine.attention import cuda

    kernel, upstream = cuda.paged_tree_attention, TritonAttentionImpl.forward

    def ours(output, query, *args, by_row=False, **options):
        CALLS.append((by_row, len(query)))
        kernel(output, query, *args, by_row=by_row, **options)

    def theirs(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        if attn_metadata is not None:
            LEFT.append(int(attn_metadata.query_start_loc.diff().max()))
        return upstream(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    cuda.paged_tree_attention = ours
    TritonAttentionImpl.forward = theirs


def take_calls(llm) -> tuple[list[tuple[bool, int]], list[int]]:
    """The calls since the last time."""
    taken = CALLS[:], LEFT[:]
    CALLS.clear()
    LEFT.clear()
    return taken
