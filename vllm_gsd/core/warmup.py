"""Run every core function at start-up, so that the first request doesn't wait for numba, where that compiles them."""

import numpy as np

from vllm_gsd.core.calibration import NUM_SOURCES, Calibration, SourceTrust
from vllm_gsd.core.costs import Costs
from vllm_gsd.core.draft_level import frontier_chances, keep_best, level_rows, new_draft_slots, parent_lines
from vllm_gsd.core.flatten import ancestor_masks, batch_masks, flatten, lay_tree
from vllm_gsd.core.graph import NUM_ORIGINS, ORIGIN_SHARED, new_graphs, reset_all
from vllm_gsd.core.growth import add_candidates, next_frontier
from vllm_gsd.core.ngram import graft_all_ngrams, graft_tree
from vllm_gsd.core.outcome import kv_moves, tally
from vllm_gsd.core.planner import Planner
from vllm_gsd.core.text_rows import kv_slots, next_rows, text_rows
from vllm_gsd.core.verify import follow, is_chain, step_into


def warm_up() -> None:
    """Run one tiny step with the array types the runtime uses."""
    graphs = new_graphs(1, 16)
    texts = np.array([[1, 2, 1, 2]], np.int32), np.zeros(1, np.int64), np.full(1, 4)
    reset_all(graphs, *texts)
    nodes, ones = np.full(1, 4, np.int32), np.ones(1, np.int32)
    frontier = np.zeros((1, 4), np.int32)
    tokens, probs = np.array([[3, 4]], np.int64), np.array([[0.6, 0.4]], np.float32)
    add_candidates(graphs, frontier, ones, tokens, probs, nodes, 0.1, 2)
    next_frontier(graphs, ones.copy(), nodes, nodes, np.float32(0.05), frontier, ones)
    chances = frontier_chances(graphs, frontier, ones, Calibration().factor, np.ones((1, NUM_SOURCES), np.float32))
    keep_best(frontier, ones, chances, 1)
    parent_lines(graphs, frontier, ones, np.zeros((1, 16), np.int64))
    slots = new_draft_slots(1, 16, 8)
    rows = int(ones[0])
    token, depth, slot = np.empty(rows, np.int64), np.empty(rows, np.int32), np.empty(rows, np.int32)
    level_rows(graphs, slots, frontier, ones, token, depth, slot, np.empty((rows, 1), np.int64))
    lines, ahead = np.zeros(1, np.int64), [np.empty(4, np.int64) for _ in range(3)]
    next_rows(lines, texts[2], 4, np.zeros(1, np.int64))
    text_rows(lines, texts[2], texts[0], lines, *ahead)
    kv_slots(np.zeros((1, 1), np.int32), ahead[2], ahead[1], 16)
    graft_all_ngrams(graphs, *texts, np.ones(1, np.bool_), 2, nodes, 1)
    graft_tree(graphs, 0, tokens[0], np.array([-1, 0], np.int32), probs[0], 2, ORIGIN_SHARED)
    trees = flatten(graphs, nodes, nodes)
    starts = np.array([0, trees.size[0] + 1], np.int32)
    parent = np.concatenate([[-1], trees.parent[0, : trees.size[0]] + 1]).astype(np.int32)
    line_tokens = np.concatenate([[0], trees.token[0, : trees.size[0]]])
    ancestor_masks(parent, starts, np.zeros((len(parent), 1), np.int64))
    levels, zeros = np.zeros(len(parent), np.int32), np.zeros(len(parent), np.int64)
    rows_of_nodes = line_tokens, parent, levels, np.zeros(len(parent), np.int8), np.zeros(len(parent), np.float32)
    tree = trees.token[0], trees.parent[0], trees.depth[0], trees.origin[0]
    sources = np.zeros((2, NUM_ORIGINS), np.int8)
    lay_tree(*tree, trees.via_merge[0], trees.survival[0], sources, 1, len(parent) - 1, rows_of_nodes)
    whole = starts, zeros, np.zeros(1, np.int64), np.zeros((len(parent), 1), np.int64)
    batch_masks(parent, starts, levels, np.ones(1, np.bool_), np.zeros(1, np.int64), *whole)
    places, active = np.zeros(1, np.int32), np.ones(1, np.bool_)
    step_into(line_tokens, parent, starts, places, line_tokens[1:2].copy(), active)
    follow(line_tokens, parent, starts, line_tokens, places, np.zeros((1, len(parent)), np.int32))
    is_chain(parent, starts[0], starts[1])
    _plan(nodes, trees.value)
    _learn(parent, starts, places)


def _plan(nodes: np.ndarray, values: np.ndarray) -> None:
    planner = Planner(2, 2, 4, Costs(np.array([1, 2]), np.ones(2), np.ones(2), attention=0.1))
    planner.begin(1, 4)
    planner.wants_drafts(1, np.zeros(0))
    planner.drafted(np.full((1, 2), 0.5, np.float32))
    planner.level_size(np.ones(1))
    planner.choose(values, nodes, nodes.astype(np.int64), np.zeros(1, np.bool_))


def _learn(parent: np.ndarray, starts: np.ndarray, places: np.ndarray) -> None:
    rows = len(parent)
    kv_moves(parent, starts, places, np.zeros(1, np.int64))
    columns = np.ones(rows, np.int32), np.zeros(rows, np.int8), np.ones(rows, np.float32)
    *_, (tree, source, depth, survival, accepted) = tally(parent, starts, places, np.ones(1, np.bool_), *columns)
    calibration = Calibration()
    chance = calibration.value(source, depth, survival)
    SourceTrust().observe(["a"], tree, source, chance, accepted)
    calibration.observe(source, depth, survival, accepted)
