"""The walk and the masks on the device: equal to the plain code, and to what the host does in ``core``."""

import itertools

import pytest
import torch
from paged_cases import depths_and_mask, random_parents
from references.masks import tree_masks_reference
from references.walk import accept_walk_reference

from vllm_gsd.ops.attention.masks import tree_masks
from vllm_gsd.ops.walk.api import accept_walk


def trees(seed, device, most=40, vocabulary=3):
    """Rows of some random trees; few tokens, so that siblings carry the same one and walks go deep."""
    random = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(most + 1, (), generator=random)) for _ in range(1 + seed % 4)]
    parents = [parent for size in sizes if size for parent in random_parents(size, random)]
    rows = len(parents) + 3  # rows of no tree behind the last

    def draw(high, count=rows):
        return torch.randint(high, (count,), generator=random).to(device)

    starts = torch.tensor([0, *sizes]).cumsum(0).int().to(device)
    padded = torch.tensor([*parents, -1, 0, 5], dtype=torch.int32, device=device)
    return draw(vocabulary), padded, draw(vocabulary), starts, torch.randperm(rows, generator=random).to(device)


def same(got, want):
    for name, ours, theirs in zip(got._fields, got, want, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name


@pytest.mark.parametrize("max_depth", [0, 1, 6, 32])
@pytest.mark.parametrize("seed", range(8))
def test_walk(device, seed, max_depth):
    tokens, parents, sampled, starts, slots = trees(seed, device)
    for moves in (None, slots):
        arguments = (tokens, parents, sampled, starts, max_depth, moves)
        same(accept_walk(*arguments), accept_walk_reference(*arguments))
        same(accept_walk(*arguments, max_nodes=40), accept_walk_reference(*arguments))


@pytest.mark.parametrize("seed", range(8))
def test_walk_equals_the_host(device, seed):
    """``method.verify.step_into``."""
    import numpy

    from vllm_gsd.method import verify

    tokens, parents, sampled, starts, _ = trees(seed, device)
    token, parent, drawn, start = (t.cpu().numpy() for t in (tokens, parents, sampled, starts))
    count = len(start) - 1
    places, active = numpy.zeros(count, numpy.int32), start[1:] > start[:-1]
    emitted = [[] for _ in range(count)]
    while active.any():
        here = numpy.where(active, drawn[numpy.minimum(start[:-1] + places, len(drawn) - 1)], -1)
        for tree in numpy.flatnonzero(active):
            emitted[tree].append(int(here[tree]))
        verify.step_into(token, parent, start, places, here, active)
    accepted = accept_walk(tokens, parents, sampled, starts, 40)
    for tree in range(count):
        path, place = [], int(places[tree])
        while place > 0:
            path.insert(0, place)
            place = int(parent[start[tree] + place])
        assert accepted.path[tree].tolist() == path + [-1] * (40 - len(path))
        assert accepted.length[tree] == len(path)
        assert accepted.tokens[tree].tolist() == emitted[tree] + [-1] * (41 - len(emitted[tree]))
        assert accepted.bonus[tree] == (emitted[tree][-1] if emitted[tree] else -1)


def test_walk_by_hand(device):
    """Root 0 has children 1 (token 5) and 2 (token 6); 2 has child 3 (token 7)."""

    def row(*values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    accepted = accept_walk(
        row(9, 5, 6, 7), row(-1, 0, 0, 2, dtype=torch.int32), row(6, 0, 7, 8), row(0, 4, dtype=torch.int32), 3,
        slots=row(100, 101, 102, 103),
    )  # fmt: skip
    assert accepted.path.tolist() == [[2, 3, -1]] and accepted.length.tolist() == [2]
    assert accepted.tokens.tolist() == [[6, 7, 8, -1]] and accepted.bonus.tolist() == [8]
    assert accepted.src_slots.tolist() == [[102, 103, -1]] and accepted.dst_slots.tolist() == [[101, 102, -1]]


def test_walk_refuses(device):
    tokens, parents, sampled, starts, _ = trees(1, device)
    for arguments, message in (
        ((tokens.int(), parents, sampled, starts, 3), "tokens is int32"),
        ((tokens, parents.long(), sampled, starts, 3), "parents is int64"),
        ((tokens, parents, sampled[:2], starts, 3), "sampled has 2 rows"),
        ((tokens, parents, sampled, starts.long(), 3), "starts is int64"),
        ((tokens, parents, sampled, starts, -1), "max_depth is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            accept_walk(*arguments)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [20, 150])
def test_masks(device, seed, most):
    _, parents, _, starts, _ = trees(seed, device, most)
    prefixes = torch.arange(100, 100 + len(starts) - 1, dtype=torch.int32, device=device)
    got = tree_masks(parents, starts, prefixes, 150, 150)
    same(got, tree_masks_reference(parents, starts, prefixes, 150, 150))
    bounds = starts.tolist()
    for tree, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first < end:
            depth, mask = depths_and_mask(parents[first:end].tolist(), 3)
            assert torch.equal(got.mask[first:end].cpu(), mask)
            assert torch.equal(got.positions[first:end].cpu(), depth + 100 + tree)
    assert (got.mask[bounds[-1] :] == 0).all()


def test_masks_refuse(device):
    _, parents, _, starts, _ = trees(1, device)
    prefixes = torch.zeros(len(starts), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="no bits for 65"):
        tree_masks(parents, starts, prefixes, 3, 65, words=1)
    with pytest.raises(ValueError, match="max_nodes 0"):
        tree_masks(parents, starts, prefixes, 3, 0)
    with pytest.raises(ValueError, match="parents is int64"):
        tree_masks(parents.long(), starts, prefixes, 3, 10)


def test_step_without_the_host(device):
    """Masks, attention, sampling by argmax, walk and compaction: the cache ends as if the path had been decoded."""
    from paged_cases import paged_case

    from vllm_gsd.ops.kv_move.paged import PagedCaches, move_paged_kv

    case = paged_case(rows=(9, 6), prefixes=(20, 3), head_size=16, seed=5)
    random = torch.Generator().manual_seed(1)
    parents = torch.tensor([*random_parents(9, random), *random_parents(6, random)], dtype=torch.int32)
    tokens, sampled = (torch.randint(2, (15,), generator=random) for _ in range(2))
    block, offset = [], []
    for request, count in enumerate((9, 6)):
        index = case.prefix_lens[request] + torch.arange(count)
        block.append(case.block_table[request, index // 16])
        offset.append(index % 16)
    slots = torch.cat(block).long() * 16 + torch.cat(offset)
    case = case.to(device)
    moved = [tensor.to(device) for tensor in (tokens, parents, sampled, slots)]
    masks = tree_masks(moved[1], case.query_start_loc, case.prefix_lens, 9, 9)
    case.tree_mask, case.positions = masks.mask, masks.positions
    case.check()
    accepted = accept_walk(*moved[:3], case.query_start_loc, 9, moved[3])
    kv_cache = torch.cat([case.key_cache, case.value_cache], -1).transpose(1, 2)
    before = kv_cache.transpose(1, 2).flatten(0, 1).clone()
    move_paged_kv(PagedCaches([kv_cache]), accepted.src_slots, accepted.dst_slots)
    after = kv_cache.transpose(1, 2).flatten(0, 1)
    assert accepted.length.sum() > 2
    for request, first in enumerate(case.query_start_loc.tolist()[:-1]):
        for depth in range(int(accepted.length[request])):
            place = first + int(accepted.path[request, depth])
            assert torch.equal(after[moved[3][first + depth + 1]], before[moved[3][place]])
