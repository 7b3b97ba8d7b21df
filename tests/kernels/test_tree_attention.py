"""The tree attention kernel against its reference in float64, and the reference against first principles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import LAYOUTS, check, plain, tree_case, tree_rows

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.attention.cpu import tree_attention, tree_attention_reference
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.kv_move.layout import KVLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_batch(isa, layout, dtype):
    check(tree_case(rows=(17, 1, 70, 4), prefixes=(300, 65, 0, 1), num_heads=9, kv_heads=3, dtype=dtype,
                    layout=LAYOUTS[layout]))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 20])
def test_head_sizes(isa, head_size, dtype):
    check(tree_case(rows=(9, 3), prefixes=(70, 20), head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_sizes(isa, layout, block_size):
    if layout == "pairs" and block_size % 2:
        pytest.skip("pairs of tokens need an even block size")
    check(tree_case(rows=(17, 2), prefixes=(129, 300), block_size=block_size, head_size=32,
                    layout=LAYOUTS[layout], dtype=torch.bfloat16))  # fmt: skip


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (16, 16), (14, 2), (71, 1)], ids=str)
def test_head_counts(isa, heads):
    check(tree_case(rows=(7,), prefixes=(50,), num_heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"softcap": 30.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_and_sinks(isa, dtype, option):
    check(tree_case(rows=(5, 33), prefixes=(600, 0), dtype=dtype, **option))


@pytest.mark.parametrize("option", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_text_is_a_chain_without_masks(isa, threads, dtype, option):
    """To the last bit, in any cut of the work."""
    rows = (1, 70, 33, 300)
    case = tree_case(rows=rows, prefixes=(300, 65, 0, 1), num_heads=9, kv_heads=3, dtype=dtype, chains=True, words=5,
                     **option)  # fmt: skip
    for count in (1, 2, 7):
        threads(count)
        assert torch.equal(case.as_text().run(tree_attention), case.run(tree_attention))
    check(case.as_text())
    case.query_start_loc = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32)
    exact = [each.double().run(tree_attention_reference) for each in (case, case.as_text())]
    assert torch.equal(*exact)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 200])
def test_windows_of_text(isa, window):
    """Each row has its own: rows lie farther apart than a window reaches."""
    case = tree_case(rows=(300, 1, 70), prefixes=(90, 60, 0), chains=True, words=5).as_text()
    case.options["sliding_window"] = window
    check(case)


def test_text_before_and_beside_trees(isa):
    """A prompt's last rows with a graph behind them, beside a graph and beside text."""
    random = torch.Generator().manual_seed(1)
    case = tree_case(rows=(60, 20, 40), prefixes=(100, 30, 0), chains=True, words=1)
    depth, mask = tree_rows(20, 1, random)
    case.prefix_lens = torch.tensor([140, 30, 40], dtype=torch.int32)
    case.positions[40:60], case.positions[60:80] = 140 + depth, 30 + depth
    case.tree_mask[:] = 0
    case.tree_mask[40:60], case.tree_mask[60:80] = mask, mask
    check(case)
    exact = case.double().run(tree_attention_reference)
    chain = tree_case(rows=(60, 20, 40), prefixes=(100, 30, 0), chains=True, words=1).double()
    before = torch.cat([torch.arange(40), torch.arange(80, 120)])
    torch.testing.assert_close(exact[before], chain.run(tree_attention_reference)[before])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 200, 1000])
@pytest.mark.parametrize("block_size", [16, 128])
def test_sliding_window(isa, window, block_size):
    """Keys before the window are NaN here: their blocks may have been given away."""
    check(tree_case(rows=(17, 1, 2), prefixes=(530, 60, 2), sliding_window=window, block_size=block_size))


@pytest.mark.parametrize("rows", [(1,), (17,)], ids=str)
@pytest.mark.parametrize("option", [{}, {"sinks": True}, {"sliding_window": 900}], ids=str)
def test_long_prefix(isa, threads, rows, option):
    """Long enough for the keys to be split over tasks, with one thread and with more than the machine has."""
    case = tree_case(rows=rows, prefixes=(1500,) * len(rows), num_heads=3, kv_heads=1, **option)
    for count in (1, 2, 7):
        threads(count)
        check(case)


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([16, 32, 48, 64]),
    block_size=st.sampled_from([4, 16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(sorted(LAYOUTS)),
    sliding_window=st.sampled_from([-1, -1, 3, 30]),
    softcap=st.sampled_from([0.0, 0.0, 8.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_case(requests, kv_heads, group, layout, **options):
    rows, prefixes = zip(*requests, strict=True)
    check(tree_case(rows=rows, prefixes=prefixes, num_heads=kv_heads * group, kv_heads=kv_heads,
                    layout=LAYOUTS[layout], **options))  # fmt: skip


@pytest.mark.parametrize("op", [tree_attention, tree_attention_reference])
def test_formula(op):
    """One row, two keys, by hand."""
    layout = plain(2, 2)
    kv_cache = torch.zeros(1, 1, 2, 4)
    key, value = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]), torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]])
    layout.write(kv_cache, torch.arange(2), key, value)
    output = torch.empty(1, 1, 2)
    rows = AttendingRows(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        prefix_lens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        positions=torch.tensor([1]),
        mask=torch.tensor([[1]]),
    )
    op(output, torch.tensor([[[1.0, 1.0]]]), kv_cache, layout, rows, 0.5, sinks=torch.tensor([0.25]))
    first, second, sink = math.exp(0.5), math.exp(1.0), math.exp(0.25)
    expected = [(first * a + second * b) / (first + second + sink) for a, b in ((1, 3), (2, 5))]
    torch.testing.assert_close(output.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("op", [tree_attention, tree_attention_reference])
def test_rows_outside_of_requests_stay(op):
    case = tree_case(rows=(3, 2), prefixes=(10, 20))
    case.query_start_loc = case.query_start_loc[:2]  # the second request is padding now
    output = case.run(op)
    assert (output[3:] == 7.0).all() and (output[:3] != 7.0).all()


@pytest.mark.parametrize("op", [tree_attention, tree_attention_reference])
def test_row_that_attends_nothing_is_zero(op):
    case = tree_case(rows=(3,), prefixes=(0,))
    case.tree_mask[1] = 0
    output = case.run(op)
    assert (output[1] == 0).all() and torch.isfinite(output).all()


@pytest.mark.parametrize("option", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("place", [10, 309])
def test_rows_that_attend_bad_keys_are_nan(isa, place, bad, dtype, option):
    """As in plain attention, and even if the keys' values are numbers."""
    case = tree_case(rows=(17,), prefixes=(300,), dtype=dtype, **option)
    slot = case.block_table[0, place // 32].long()[None] * 32 + place % 32
    key, value = case.layout.read(case.kv_cache, slot)
    case.layout.write(case.kv_cache, slot, torch.full_like(key, bad), value)
    expected = case.run(tree_attention_reference).isnan()
    assert torch.equal(case.run(tree_attention).isnan(), expected) and expected.any()


def test_strided_query_and_output(isa):
    """Query as a slice of a fused projection, output as a slice of a wider buffer."""
    case = tree_case(rows=(9,), prefixes=(40,), num_heads=4, head_size=32)
    expected = case.run(tree_attention)
    fused = torch.zeros(9, 8 * 32)
    fused[:, : 4 * 32] = case.query.flatten(1)
    case.query = fused[:, : 4 * 32].view(9, 4, 32)
    output = torch.zeros(9, 6, 32)[:, :4]
    tree_attention(output, case.query, case.kv_cache, case.layout, case.rows, case.scale)
    assert torch.equal(output, expected)


def test_thread_count_and_repetition_change_nothing(threads):
    case = tree_case(rows=(17, 5), prefixes=(700, 90), num_heads=9, kv_heads=3)
    outputs = []
    for count in (1, 2, 5, 5):
        threads(count)
        outputs.append(case.run(tree_attention))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("large", [1e3, 1e18])
def test_large_scores(isa, large):
    """One key far above the rest takes all the weight, whichever span it lies in."""
    case = tree_case(rows=(3,), prefixes=(700,), num_heads=2, kv_heads=1)
    case.query *= large
    check(case)


def broken(case, **changes):
    for name, value in changes.items():
        setattr(case, name, value)
    return case


BROKEN = {
    "block table too narrow": lambda c: broken(c, block_table=c.block_table[:, :1]),
    "unknown block": lambda c: broken(c, block_table=torch.full_like(c.block_table, 99)),
    "negative block": lambda c: broken(c, block_table=torch.full_like(c.block_table, -1)),
    "cache of another dtype": lambda c: broken(c, kv_cache=c.kv_cache.bfloat16()),
    "cache of another head size": lambda c: broken(c, kv_cache=c.kv_cache[:, :, :, :64].contiguous()),
    "heads do not divide": lambda c: broken(c, query=c.query[:, :3]),
    "too few rows": lambda c: broken(c, query=c.query[:4]),
    "too few positions": lambda c: broken(c, positions=c.positions[:4]),
    "too few masks": lambda c: broken(c, tree_mask=c.tree_mask[:4]),
    "int32 mask": lambda c: broken(c, tree_mask=c.tree_mask.int()),
    "int64 prefix": lambda c: broken(c, prefix_lens=c.prefix_lens.long()),
    "too few prefixes": lambda c: broken(c, prefix_lens=c.prefix_lens[:0]),
    "another layout": lambda c: broken(c, layout=plain(16, 64)),
}


@pytest.mark.parametrize("op", [tree_attention, tree_attention_reference])
@pytest.mark.parametrize("what", BROKEN)
def test_refuses(op, what):
    with pytest.raises(ValueError, match=r"block|dtype|head|rows|row for each|int64|layout|prefix"):
        BROKEN[what](tree_case(rows=(5,), prefixes=(40,))).run(op)


@pytest.mark.skipif(not HAVE_EXTENSION, reason="the compiled kernels are not built")
def test_kernel_refuses_strange_dtypes_and_layouts():
    with pytest.raises(ValueError, match="float32, bfloat16 and float16"):
        tree_case().double().run(tree_attention)
    layout = plain(32, 64)
    wild = KVLayout(layout.key_token + 1, layout.key_dim, layout.value_token, layout.value_dim)
    with pytest.raises(ValueError, match="outside of its page"):
        broken(tree_case(layout=plain), layout=wild).run(tree_attention)


@pytest.mark.skipif(not HAVE_EXTENSION, reason="the compiled kernels are not built")
@pytest.mark.parametrize("starts", [[0, 1 << 30, 5], [0, 6, 5], [-1, 2, 5]], ids=str)
def test_kernel_refuses_rows_that_no_request_has(starts):
    case = tree_case(rows=(3, 2), prefixes=(40, 40))
    with pytest.raises(ValueError, match="query_start_loc must not decrease"):
        broken(case, query_start_loc=torch.tensor(starts, dtype=torch.int32)).run(tree_attention)
