"""Rows of prompts need no masks: memory grows only with the rows, and each row attends to all tokens before it."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft import level_drafter
from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.verify.draft_tree import FlatTree
from vllm_gsd.engine.verify.step import lay_out
from vllm_gsd.method.constants import NUM_SOURCES
from vllm_gsd.method.draft_level import DraftSlots
from vllm_gsd.ops.attention.cpu import _attended

CHUNK = 16384
NODES = 5


def branching():
    """A graph with two branches."""
    places = np.zeros(1 + NODES, np.int64)
    parent, depth = np.array([-1, 0, 0, 1, 1, 2], np.int32), np.array([0, 1, 1, 2, 2, 2], np.int32)
    return FlatTree(
        token=places + 7, parent=parent, depth=depth, origin=places.astype(np.int8),
        via_merge=places.astype(np.bool_), survival=np.ones(1 + NODES, np.float32),
    )  # fmt: skip


def batch_of(rows, before, trees):
    """A step in which request r has ``rows[r]`` rows after ``before[r]`` keys, ending with a graph or a root."""
    ends = np.cumsum(rows)
    step = lay_out(trees, np.array([1 if tree is None else 1 + NODES for tree in trees]), ends)
    step.batch_starts = np.concatenate([[0], ends]).astype(np.int32)
    positions = torch.cat([start + torch.arange(count) for start, count in zip(before, rows, strict=True)])
    return step, positions


def attended(tree, request):
    """The logical indices to which each row of a request attends, by the reference."""
    rows = slice(*tree.query_start_loc[request : request + 2].tolist())
    seen = _attended(int(tree.prefix_lens[request]), tree.positions[rows], tree.mask[rows], -1)
    return [row.nonzero().squeeze(1).tolist() for row in seen]


def test_each_row_sees_what_lies_before_it():
    step, positions = batch_of([20, 3, 1, 1 + NODES], [40, 0, 9, 70], [branching(), None, None, branching()])
    step.set_positions(positions)
    tree = step.tree_rows(block_table=torch.zeros(4, 8, dtype=torch.int32))
    text = 20 - 1 - NODES
    for request, start, first in (0, 40, text), (3, 70, 0):
        root = start + first
        prefix = list(range(root))
        seen = attended(tree, request)
        assert seen[:first] == [list(range(start + row + 1)) for row in range(first)]
        paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
        assert seen[first:] == [prefix + [root + place for place in path] for path in paths]
    assert attended(tree, 1) == [[0], [0, 1], [0, 1, 2]]
    assert attended(tree, 2) == [list(range(10))]


@pytest.mark.parametrize("trees", [[None, None], [None, branching()], [branching(), branching()]], ids=str)
def test_memory_of_a_chunk(trees):
    step, positions = batch_of([CHUNK, 1 + NODES], [1000, 50], trees)
    table = torch.zeros(2, 8, dtype=torch.int32)
    tracemalloc.start()
    step.set_positions(positions)
    tree = step.tree_rows(block_table=table)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.mask.nbytes <= 8 * len(positions)
    assert peak < 64 * len(positions)


def test_catching_up_has_no_masks():
    given = []
    model = SimpleNamespace(
        head=None, to_device=torch.from_numpy, tokens=torch.from_numpy,
        run_rows=lambda tokens, slots, tree, features: given.append(tree),
    )  # fmt: skip
    drafter = LevelDrafter.__new__(LevelDrafter)
    drafter.model, drafter.masks_chains, drafter.features = model, True, None
    drafter.planner = SimpleNamespace(caught_up=lambda rows: None)
    drafter.stats = SimpleNamespace(counts=dict.fromkeys(("draft_rows", "draft_forwards"), 0))
    done, counts = np.array([5, 0, 2]), np.array([CHUNK - 9, 0, 4])
    batch = DraftBatch(
        request_ids=["a", "b", "c"], requests=[], num_outputs=done, sampled=done > 0, length=done + counts,
        whole=done + counts,
        token_ids=np.zeros((3, CHUNK), np.int32), token_rows=np.arange(3), block_size=16,
        block_table=torch.zeros(3, CHUNK // 16, dtype=torch.int32), num_blocks=np.full(3, CHUNK // 16),
    )  # fmt: skip
    drafter._run_text(batch, done, counts, int(counts.sum()))
    (tree,) = given
    assert tree.mask.shape == (counts.sum(), 0) and tree.prefix_lens.tolist() == [CHUNK - 4, 6]
    assert attended(tree, 1) == [list(range(3 + row)) for row in range(4)]


def test_a_level_has_no_more_rows_than_a_step(monkeypatch):
    """vLLM's compiled models take at most ``--max-num-batched-tokens`` rows; the likeliest nodes are run."""
    ran, nodes = [], np.array([[1, 2, 3], [1, 2, 0]])

    def next_frontier(graphs, first_new, num_nodes, room, theta, frontier, frontier_len):
        frontier[:, :3], frontier_len[:] = nodes, [3, 2]

    def run_level(drafter, growing, hidden):
        ran.append((growing.frontier.copy(), growing.frontier_len.tolist()))

    monkeypatch.setattr(level_drafter, "next_frontier", next_frontier)
    monkeypatch.setattr(level_drafter, "frontier_chances", lambda *_: np.array([0.9, 0.1, 0.5, 0.8, 0.2]))
    monkeypatch.setattr(LevelDrafter, "_add_children", lambda *_: None)
    monkeypatch.setattr(LevelDrafter, "_run_level", run_level)
    drafter = LevelDrafter.__new__(LevelDrafter)
    drafter.model, drafter.max_rows, drafter.max_slots, drafter.max_positions = SimpleNamespace(shift=0), 3, 8, 99
    drafter.config = GSDConfig(method="gsd", model="draft", max_depth=2)
    drafter.frontier, drafter.node_rows = np.zeros((2, 8), np.int32), np.zeros((2, 9), np.int64)
    drafter.slots = DraftSlots(np.zeros(2, np.int32), np.zeros((2, 9, 1), np.int64))
    drafter.planner = SimpleNamespace(calibration=SimpleNamespace(factor=1), level_size=len)
    requests = SimpleNamespace(
        batch=SimpleNamespace(block_table=torch.zeros(2, 4), capacity=np.full(2, 99)),
        length=np.full(2, 9), index=np.arange(2), max_depth=np.full(2, 2), trust=np.ones((2, NUM_SOURCES)), num_nodes=8,
    )  # fmt: skip
    drafter.grow(SimpleNamespace(size=np.ones(2)), np.ones(2, np.bool_), torch.zeros(2, 4), requests)
    ((frontier, lengths),) = ran
    assert lengths == [2, 1] and frontier[0, :2].tolist() == [1, 3] and frontier[1, 0] == 1
