"""Verification from tensors against the host's: rows, positions, masks and moves; and copies that arrive late."""

import numpy as np
import pytest
import torch
from test_v2_rows import tree_of

from vllm_gsd.engine.v2.device_step import DeviceStep, Proposals, to_device, to_host
from vllm_gsd.engine.v2.late_copies import LateCopies
from vllm_gsd.engine.verify.draft_tree import FOREIGN, NO_NODES
from vllm_gsd.engine.verify.step import lay_out
from vllm_gsd.method.constants import NONE
from vllm_gsd.method.lay_out import ancestor_masks

CPU = torch.device("cpu")
TREES = [tree_of([NONE, NONE, 0]), NO_NODES, tree_of([NONE, 0]), NO_NODES, tree_of([NONE, NONE, 0, 1])]
SIZES = np.array([6, 4, 5, 1, 3])
ENDS = np.cumsum(SIZES) + np.array([0, 7, 7, 7, 7])  # a prompt's rows before the second's
SLOTS = np.array([4, 0, 7, 2, 5])


@pytest.fixture
def proposals():
    kept = Proposals(8, 5, CPU)
    kept.store(torch.from_numpy(SLOTS), SLOTS, to_device(TREES, 5, CPU))
    return kept


def step_of(proposals, sizes=SIZES, ends=ENDS):
    return DeviceStep(proposals, torch.from_numpy(SLOTS), SLOTS, sizes, ends)


def test_rows_are_those_of_the_host(proposals):
    step = step_of(proposals)
    expected = lay_out(TREES, SIZES, ENDS)
    for request, (first, end) in enumerate(zip(expected.trees.starts, expected.trees.starts[1:], strict=False)):
        size = end - first
        assert np.array_equal(step.parent[request, :size], expected.trees.parent[first:end])
        assert np.array_equal(step.token[request, 1:size], expected.trees.token[first + 1 : end])
        assert np.array_equal(step.depth[request, :size], expected.depth[first:end])
        assert (step.parent[request, size:] == FOREIGN).all()
        assert step.lines()[request, :size].tolist() == list(range(first, end))
    assert step.first_rows.tolist() == expected.first_rows.tolist()
    assert step.tree_requests.tolist() == [0, 1, 2, 4]  # whether it is a chain, the host does not know
    assert step.deepest == 5


def test_positions_and_masks_are_those_of_the_host(proposals):
    """For requests whose graph is no chain, which are all that the host lays out; a chain's are causal."""
    step, expected = step_of(proposals), lay_out(TREES, SIZES, ENDS)
    positions = torch.arange(100, 100 + int(ENDS[-1]))
    ours, theirs = positions.clone(), positions.clone()
    step.set_positions(ours)
    expected.set_positions(theirs)
    for request in (0, 4):
        rows = slice(ENDS[request] - SIZES[request], ENDS[request])
        assert ours[rows].tolist() == theirs[rows].tolist()
    assert ours[6:13].tolist() == positions[6:13].tolist()  # the prompt's
    assert ours[17:22].tolist() == [117, 118, 119, 117, 117]  # a chain, and two rows without a node
    masks = step.masks()
    for request, tree in enumerate(TREES):
        size = min(len(tree.token), SIZES[request] - 1)
        host = np.zeros((1 + size, 1), np.int64)
        parent = np.concatenate([[NONE], tree.parent[:size] + 1]).astype(np.int32)
        ancestor_masks(parent, np.array([0, 1 + size], np.int32), host)
        assert np.array_equal(masks[request, : 1 + size], host)


def test_moves_go_where_plain_decoding_would_have_written(proposals):
    step = step_of(proposals)
    places = torch.arange(6).repeat(5, 1)  # a walk that has ended stands at its depth
    places[0, 1:3] = torch.tensor([1, 3])
    places[4, 1:3] = torch.tensor([2, 2])
    slot_mapping = torch.arange(1000, 1000 + int(ENDS[-1]))
    sources, destinations = step.moves(places, slot_mapping)
    assert sources.shape == destinations.shape == (4, 5)  # a tree request a row, a depth a column
    deep = np.arange(1, 6) < SIZES[SIZES > 1, None]
    assert np.array_equal(sources >= 0, deep)  # nothing is moved for the rows that a request has not
    sources, destinations = sources[deep], destinations[deep]
    moved = sources != destinations
    first = ENDS - SIZES
    assert sources[moved].tolist() == [1000 + first[0] + 3, 1000 + first[4] + 2]
    assert destinations[moved].tolist() == [1000 + first[0] + 2, 1000 + first[4] + 1]
    assert len(set(destinations.tolist())) == len(destinations)


def test_another_request_in_a_slot_has_nothing_to_verify(proposals):
    proposals.drop(4)
    step = step_of(proposals)
    assert step.trees.size.tolist() == [0, 0, 2, 0, 2]
    assert (step.parent[0, 1:] == FOREIGN).all()


def test_a_step_without_drafts(proposals):
    step = step_of(proposals, np.ones(5, np.int64), np.arange(1, 6))
    assert step.token.shape == (5, 1) and step.num_tree_requests == 0 and step.deepest == 0
    assert (step.parent == NONE).all() and not step.trees.size.any()


def test_trees_come_back_as_they_went(proposals):
    trees = to_host(proposals.of(torch.from_numpy(SLOTS), np.full(5, 5)))
    for got, given in zip(trees, TREES, strict=True):
        assert (got is None) == (len(given.token) == 0)
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival"):
            if got is not None:
                assert np.array_equal(getattr(got, name), getattr(given, name))
                assert getattr(got, name).dtype == getattr(given, name).dtype


class Event:
    """A CUDA event that is reached when told."""

    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True


def test_what_comes_from_the_host_has_arrived():
    late, values = LateCopies(CPU), torch.tensor([1, 2])
    late.send("first", {"values": values})
    values.zero_()
    ((label, copies),) = late.take(wait=False)
    assert label == "first" and copies["values"].tolist() == [1, 2]
    assert not list(late.take(wait=True))


def test_what_has_not_arrived_waits_its_turn():
    late, events = LateCopies(CPU), [Event(), Event(), Event()]
    late.queue.extend((place, {}, event) for place, event in enumerate(events))
    events[1].reached = True
    assert not list(late.take(wait=False))
    events[0].reached = True
    assert [label for label, _ in late.take(wait=False)] == [0, 1]
    assert [label for label, _ in late.take(wait=True)] == [2]
