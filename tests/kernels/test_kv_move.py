"""Moving and writing cache slots: equal to gather and scatter, whatever overlaps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import LAYOUTS, plain, random_separable, transposed

from vllm_gsd.ops.kv_move.cpu import move_kv, move_kv_reference, write_kv

OPS = [move_kv, move_kv_reference]


def caches(count, block_size=16, head_size=32, dtype=torch.float32, blocks=5, kv_heads=3):
    return [torch.randn(blocks, kv_heads, block_size, 2 * head_size).to(dtype) for _ in range(count)]


@settings(deadline=None, max_examples=30)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([4, 16, 32]),
    head_size=st.sampled_from([16, 80]),
    layers=st.integers(1, 2),
    moved=st.integers(0, 20),
    seed=st.integers(0, 2**31),
)
def test_equals_gather_and_scatter(layout, dtype, block_size, head_size, layers, moved, seed):
    torch.manual_seed(seed)
    layout = LAYOUTS[layout](block_size, head_size)
    given = caches(layers, block_size, head_size, dtype)
    src = torch.randint(5 * block_size, (moved,))
    dst = torch.randperm(5 * block_size)[:moved]
    every = torch.arange(5 * block_size)
    expected = []
    for kv_cache in given:
        rows = [part.clone() for part in layout.read(kv_cache, every)]
        for part in rows:
            part[dst] = part[src]
        expected.append(rows)
    for op in OPS:
        moved_caches = [kv_cache.clone() for kv_cache in given]
        op(moved_caches, layout, src, dst)
        for kv_cache, rows in zip(moved_caches, expected, strict=True):
            assert all(map(torch.equal, layout.read(kv_cache, every), rows))


@pytest.mark.parametrize("op", OPS)
def test_swap(op):
    """Every read comes before every write."""
    layout = transposed(16, 32)
    kv_cache = caches(1)[0]
    before = layout.read(kv_cache, torch.tensor([7, 40]))
    op([kv_cache], layout, torch.tensor([7, 40]), torch.tensor([40, 7]))
    after = layout.read(kv_cache, torch.tensor([40, 7]))
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("op", OPS)
def test_one_layout_per_cache(op):
    """Layers may differ in everything but the slots."""
    layouts = [transposed(16, 32), random_separable(16, 64), plain(16, 16)]
    cases = list(zip(layouts, (1, 2, 4), strict=True))
    given = [caches(1, head_size=layout.head_size, kv_heads=heads)[0] for layout, heads in cases]
    src, dst = torch.tensor([3, 20]), torch.tensor([70, 3])
    before = [layout.read(kv_cache, src) for layout, kv_cache in zip(layouts, given, strict=True)]
    op(given, layouts, src, dst)
    for layout, kv_cache, rows in zip(layouts, given, before, strict=True):
        assert all(map(torch.equal, layout.read(kv_cache, dst), rows))


def test_many_layers_in_parallel():
    layout = transposed(32, 64)
    given = caches(12, 32, 64, torch.bfloat16)
    expected = [kv_cache.clone() for kv_cache in given]
    src, dst = torch.arange(60, 90), torch.arange(50, 80)
    move_kv(given, layout, src, dst)
    move_kv_reference(expected, layout, src, dst)
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_move(op):
    none = torch.empty(0, dtype=torch.int64)
    given = caches(2)
    before = [kv_cache.clone() for kv_cache in given]
    op(given, plain(16, 32), none, none)
    op([], plain(16, 32), torch.tensor([1]), torch.tensor([2]))
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("src", "dst"), [([80], [0]), ([0], [80]), ([-1], [0]), ([0], [-1]), ([0, 1], [2]), ([[0]], [[1]])], ids=str
)
def test_refuses_slots(op, src, dst):
    with pytest.raises(ValueError, match="slot"):
        op(caches(2), plain(16, 32), torch.tensor(src), torch.tensor(dst))


@pytest.mark.parametrize("op", OPS)
def test_refuses_layouts_and_dtypes(op):
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="layouts"):
        op(caches(3), [plain(16, 32)] * 2, one, one)
    with pytest.raises(ValueError, match="layout"):
        op(caches(1), plain(32, 32), one, one)
    with pytest.raises(ValueError, match="int64"):
        op(caches(1), plain(16, 32), one.int(), one.int())


@settings(deadline=None, max_examples=40)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([4, 16, 32]),
    head_size=st.sampled_from([16, 80]),
    count=st.sampled_from([0, 1, 9, 63, 64, 65, 200]),
    compiled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_written_rows_are_read_back(layout, dtype, block_size, head_size, count, compiled, seed):
    """All others stay, rows without a slot are not stored, and the slots may be more than the rows."""
    torch.manual_seed(seed)
    layout = LAYOUTS[layout](block_size, head_size)
    kv_cache = caches(1, block_size, head_size, dtype, blocks=60)[0]
    projected = torch.randn(count, 3, 3, head_size).to(dtype)
    key, value = projected[:, 1], projected.transpose(1, 2)[:, :, 2]  # other strides of rows and heads
    slots = torch.randperm(60 * block_size)[: count + 2]
    slots[torch.rand(len(slots)) < 0.1] = -1
    every, stored = torch.arange(60 * block_size), slots[:count] >= 0
    expected = [part.clone() for part in layout.read(kv_cache, every)]
    for part, rows in zip(expected, (key, value), strict=True):
        part[slots[:count][stored]] = rows[stored]
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr("vllm_gsd.ops.kv_move.cpu.use_kernel", lambda tensor: False)
        write_kv(kv_cache, layout, key, value, slots)
    assert all(map(torch.equal, layout.read(kv_cache, every), expected))


def test_refuses_rows():
    kv_cache, rows, slots = caches(1)[0], torch.randn(2, 3, 32), torch.tensor([0, 79])
    for key, value, error in [
        (rows, rows[:1], "key and value"),
        (rows[:, :2], rows, "key and value"),
        (rows, rows[..., :16], "key and value"),
        (rows.half(), rows.half(), "dtype"),
        (rows, rows.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=error):
            write_kv(kv_cache, plain(16, 32), key, value, slots)
    for few_or_wrong in (slots[:1], torch.tensor([0, 80]), slots.int()):
        with pytest.raises(ValueError, match="slot"):
            write_kv(kv_cache, plain(16, 32), rows, rows, few_or_wrong)
