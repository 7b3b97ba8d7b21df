"""Tree attention over the paged cache: every option, any shape, against the reference in float64."""

from dataclasses import replace

import pytest
import torch
from paged_cases import E4M3, E5M2, PagedCase, paged_case
from references.paged import paged_tree_attention_reference

from vllm_gsd.ops.attention.merge import merge_attention
from vllm_gsd.ops.attention.paged import TreeTiles, paged_tree_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("physical", ["nhd", "hnd"])
def test_ragged_batch(device, large, physical, dtype):
    paged_case(rows=(17, 1, 0, 4), prefixes=(90 * large, 33, 50, 0), num_heads=6, kv_heads=2, dtype=dtype,
               physical=physical, device=device).check()  # fmt: skip


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(device, head_size, dtype):
    paged_case(rows=(9,), prefixes=(40,), head_size=head_size, dtype=dtype, device=device).check()


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_cache(device, kv_dtype, scales, dtype):
    paged_case(rows=(7, 3), prefixes=(70, 20), dtype=dtype, kv_dtype=kv_dtype, scales=scales, device=device).check()


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (9, 3), (8, 1), (14, 2), (71, 1)], ids=str)
def test_head_counts(device, heads):
    paged_case(rows=(5,), prefixes=(30,), num_heads=heads[0], kv_heads=heads[1], head_size=16, device=device).check()


@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 64, 256])
def test_block_sizes(device, block_size):
    paged_case(rows=(6, 2), prefixes=(70, 130), block_size=block_size, head_size=32, device=device).check()


@pytest.mark.parametrize("rows", [63, 64, 65, 130, 257])
def test_many_nodes(device, rows):
    """Masks of several words, several tiles of rows; 257 is the most that a gsd config allows."""
    paged_case(rows=(rows,), prefixes=(20,), num_heads=2, kv_heads=1, head_size=16, device=device).check()


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"softcap": 30.0}, {"sinks": True}, {"scales": True}], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_options(device, large, option, num_splits):
    paged_case(rows=(5, 20), prefixes=(100 * large, 0), num_splits=num_splits, device=device, **option).check()


@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 1000])
def test_sliding_window(device, window):
    """Keys that have left the window are NaN here."""
    for num_splits in (1, 2):
        paged_case(rows=(20, 1, 3), prefixes=(60, 35, 2), sliding_window=window, head_size=16,
                   num_splits=num_splits, device=device).check()  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 2, 5, 32])
def test_splits_of_a_long_prefix(device, large, num_splits):
    """Also more spans than there are tiles of keys."""
    paged_case(rows=(4, 9), prefixes=(300 * large, 10), num_heads=2, kv_heads=1, head_size=16, num_splits=num_splits,
               sinks=True, device=device).check()  # fmt: skip


@pytest.mark.parametrize("tiles", [TreeTiles(16, 16), TreeTiles(16, 64), TreeTiles(64, 32, warps=8)], ids=str)
@pytest.mark.parametrize("max_rows", [None, 23])
def test_tiles_and_bounds_change_nothing(device, tiles, max_rows):
    paged_case(rows=(23, 5), prefixes=(50, 60), num_heads=4, kv_heads=1, head_size=32, tiles=tiles, max_rows=max_rows,
               device=device).check()  # fmt: skip


def random_case(seed: int, device, large: int) -> PagedCase:
    """Any combination of options."""
    random = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    def upto(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=random))

    requests = pick(1, 2, 2, 3)
    kv_heads = pick(1, 1, 1, 2)
    dtype = pick(*DTYPES)
    rows = [pick(upto(6), upto(6), upto(6), upto(20), upto(70)) for _ in range(requests)]
    return paged_case(
        rows=rows,
        prefixes=[pick(0, upto(20), upto(40 * large), upto(80 * large)) for _ in range(requests)],
        num_heads=kv_heads * pick(1, 2, 3, 5),
        kv_heads=kv_heads,
        head_size=pick(16, 24, 64, 80, 96, 128, 256),
        block_size=pick(1, 16, 16, 32, 48),
        dtype=dtype,
        kv_dtype=pick(None, None, E4M3, E5M2),
        physical=pick("nhd", "hnd"),
        sliding_window=pick(-1, -1, 0, 1 + upto(8), 1 + upto(60)),
        softcap=pick(0.0, 0.0, 8.0),
        sinks=pick(False, True),
        scales=pick(False, True),
        words=pick(None, 2, 3),
        num_splits=pick(None, None, 1, 2, 3),
        max_rows=pick(None, max(1, *rows)),
        seed=seed,
        device=device,
    )


CASES = 500 if torch.cuda.is_available() else 240  # the interpreter is slow


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, CASES, 20)], ids=str)
def test_any_case(device, large, seeds):
    """Random shapes, trees and block tables."""
    for seed in seeds:
        try:
            random_case(seed, device, large).check()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_rows_outside_of_requests_stay(device):
    case = paged_case(rows=(3, 2), prefixes=(10, 20), device=device)
    case.query_start_loc = case.query_start_loc[:2].contiguous()  # the second request is padding now
    for case.launch in ({"num_splits": 1}, {"num_splits": 3}):
        output, lse = case.run()
        assert (output[3:] == 7.0).all() and (lse[3:] == 7.0).all() and (output[:3] != 7.0).all()


def test_padding_requests(device):
    """As a captured graph has them: requests without rows, whose block table and prefix may be anything."""
    case = paged_case(rows=(3, 4, 0, 0), prefixes=(30, 20, 0, 0), device=device)
    case.prefix_lens[2:] = 1 << 30
    case.block_table[2:] = -5
    output, _ = case.run()
    kept = paged_case(rows=(3, 4), prefixes=(30, 20), device=device)
    kept.query, kept.key_cache, kept.value_cache = case.query, case.key_cache, case.value_cache
    kept.block_table, kept.tree_mask = case.block_table[:2], case.tree_mask
    assert torch.equal(output, kept.run()[0])


def test_row_that_attends_nothing_is_zero(device):
    case = paged_case(rows=(3,), prefixes=(0,), device=device)
    case.tree_mask[1] = 0
    for case.launch in ({"num_splits": 1}, {"num_splits": 2}):
        output, lse = case.run()
        assert (output[1] == 0).all() and torch.isfinite(output).all() and (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_that_holds_nan_spoils_only_the_rows_that_attend_it(device, dtype, bad):
    """A drafted token may be one that the model makes NaN of."""
    case = paged_case(rows=(17, 3), prefixes=(37, 20), head_size=16, dtype=dtype, device=device)
    clean, _ = case.run()
    place, block_size = 37 + 9, case.key_cache.shape[1]
    for cache in (case.key_cache, case.value_cache):
        cache[case.block_table[0, place // block_size], place % block_size] = bad
    attends = torch.zeros(20, dtype=torch.bool, device=device)
    attends[:17] = (case.tree_mask[:17, 0] >> 9 & 1).bool()
    output, _ = case.run()
    assert torch.equal(output[~attends], clean[~attends])
    assert not torch.isfinite(output[attends]).all() and attends.any()


def test_large_scores(device):
    """One key far above the rest takes all the weight, whichever span it lies in."""
    case = paged_case(rows=(3,), prefixes=(130,), num_heads=2, kv_heads=1, head_size=16, num_splits=3, device=device)
    case.query *= 100
    case.check()


def test_strided_query_and_output(device):
    """Query as a slice of a fused projection, output as a slice of a wider buffer."""
    case = paged_case(rows=(9,), prefixes=(40,), head_size=32, device=device)
    expected, _ = case.run()
    fused = torch.zeros(9, 8 * 32, device=device)
    fused[:, : 4 * 32] = case.query.flatten(1)
    case.query = fused[:, : 4 * 32].view(9, 4, 32)
    output = torch.zeros(9, 6, 32, device=device)[:, :4]
    paged_tree_attention(output, *case.inputs)
    assert torch.equal(output, expected)


def test_prefix_and_tree_merged_are_both_together(device):
    """The prefix by any kernel that returns its log-sum-exp, the tree by ours."""
    case = paged_case(rows=(12, 3), prefixes=(70, 9), device=device)
    whole, whole_lse = case.exact()
    tree, tree_lse = case.run()  # overwritten below
    paged_tree_attention(tree, *case.inputs, lse=tree_lse, include_prefix=False)
    blind = replace(case, tree_mask=torch.zeros_like(case.tree_mask))
    prefix, prefix_lse = torch.empty_like(tree), torch.empty_like(tree_lse)
    paged_tree_attention(prefix, *blind.inputs, lse=prefix_lse)
    output, lse = torch.empty_like(tree), torch.empty_like(tree_lse)
    merge_attention(output, torch.stack([prefix, tree]), torch.stack([prefix_lse, tree_lse]), lse)
    torch.testing.assert_close(output.double(), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), whole_lse, rtol=1e-5, atol=1e-5)


def test_no_rows(device):
    case = paged_case(rows=(0, 0), prefixes=(5, 0), device=device)
    assert case.run()[0].shape == (0, 4, 64)


def changed(case, **changes):
    for name, value in changes.items():
        if name in case.options or not hasattr(case, name):
            case.options[name] = value
        else:
            setattr(case, name, value)
    return case


BROKEN = {
    "query is float64": lambda c: changed(c, query=c.query.double()),
    "key_cache is": lambda c: changed(c, key_cache=c.key_cache.bfloat16()),
    "one shape and dtype": lambda c: changed(c, value_cache=c.value_cache[:, :, :1]),
    "head_size is": lambda c: changed(c, query=c.query[:, :, :32]),
    "cannot share": lambda c: changed(c, query=c.query[:, :3]),
    "positions has": lambda c: changed(c, positions=c.positions[:4]),
    "tree_mask is int32": lambda c: changed(c, tree_mask=c.tree_mask.int()),
    "prefix_lens is int64": lambda c: changed(c, prefix_lens=c.prefix_lens.long()),
    "prefix_lens has": lambda c: changed(c, prefix_lens=c.prefix_lens[:0]),
    "block_table has shape": lambda c: changed(c, block_table=c.block_table[0]),
    "stride": lambda c: changed(c, key_cache=c.key_cache.transpose(2, 3), value_cache=c.value_cache.transpose(2, 3)),
    "sinks has": lambda c: changed(c, sinks=torch.zeros(3, device=c.query.device)),
    "k_scale has": lambda c: changed(c, k_scale=torch.zeros(3, device=c.query.device)),
    "num_splits is": lambda c: changed(c, launch={"num_splits": 33}),
    "tiles are": lambda c: changed(c, launch={"tiles": TreeTiles(24, 64)}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_refuses(device, message):
    case = BROKEN[message](paged_case(rows=(5,), prefixes=(40,), device=device))
    with pytest.raises(ValueError, match=message):
        case.run()


@pytest.mark.parametrize("block", [99, -1])
def test_reference_refuses_unknown_blocks(device, block):
    case = paged_case(device=device)
    case.block_table[:] = block
    with pytest.raises(ValueError, match="does not exist"):
        case.exact()
    case.block_table = case.block_table[:, :1]
    with pytest.raises(ValueError, match="no blocks for"):
        paged_tree_attention_reference(torch.empty_like(case.query), *case.inputs)


OPTIONS = [{}, {"softcap": 2.0}, {"sinks": True}, {"scales": True}, {"sliding_window": 40}]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_row(device, large, option, dtype):
    paged_case(rows=(17, 1, 0, 4), prefixes=(90 * large, 33, 50, 0), num_heads=6, kv_heads=2, head_size=32, dtype=dtype,
               by_row=True, device=device, **option).check()  # fmt: skip


@pytest.mark.parametrize("heads", [(71, 1), (3, 3)], ids=str)
def test_many_nodes_by_row(device, heads):
    paged_case(rows=(130,), prefixes=(20,), num_heads=heads[0], kv_heads=heads[1], head_size=16, by_row=True,
               device=device).check()  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone(device, large, option, dtype):
    """As a step without a graph has it: its path is text, in other blocks, beside no other rows."""
    case = paged_case(rows=(5, 70, 2), prefixes=(50, 61 * large, 0), head_size=32, dtype=dtype, by_row=True,
                      device=device, **option)  # fmt: skip
    together, lse = case.run()
    for request, row in (0, 0), (0, 4), (1, 5), (1, 40), (1, 74), (2, 76):
        output, own_lse = alone(case, request, row).run()
        assert torch.equal(output[0], together[row]) and torch.equal(own_lse[0], lse[row])


def alone(case: PagedCase, request: int, row: int) -> PagedCase:
    """The row behind its path, whose last key is a tree of one node."""
    prefix, size = int(case.prefix_lens[request]), case.key_cache.shape[1]
    mask = case.tree_mask[row].tolist()
    path = [prefix + 64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1]
    keys = torch.tensor([*range(prefix), *path], device=case.query.device)
    block = case.block_table[request, keys // size].long()
    count = -(-len(keys) // size)
    caches = []
    for cache in (case.key_cache, case.value_cache):
        own = torch.full((count, *cache.shape[1:]), torch.nan, device=cache.device).to(cache.dtype)
        place = torch.arange(len(keys), device=cache.device)
        own[count - 1 - place // size, place % size] = cache[block, keys % size]
        caches.append(own)
    like = {"dtype": torch.int32, "device": case.query.device}
    return replace(
        case, query=case.query[row : row + 1], key_cache=caches[0], value_cache=caches[1],
        block_table=torch.arange(count, **like).flip(0)[None], query_start_loc=torch.tensor([0, 1], **like),
        prefix_lens=torch.tensor([len(keys) - 1], **like), positions=case.positions[row : row + 1],
        tree_mask=torch.ones_like(case.tree_mask[:1, :1]),
    )  # fmt: skip
