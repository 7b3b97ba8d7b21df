"""Compaction of paged caches: equal to gather and scatter, whatever overlaps."""

import pytest
import torch
from paged_cases import E4M3
from references.kv_move import move_paged_kv_reference

from vllm_gsd.ops.kv_move.paged import PagedCaches, move_paged_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16, E4M3]


def caches(layers, device, dtype=torch.float32, kv_heads=2, head_size=16, block_size=16, physical="nhd", blocks=6):
    order = (blocks, block_size, kv_heads, 2 * head_size)
    given = [torch.randn(order).to(dtype).to(device) for _ in range(layers)]
    if physical == "nhd":
        return [cache.transpose(1, 2) for cache in given]
    return [cache.transpose(1, 2).contiguous() for cache in given]


def raw(cache):
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def expected(kv_caches, src, dst):
    """Gather, then scatter."""
    moves = (src >= 0) & (dst >= 0)
    results = []
    for cache in kv_caches:
        size = cache.shape[2]
        rows = raw(cache).transpose(1, 2).clone()
        rows[dst[moves] // size, dst[moves] % size] = rows[src[moves] // size, src[moves] % size]
        results.append(rows.transpose(1, 2))
    return results


def check(given, src, dst):
    want = expected(given, src, dst)
    for op in (move_paged_kv, move_paged_kv_reference):
        moved = [cache.clone(memory_format=torch.preserve_format) for cache in given]
        op(PagedCaches(moved), src, dst)
        for cache, rows in zip(moved, want, strict=True):
            assert torch.equal(raw(cache), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("physical", ["nhd", "hnd"])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 80, 5), (2, 128, 32)], ids=str)
def test_equals_gather_and_scatter(device, large, physical, dtype, shape):
    kv_heads, head_size, block_size = shape
    given = caches(2 * large, device, dtype, kv_heads, head_size, block_size, physical)
    torch.manual_seed(0)
    # Two requests with slots of their own, padded; sources and destinations overlap within each.
    slots = torch.randperm(6 * block_size)
    src, dst = torch.full((2, 7), -1), torch.full((2, 7), -1)
    for request in range(2):
        own = slots[request * 12 : request * 12 + 12]
        src[request, :6] = own[torch.randperm(12)[:6]]
        dst[request, :6] = own[torch.randperm(12)[:6]]
    check(given, src.to(device), dst.to(device))


def test_swap_and_shift(device):
    """Every read comes before every write."""
    given = caches(3, device)
    check(given, torch.tensor([[7, 40]], device=device), torch.tensor([[40, 7]], device=device))
    shift = torch.arange(20, 53, device=device).view(1, 33)
    check(given, shift, shift - 1)
    check(given, shift, shift + 1)


def test_many_moves(device):
    given = caches(1, device, kv_heads=1)
    check(given, torch.randperm(96, device=device).view(1, 96), torch.randperm(96, device=device).view(1, 96))


def test_nothing_to_move(device):
    given = caches(2, device)
    check(given, torch.full((3, 4), -1, device=device), torch.zeros(3, 4, dtype=torch.int64, device=device))
    check(
        given, torch.empty(0, 4, dtype=torch.int64, device=device), torch.empty(0, 4, dtype=torch.int64, device=device)
    )


def test_refuses(device):
    given = caches(2, device)
    slots = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="no KV caches"):
        PagedCaches([])
    with pytest.raises(ValueError, match="1, 2 or 4 bytes"):
        PagedCaches([given[0].double()])
    with pytest.raises(ValueError, match="alike"):
        PagedCaches([given[0], given[1][:3]])
    with pytest.raises(ValueError, match="stride 1"):
        PagedCaches([given[0].transpose(2, 3)])
    with pytest.raises(ValueError, match="int64"):
        move_paged_kv(PagedCaches(given), slots.int(), slots)
    with pytest.raises(ValueError, match="one shape"):
        move_paged_kv(PagedCaches(given), slots, slots[:, :1])
    with pytest.raises(ValueError, match="at most 512"):
        move_paged_kv(PagedCaches(given), slots.repeat(1, 300), slots.repeat(1, 300))
    with pytest.raises(ValueError, match="a slot is not below the 96"):
        move_paged_kv_reference(PagedCaches(given), slots + 96, slots)
