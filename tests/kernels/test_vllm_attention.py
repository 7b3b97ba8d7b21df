"""Against code nobody here wrote: vLLM's CPU cache writes and its causal attention."""

import pytest
import torch
from tree_cases import check, plain, transposed, tree_case

from vllm_gsd.ops.attention.cpu import tree_attention
from vllm_gsd.ops.kv_move.layout import KVLayout, pages_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = ["vec", "vec16", "amx"]


def writer(upstream, isa):
    """Writes rows as vLLM does; skips where its library for this processor has no layout for AMX."""

    def write(key, value, key_cache, value_cache, slots):
        try:
            upstream.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
        except RuntimeError as error:
            lacks_amx = not torch.cpu._is_avx512_bf16_supported()  # vLLM's library for such processors does
            if isa == "amx" and lacks_amx and "Unsupported CPU attention configuration" in str(error):
                pytest.skip("vLLM's library for processors without AVX512-BF16 has no layout for AMX")
            raise

    return write


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("block_size", "head_size"), [(32, 32), (32, 64), (128, 64), (128, 128), (32, 256)])
def test_probed_layout_reads_what_upstream_wrote(upstream, isa, block_size, head_size, dtype):
    write = writer(upstream, isa)
    layout = KVLayout.probe(write, block_size, head_size, dtype)
    kv_cache = torch.zeros(5, 3, block_size, 2 * head_size, dtype=dtype)
    slots = torch.randperm(5 * block_size)[:40]
    rows = torch.randn(2, 40, 3, head_size).to(dtype)
    write(rows[0], rows[1], *pages_of(kv_cache), slots)
    key, value = layout.read(kv_cache, slots)
    assert torch.equal(key, rows[0]) and torch.equal(value, rows[1])


def test_vec_is_transposed(upstream):
    probed = KVLayout.probe(writer(upstream, "vec"), 32, 64, torch.bfloat16)
    assert torch.equal(probed.tables, transposed(32, 64).tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_kernel_on_probed_layouts(upstream, isa, dtype, up_to_isa):
    """The same rows give the same output in every layout (where weights are not rounded for some of them)."""

    def probed(block_size, head_size):
        return KVLayout.probe(writer(upstream, isa), block_size, head_size, dtype)

    def case(layout):
        return tree_case(rows=(17, 3), prefixes=(130, 70), num_heads=9, kv_heads=3, dtype=dtype, layout=layout)

    check(case(probed))
    up_to_isa("avx512")
    assert torch.equal(case(probed).run(tree_attention), case(plain).run(tree_attention))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [-1, 1, 7, 40])
@pytest.mark.parametrize(("isa", "block_size"), [("vec", 32), ("vec", 128), ("vec16", 16)])
def test_chains_equal_causal_attention(upstream, isa, block_size, window, dtype):
    """A chain's mask is causal; windows reach into the prefix only, so the chain is shorter than they are."""
    rows = (1, 1) if window == 1 else (5, 7)
    case = tree_case(rows=rows, prefixes=(100, 64), num_heads=9, kv_heads=3, block_size=block_size,
                     dtype=dtype, chains=True)  # fmt: skip
    if window == 1:  # a row sees itself only
        case.query_start_loc, case.query = case.query_start_loc[:2], case.query[:1]
        case.positions, case.tree_mask = case.positions[:1], case.tree_mask[:1]
    case.options["sliding_window"] = window
    got = case.run(tree_attention)
    requests = len(case.query_start_loc) - 1
    lengths = case.prefix_lens[:requests] + case.query_start_loc.diff()
    metadata = upstream.cpu_attn_get_scheduler_metadata(
        requests, 9, 3, 64, lengths, dtype, case.query_start_loc, True, window, isa, True
    )
    expected = torch.empty_like(case.query)
    kv_cache = case.kv_cache.nan_to_num(nan=0.0)  # upstream reads whole tiles
    upstream.cpu_attention_with_kv_cache(
        case.query, *pages_of(kv_cache), expected, case.query_start_loc, lengths, case.scale, True, None,
        window, case.block_table, 0.0, metadata, None,
    )  # fmt: skip
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("option", [{"softcap": 5.0}, {"sinks": True}], ids=str)
def test_chains_equal_causal_attention_with_options(upstream, option):
    case = tree_case(rows=(5, 7), prefixes=(100, 64), num_heads=8, kv_heads=2, chains=True, **option)
    got = case.run(tree_attention)
    lengths = case.prefix_lens + case.query_start_loc.diff()
    metadata = upstream.cpu_attn_get_scheduler_metadata(
        2, 8, 2, 64, lengths, torch.float32, case.query_start_loc, True, -1, "vec", True
    )
    expected = torch.empty_like(case.query)
    upstream.cpu_attention_with_kv_cache(
        case.query, *pages_of(case.kv_cache.nan_to_num(nan=0.0)), expected, case.query_start_loc, lengths,
        case.scale, True, None, -1, case.block_table, case.options["softcap"], metadata,
        case.options.get("sinks"),
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
