"""The compiled core refuses arrays of a wrong type or shape, and names them."""

import numpy as np
import pytest

from vllm_gsd.method.graph import new_graphs, reset

COMPILED = pytest.importorskip("vllm_gsd._core", reason="vllm_gsd._core is not built")


@pytest.fixture
def graphs():
    graphs = new_graphs(2, 8)
    for row in range(2):
        reset(graphs, row, np.array([1], np.int64))
    return graphs


ONES = np.ones(2, np.int32)
FRONTIER = np.zeros((2, 3), np.int32)
TOKENS, PROBS = np.zeros((2, 4), np.int64), np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("place", "given", "error", "message"),
    [
        (0, FRONTIER.astype(np.int64), TypeError, "frontier must be .* of int32, not one of 2 dimensions of int64"),
        (0, FRONTIER[0], TypeError, "frontier must be"),
        (0, FRONTIER[:1], ValueError, "frontier has 1 entries where 2 are needed"),
        (0, FRONTIER.tolist(), TypeError, "frontier must be .* not list"),
        (0, np.asfortranarray(FRONTIER), ValueError, "frontier must be contiguous"),
        (0, FRONTIER + 9, IndexError, "frontier: 9 is not below 1"),
        (1, np.full(2, 4, np.int32), ValueError, "frontier_len"),
        (2, TOKENS.astype(np.int32), TypeError, "tokens must be .* int64"),
        (2, TOKENS.astype(">i8"), TypeError, "tokens must be"),
        (2, TOKENS[:1], ValueError, "tokens has 1 entries"),
        (3, PROBS.astype(np.float64), TypeError, "probs must be .* float32"),
        (3, PROBS[:, :2], ValueError, "a row of probs has 2"),
        (4, ONES.astype(np.float32), TypeError, "num_nodes must be"),
    ],
)
def test_arrays_that_do_not_fit(graphs, place, given, error, message):
    arguments = [FRONTIER, ONES, TOKENS, PROBS, ONES]
    arguments[place] = given
    with pytest.raises(error, match=message):
        COMPILED.add_candidates(graphs, *arguments, 0.1, ONES)


BLOCK, CHANCES = np.zeros((2, 3, 2), np.int64), np.zeros((2, 3, 2, 2), np.float32)


@pytest.mark.parametrize(
    ("place", "given", "error", "message"),
    [
        (0, ONES, TypeError, "drafted must be .* bool"),
        (1, BLOCK[:1], ValueError, "tokens has 1 entries where 2"),
        (1, BLOCK[0], TypeError, "tokens must be an array of 3 dimensions"),
        (2, CHANCES[:1], ValueError, "probs has 1 entries where 2"),
        (2, CHANCES[:, :2], ValueError, "a block of probs has 2"),
        (2, CHANCES[:, :, :1], ValueError, "a depth of probs has 1"),
        (3, ONES[:1], ValueError, "num_nodes has 1"),
        (4, ONES[:1], ValueError, "max_depth has 1"),
    ],
)
def test_blocks_that_do_not_fit(graphs, place, given, error, message):
    arguments = [np.ones(2, np.bool_), BLOCK, CHANCES, ONES, ONES]
    arguments[place] = given
    with pytest.raises(error, match=message):
        COMPILED.add_lattices(graphs, *arguments, 0.1, 0.0)


def test_graphs_that_do_not_fit(graphs):
    text = np.ones((3, 1), np.int32), np.arange(3), np.ones(3, np.int64)
    with pytest.raises(TypeError, match="graphs must be a GraphBatch"):
        COMPILED.reset_all(graphs[:5], *text)
    with pytest.raises(TypeError, match=r"graphs.prob must be .* float32"):
        COMPILED.reset_all(graphs._replace(prob=graphs.prob.astype(np.float64)), *text)
    with pytest.raises(ValueError, match=r"graphs.merged must be of the shape"):
        COMPILED.reset_all(graphs._replace(merged=graphs.merged[:1]), *text)
    with pytest.raises(IndexError, match="graphs: 2 is not below 2"):
        COMPILED.reset_all(graphs, *text)
    with pytest.raises(ValueError, match=r"graphs.size"):
        COMPILED.reset_all(graphs._replace(size=graphs.size + 9), *text)
    graphs.size.flags.writeable = False
    with pytest.raises(ValueError, match=r"graphs.size must be writable"):
        COMPILED.reset_all(graphs, *text)


def test_rows_that_are_not_there(graphs):
    texts, ones = np.ones((2, 5), np.int32), np.ones(2, np.int64)
    with pytest.raises(IndexError, match="lines: 2 is not below 2"):
        COMPILED.reset_all(graphs, texts, 2 * ones, ones)
    with pytest.raises(ValueError, match="a text has 5 entries where 6"):
        COMPILED.graft_all_ngrams(graphs, texts, 0 * ones, 6 * ones, ones > 0, 2, ones, 1)
    table = np.zeros((2, 3), np.int32)
    for rows, positions, message in ([2, 0], [0, 0], "rows: 2"), ([0, 0], [0, 48], "positions: 3 is not below 3"):
        with pytest.raises(IndexError, match=message):
            COMPILED.kv_slots(table, np.array(rows), np.array(positions), 16)
    with pytest.raises(ValueError, match="done has 2 entries where 3"):
        COMPILED.next_rows(ones, np.ones(3, np.int64), 4, np.zeros(3, np.int64))
    outputs = np.zeros(9, np.int64), np.zeros(9, np.int64), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="a text of token_ids has 5 entries where 6"):
        COMPILED.text_rows(ones, 5 * ones, texts, 0 * ones, *outputs)
    with pytest.raises(ValueError, match="token, position or request has 3 entries where 4"):
        COMPILED.text_rows(ones, 4 * ones, texts, 0 * ones, *outputs)
    parents, starts = np.array([-1, 0, 1], np.int32), np.array([0, 4], np.int32)
    tree = np.zeros(2, np.int64), np.zeros(2, np.int32), np.ones(2, np.int32), np.zeros(2, np.int8), np.zeros(2, bool)
    rows = tuple(np.zeros(3, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.float32))
    whole = *tree, np.ones(2, np.float32), np.zeros((2, 6), np.int8)
    with pytest.raises(ValueError, match="rows has 3 entries where 4"):
        COMPILED.lay_tree(*whole, 2, 2, rows)
    with pytest.raises(ValueError, match="a tree has 2 entries where 3"):
        COMPILED.lay_tree(*whole, 0, 3, rows)
    with pytest.raises(TypeError, match="rows must be a tuple"):
        COMPILED.lay_tree(*whole, 1, 2, rows[:4])
    place = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="starts must rise"):
        COMPILED.kv_moves(parents, starts, place, place)
    with pytest.raises(IndexError, match="places"):
        COMPILED.kv_moves(parents, starts - [0, 1], place + 3, place)
    with pytest.raises(ValueError, match="parents must come before"):
        COMPILED.kv_moves(np.array([-1, 2, 1], np.int32), np.array([0, 3]), place + 1, place)
    outputs = np.zeros(8, np.int64), np.zeros(1, np.int64), np.zeros((8, 1), np.int64)
    for root in 1, 5, 9:
        batch = np.ones(1, np.bool_), np.array([root]), np.array([2, 5], np.int32)
        with pytest.raises(ValueError, match="first_rows: a root is not among"):
            COMPILED.batch_masks(parents, starts - [0, 1], parents, *batch, *outputs)
    with pytest.raises(IndexError, match="depth"):
        COMPILED.chances(np.ones((5, 3, 8), np.float32), place, place - 9, np.ones(1))
