"""The walk on the device: equal to the plain code, and to what the host does in ``method``."""

import numpy
import pytest
import torch
from paged_cases import paged_case
from references.walk import accept_walk_reference
from tree_batches import tree_batch

from vllm_gsd.method import verify
from vllm_gsd.ops.flatten.api import DeviceTrees
from vllm_gsd.ops.kv_move.paged import PagedCaches, move_paged_kv
from vllm_gsd.ops.lay_out.api import lay_out_rows
from vllm_gsd.ops.walk.api import accept_walk


def walk_inputs(seed, device, places=16):
    """Graphs laid out for a batch, tokens sampled at all rows, and KV slots."""
    batch, random = tree_batch(seed, device, places), torch.Generator().manual_seed(seed)
    positions = torch.arange(batch.num_rows, device=device)
    mask = torch.zeros((batch.num_rows, places // 64 + 1), dtype=torch.int64, device=device)
    trees = lay_out_rows(*batch, positions, mask, torch.zeros(8, dtype=torch.int32, device=device))
    sampled = torch.randint(3, (int(batch.starts[-1]),), generator=random).to(device)
    slots = torch.randperm(batch.num_rows, generator=random).to(device)
    return trees, sampled, batch.starts, batch.batch_starts, slots


def same(got, want):
    for name, ours, theirs in zip(got._fields, got, want, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("max_steps", [None, 0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_walk(device, seed, max_steps):
    inputs = walk_inputs(seed, device, 1 if seed == 9 else 16)
    invalid = (torch.arange(len(inputs[1])) % 3 == 0).to(device)
    for bad in (None, invalid):
        same(accept_walk(*inputs, bad, max_steps), accept_walk_reference(*inputs, bad, max_steps))


@pytest.mark.parametrize("seed", range(8))
def test_walk_equals_the_host(device, seed):
    """``method.verify.step_into``."""
    trees, sampled, starts, batch_starts, slots = walk_inputs(seed, device)
    start, drawn = starts.numpy(force=True), sampled.numpy(force=True)
    token, parent = numpy.full(len(drawn), -1), numpy.full(len(drawn), -2, numpy.int32)
    for tree, size in enumerate(trees.size.tolist()):
        rows = slice(start[tree], start[tree] + 1 + size)
        token[rows] = trees.token[tree, : 1 + size].numpy(force=True)
        parent[rows] = trees.parent[tree, : 1 + size].numpy(force=True)
    count = len(start) - 1
    places, active = numpy.zeros(count, numpy.int32), numpy.ones(count, numpy.bool_)
    emitted = [[] for _ in range(count)]
    while active.any():
        here = numpy.where(active, drawn[start[:-1] + places], -1)
        for tree in numpy.flatnonzero(active):
            emitted[tree].append(int(here[tree]))
        verify.step_into(token, parent, start, places, here, active)
    accepted = accept_walk(trees, sampled, starts, batch_starts, slots)
    for tree in range(count):
        assert accepted.tokens[tree, : accepted.count[tree]].tolist() == emitted[tree]
        assert accepted.last[tree] == places[tree]


def test_walk_by_hand(device):
    """The root has children 1 (token 5) and 2 (token 6); 2 has child 3 (token 7). A prompt's two rows come first."""

    def row(*values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    unread = row(0, 0, 0, 0)[None]
    trees = DeviceTrees(row(4, 5, 6, 7)[None], row(-1, 0, 0, 2)[None], *[unread] * 5, size=row(3))
    starts, batch_starts = row(0, 4, dtype=torch.int32), row(0, 6, dtype=torch.int32)
    accepted = accept_walk(trees, row(6, 0, 7, 8), starts, batch_starts, row(98, 99, 100, 101, 102, 103))
    assert accepted.tokens.tolist() == [[6, 7, 8, 0]] and accepted.rows.tolist() == [[0, 2, 3, 3]]
    assert accepted.count.tolist() == [3] and accepted.last.tolist() == [3]
    assert accepted.src_slots.tolist() == [[102, 103, -1]] and accepted.dst_slots.tolist() == [[101, 102, -1]]


def test_walk_refuses(device):
    trees, sampled, starts, batch_starts, slots = walk_inputs(1, device)
    for arguments, message in (
        ((trees, sampled.int(), starts, batch_starts, slots), "sampled is int32"),
        ((trees._replace(parent=trees.parent.int()), sampled, starts, batch_starts, slots), "parent is int32"),
        ((trees, sampled, starts.long(), batch_starts, slots), "starts is int64"),
        ((trees, sampled, starts, batch_starts[:1], slots), "batch_starts has 1 rows"),
        ((trees, sampled, starts, batch_starts, slots, None, -1), "max_steps is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            accept_walk(*arguments)


def test_step_without_the_host(device):
    """Rows, attention, sampling by argmax, walk and compaction: the cache ends as if the path had been decoded."""
    batch = tree_batch(14, device, vocabulary=2)._replace(valid=torch.ones(5, dtype=torch.int32, device=device))
    # The batch has nothing but verified rows.
    batch = batch._replace(batch_starts=batch.starts)
    counts, prefixes = batch.starts.diff().tolist(), (20, 3, 0, 17, 40)
    case = paged_case(rows=tuple(counts), prefixes=prefixes, head_size=16, seed=5).to(device)
    block, offset, positions = [], [], []
    for request, count in enumerate(counts):
        index = int(case.prefix_lens[request]) + torch.arange(count, device=device)
        block.append(case.block_table[request, index // 16])
        offset.append(index % 16)
        positions.append(index)
    slots = torch.cat(block).long() * 16 + torch.cat(offset)
    case.positions = torch.cat(positions)
    case.tree_mask = torch.zeros((batch.num_rows, 1), dtype=torch.int64, device=device)
    prefix_lens = torch.zeros_like(case.prefix_lens)
    trees = lay_out_rows(*batch, case.positions, case.tree_mask, prefix_lens)
    assert torch.equal(prefix_lens, case.prefix_lens)
    case.check()
    random = torch.Generator().manual_seed(1)
    sampled = torch.randint(2, (batch.num_rows,), generator=random).to(device)
    accepted = accept_walk(trees, sampled, batch.starts, batch.batch_starts, slots)
    kv_cache = torch.cat([case.key_cache, case.value_cache], -1).transpose(1, 2)
    before = kv_cache.transpose(1, 2).flatten(0, 1).clone()
    move_paged_kv(PagedCaches([kv_cache]), accepted.src_slots, accepted.dst_slots)
    after = kv_cache.transpose(1, 2).flatten(0, 1)
    assert (accepted.count - 1).sum() > 2 and (accepted.src_slots >= 0).any()
    for request, first in enumerate(batch.starts.tolist()[:-1]):
        for depth in range(int(accepted.count[request])):
            row = accepted.rows[request, depth]
            assert torch.equal(after[slots[first + depth]], before[slots[row]])
