"""Attention of a row is the same bits alone, in a graph, in any part of a prompt, beside any rows, on any threads."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tree_cases import LAYOUTS, TreeCase, tree_case, tree_rows

from vllm_gsd.ops.attention.cpu import tree_attention

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [{}, {"softcap": 2.0}, {"sinks": True}, {"sliding_window": 20}, {"sliding_window": 300}]


def keys_of(case: TreeCase, request: int, row: int) -> torch.Tensor:
    """Logical indices of the keys of a row's sequence, in its order; those that its mask lacks may be any."""
    slots = [slot for slot in range(64 * case.tree_mask.shape[1]) if case.tree_mask[row, slot // 64] >> slot % 64 & 1]
    prefix = min(int(case.prefix_lens[request]), int(case.positions[row]) + 1)
    before_window = [0] * (int(case.positions[row]) + 1 - prefix - len(slots))
    return torch.tensor([*range(prefix), *before_window, *(int(case.prefix_lens[request]) + slot for slot in slots)])


def alone(case: TreeCase, request: int, row: int) -> TreeCase:
    """The row as a step without a graph has it: its path is text, in other blocks."""
    keys, size = keys_of(case, request, row), case.kv_cache.shape[2]
    blocks = -(-len(keys) // size)
    kv_cache = torch.full((blocks + 1, *case.kv_cache.shape[1:]), torch.nan, dtype=case.kv_cache.dtype)
    table = torch.arange(blocks, 0, -1).to(torch.int32)
    here = case.block_table[request, keys // size].long() * size + keys % size
    place = torch.arange(len(keys))
    there = table[place // size].long() * size + place % size
    case.layout.write(kv_cache, there, *case.layout.read(case.kv_cache, here))
    return TreeCase(
        query=case.query[row : row + 1], kv_cache=kv_cache, layout=case.layout, block_table=table[None],
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        prefix_lens=torch.tensor([len(keys)], dtype=torch.int32), positions=torch.tensor([len(keys) - 1]),
        tree_mask=torch.empty(1, 0, dtype=torch.int64), scale=case.scale, options=case.options,
    )  # fmt: skip


def window_out(case: TreeCase) -> TreeCase:
    """Take the slots that lie before a row's window out of its mask, as callers of windowed attention do."""
    window = case.options["sliding_window"]
    if window <= 0:
        return case
    start = case.query_start_loc.tolist()
    for first, end in pairwise(start):
        slot_positions = case.positions[first:end]
        for row in range(first, end):
            for slot in (slot_positions <= case.positions[row] - window).nonzero().flatten().tolist():
                case.tree_mask[row, slot // 64] &= ~(1 << slot % 64) if slot % 64 < 63 else 2**63 - 1
    return case


def check_rows_alone(case: TreeCase, rows=None) -> None:
    together = case.run(tree_attention)
    start = case.query_start_loc.tolist()
    for request, (first, end) in enumerate(pairwise(start)):
        for row in range(first, end):
            if rows is None or row in rows:
                assert torch.equal(alone(case, request, row).run(tree_attention)[0], together[row]), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_row_of_a_graph(threads, dtype, option):
    """Prefixes that end anywhere in a pair, a tile and a span; spans that end inside of graphs; several requests."""
    case = tree_case(rows=(17, 30, 1, 9, 70), prefixes=(700, 250, 31, 0, 1279), num_heads=9, kv_heads=3, dtype=dtype,
                     words=2, **option)  # fmt: skip
    before = window_out(case).run(tree_attention)
    for count in (1, 2, 7):
        threads(count)
        assert torch.equal(case.run(tree_attention), before)
    threads(1)
    check_rows_alone(case, {0, 5, 16, 17, 30, 46, 47, 48, 56, 57, 90, 126})


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 600)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 17),
    head_size=st.sampled_from([16, 20, 64, 80]),
    block_size=st.sampled_from([4, 16, 32, 128]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(sorted(LAYOUTS)),
    option=st.sampled_from(OPTIONS),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_row(threads, requests, kv_heads, group, layout, option, count, data, **drawn):
    threads(count)
    rows, prefixes = zip(*requests, strict=True)
    case = tree_case(rows=rows, prefixes=prefixes, num_heads=kv_heads * group, kv_heads=kv_heads,
                     layout=LAYOUTS[layout], **drawn, **option)  # fmt: skip
    check_rows_alone(window_out(case), data.draw(st.sets(st.integers(0, sum(rows) - 1), min_size=1, max_size=5)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_prompts_cut_anywhere(threads, dtype, option):
    case = tree_case(rows=(613,), prefixes=(90,), num_heads=6, kv_heads=2, dtype=dtype, chains=True, words=10, **option)
    case = case.as_text()
    whole = case.run(tree_attention)
    check_rows_alone(case, {0, 1, 2, 165, 166, 400, 611, 612})
    for count, size in ((1, 1), (2, 17), (2, 64), (3, 300)):
        threads(count)
        for first in range(0, 613, size):
            end = min(first + size, 613)
            if size == 1 and first % 37:
                continue
            part = TreeCase(**{**case.__dict__, "query": case.query[first:end], "positions": case.positions[first:end],
                               "tree_mask": case.tree_mask[first:end],
                               "query_start_loc": torch.tensor([0, end - first], dtype=torch.int32),
                               "prefix_lens": torch.tensor([90 + end], dtype=torch.int32)})  # fmt: skip
            assert torch.equal(part.run(tree_attention), whole[first:end])


def test_text_before_a_graph():
    """A prompt's last rows in one request with the graph behind them."""
    case = tree_case(rows=(60,), prefixes=(100,), num_heads=9, kv_heads=3, dtype=torch.bfloat16, chains=True, words=1)
    depth, mask = tree_rows(20, 1, torch.Generator().manual_seed(1))
    case.prefix_lens = torch.tensor([140], dtype=torch.int32)
    case.positions[40:] = 140 + depth
    case.tree_mask[:] = 0
    case.tree_mask[40:] = mask
    check_rows_alone(case)


@pytest.mark.parametrize("windowed", [False, True])
def test_slots_out_of_their_window(windowed):
    """Of a graph that is deeper than its window, rows are what they are as text with that window."""
    option = {"sliding_window": 8} if windowed else {}
    case = tree_case(rows=(40,), prefixes=(250,), dtype=torch.bfloat16, chains=True, words=1, **option)
    text = case.as_text().run(tree_attention)
    assert torch.equal(window_out(case).run(tree_attention), text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("chains", [True, False])
def test_slots_that_a_row_does_not_attend_may_hold_anything(dtype, bad, chains):
    """A drafted token may be one that the model makes NaN of: only the rows that attend it are NaN."""
    case = tree_case(rows=(17, 3), prefixes=(77, 40), num_heads=9, kv_heads=3, dtype=dtype, words=1, chains=chains)
    for each in (case, case.as_text()) if chains else (case,):
        clean = each.run(tree_attention)
        index = torch.tensor([77 + 9])
        block = each.block_table[0, index // 32].long()
        spoilt = TreeCase(**{**each.__dict__, "kv_cache": each.kv_cache.clone()})
        vector = torch.full((1, 3, 64), bad, dtype=dtype)
        spoilt.layout.write(spoilt.kv_cache, block * 32 + index % 32, vector, vector)
        attends = torch.zeros(20, dtype=torch.bool)
        attends[:17] = (case.tree_mask[:17, 0] >> 9 & 1).bool()
        output = spoilt.run(tree_attention)
        assert torch.equal(output[~attends], clean[~attends])
        assert not torch.isfinite(output[attends]).all() and attends.any()
