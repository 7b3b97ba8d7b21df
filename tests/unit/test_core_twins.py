"""The core's functions in C++ against the same by numba: equal to the last bit, types included.

The core is loaded a second time with its twins switched off, and the same random story is told to both: what is
returned and every array that was written to must be the same. Also: with the twins numba is not even imported, without
them it serves; arrays of a wrong type or shape are refused by name, and nothing outside of an array is touched.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import vllm_gsd
import vllm_gsd.core

NAMES = [module.name for module in pkgutil.iter_modules(vllm_gsd.core.__path__)]
SWITCH = "VLLM_GSD_NO_EXTENSION"


def load_core():
    return SimpleNamespace(**{name: importlib.import_module(f"vllm_gsd.core.{name}") for name in NAMES})


TWINS = load_core()
pytestmark = pytest.mark.skipif(TWINS.compiled._TWINS is None, reason="vllm_gsd._core is not built")


@pytest.fixture(scope="module")
def by_numba():
    """The core without its twins. It stays in ``sys.modules``: numba's cache looks classes up there."""
    ours = {name: module for name, module in sys.modules.items() if f"{name}.".startswith("vllm_gsd.core.")}
    for name in ours:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        core = load_core()
    assert core.graph is not TWINS.graph
    assert hasattr(core.graph.reset, "py_func")
    yield core
    for name in [name for name in sys.modules if f"{name}.".startswith("vllm_gsd.core.")]:
        del sys.modules[name]
    sys.modules.update(ours)
    vllm_gsd.core = ours["vllm_gsd.core"]


# --- one story, told twice --------------------------------------------------------------------------


def leaves(value):
    """What tuples and lists hold, however deep."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def assert_same(ours, expected):
    ours, expected = list(leaves(ours)), list(leaves(expected))
    assert len(ours) == len(expected)
    for number, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        assert type(mine) is type(other), number
        if isinstance(mine, np.ndarray):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), number
            assert mine.tobytes() == other.tobytes(), (number, mine, other)
        else:
            assert mine == other, number


def told_to_both(story, by_numba, seed):
    assert_same(story(TWINS, np.random.default_rng(seed)), story(by_numba, np.random.default_rng(seed)))


def copies(*values):
    return [value.copy() if isinstance(value, np.ndarray) else value for value in leaves(values)]


def random_level(random, rows, top_k, vocab):
    """Candidates: equal probabilities, repeated and missing tokens among them."""
    tokens = random.integers(0, vocab, (rows, top_k))
    tokens[random.random((rows, top_k)) < 0.05] = -1
    probs = -np.sort(-random.random((rows, top_k)), axis=1)
    if random.random() < 0.3:
        probs = -np.sort(-random.choice([0.0, 0.125, 0.25, 0.5, 1.0], (rows, top_k)), axis=1)
    return tokens, probs.astype(np.float32)


def random_calibration(core, random):
    factor = core.calibration.Calibration().factor
    if random.random() < 0.7:
        factor[:] = random.uniform(0, 2, factor.shape)
    return factor


def grow(core, random):
    """Graphs of a few requests, grown from all sources, as the runtime does it; some are small and overflow."""
    told = []
    vocab, top_k, width = (int(random.choice(values)) for values in ([2, 3, 5, 40], [1, 2, 4, 8], [1, 3, 12, 40]))
    count, capacity = int(random.integers(0, 4)), int(random.choice([1, 2, 7, 30, 130, 300]))
    whole = core.graph.new_graphs(count + 1, capacity)
    graphs = core.graph.GraphBatch(*(array[:count] for array in whole))
    texts = random.integers(0, vocab, (count + 2, 60)).astype(np.int32)
    lines, length = random.integers(0, count + 2, count), random.integers(1, 60, count)
    core.graph.reset_all(graphs, texts, lines, length)
    num_nodes = random.integers(1, 40, count).astype(np.int32)
    trust = random.uniform(0.2, 1.5, (count, core.calibration.NUM_SOURCES)).astype(np.float32)
    factor = random_calibration(core, random)
    frontier = np.zeros((count + 1, width), np.int32)[:count]
    frontier_len = (random.random(count) < 0.9).astype(np.int32)
    slots = core.draft_level.new_draft_slots(count, capacity, 6 * width)
    node_lines = np.zeros((count, capacity), np.int64)
    merge_ngram = random.integers(0, 4, count).astype(np.int32)
    theta_sib, theta_prob = float(random.choice([0.0, 0.1, 0.3])), np.float32(random.choice([0.0, 0.02, 0.2]))

    def graft():
        chosen, deepest = random.random(count) < 0.8, random.integers(1, 9, count)
        matches, least = int(random.integers(1, 6)), int(random.integers(1, 3))
        core.ngram.graft_all_ngrams(graphs, texts, lines, length, chosen, matches, deepest.astype(np.int32), least)
        for row in range(count):
            size = int(random.integers(0, 7))
            parents = np.array([random.integers(-1, i) for i in range(size)], np.int32)
            shares = random.uniform(0.05, 1, size).astype(np.float32)
            tree = random.integers(0, vocab, size), parents, shares, int(random.integers(2, 20))
            core.ngram.graft_tree(graphs, row, *tree, core.graph.ORIGIN_SHARED)
        told.append(copies(*graphs))

    if random.random() < 0.3:
        graft()
    for _ in range(int(random.integers(1, 6))):
        first_new = graphs.size.copy()
        tokens, probs = random_level(random, int(frontier_len.sum()), top_k, vocab)
        limits = num_nodes, theta_sib, merge_ngram
        told.append(core.growth.add_candidates(graphs, frontier, frontier_len, tokens, probs, *limits))
        room = np.where(random.random(count) < 0.9, 6 * width - slots.used, 0).astype(np.int32)
        core.growth.next_frontier(graphs, first_new, num_nodes, room, theta_prob, frontier, frontier_len)
        told.append(copies(*graphs, frontier, frontier_len))
        chances = core.draft_level.frontier_chances(graphs, frontier, frontier_len, factor, trust)
        core.draft_level.keep_best(frontier, frontier_len, chances, int(random.integers(0, 12)))
        parents = core.draft_level.parent_lines(graphs, frontier, frontier_len, node_lines)
        rows = int(frontier_len.sum())
        level = np.zeros(rows, np.int64), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        mask = np.zeros((rows, slots.mask.shape[2]), np.int64)
        core.draft_level.level_rows(graphs, slots, frontier, frontier_len, *level, mask)
        told.append(copies(chances, parents, frontier, frontier_len, node_lines, *level, mask, *slots))
    graft()
    deepest = random.integers(0, 9, count).astype(np.int32)
    told.append(core.flatten.flatten(graphs, num_nodes, deepest, factor, trust))
    told.append(core.flatten.flatten(graphs, num_nodes, deepest))
    return told


@pytest.mark.parametrize("seed", range(150))
def test_growth(by_numba, seed):
    told_to_both(grow, by_numba, seed)


def nodes_one_by_one(core, random):
    told = []
    graphs = core.graph.new_graphs(2, 9)
    for row in range(2):
        committed = random.integers(0, 9, int(random.integers(1, 30)))
        core.graph.reset(graphs, row, committed)
        for _ in range(10):
            parent, token = int(random.integers(0, graphs.size[row])), int(random.integers(0, 3))
            told.append(core.graph.find_child(graphs, row, parent, token))
            told.append(core.graph.add_child(graphs, row, parent, token, np.float32(random.random()), 1))
        text = random.integers(0, 3, 40).astype(np.int32)
        found = np.full(3, -7, np.int32), np.full(3, -7, np.int32)
        told.append(core.ngram.longest_matches(text, int(random.integers(1, 41)), int(random.integers(1, 4)), *found))
        core.graph.reset(graphs, row, committed)
        told.append(core.ngram.graft_ngrams(graphs, row, text, int(random.integers(1, 41)), 3, 5, 1))
        told.append(copies(found, *graphs))
    return told


@pytest.mark.parametrize("seed", range(60))
def test_nodes_one_by_one(by_numba, seed):
    told_to_both(nodes_one_by_one, by_numba, seed)


def read_texts(core, random):
    count, longest = int(random.integers(0, 5)), int(random.integers(1, 150))
    texts = random.integers(0, 1000, (count + 2, 200)).astype(np.int32)
    lines, done = random.integers(0, count + 2, count), random.integers(0, 50, count)
    counts = random.integers(0, longest + 1, count)
    rows = int(counts.sum())
    token, position, request = (np.full(rows, -7, np.int64) for _ in range(3))
    core.text_rows.text_rows(done, counts, texts, lines, token, position, request)
    blocks = random.integers(0, 9999, (count + 1, 40)).astype(np.int32)[:, :25]
    run, due = np.full(count, -7), done + random.integers(-5, longest, count)
    told = core.text_rows.next_rows(done, due, int(random.integers(0, 2 * longest)), run)
    return told, run, token, position, request, core.text_rows.kv_slots(blocks, request, position - 3, 8)


@pytest.mark.parametrize("seed", range(40))
def test_texts(by_numba, seed):
    told_to_both(read_texts, by_numba, seed)


# --- verification -----------------------------------------------------------------------------------


def verify(core, random):
    """A batch of random trees, rows without a node (-2) among them, from its masks to what is learned from it."""
    told = []
    count = int(random.integers(1, 5))
    parents, depths = [], []
    for _ in range(count):
        places, depth, shape = [0], [0], random.random()
        parent = [-1]
        for place in range(1, int(random.integers(1, 80))):
            above = -2 if random.random() < 0.1 else place - 1 if shape < 0.3 else int(random.choice(places))
            parent.append(above)
            depth.append(0 if above < 0 else depth[above] + 1)
            if above >= 0:
                places.append(place)
        parents.append(parent)
        depths.append(depth)
    starts = np.cumsum([0, *map(len, parents)]).astype(np.int32)
    parent, depth = np.concatenate(parents).astype(np.int32), np.concatenate(depths).astype(np.int32)
    rows = len(parent)
    token, sampled = random.integers(0, 2, rows), random.integers(0, 2, rows)
    tree = token[1:], parent[1:], depth[1:], random.integers(0, 6, rows - 1).astype(np.int8), token[1:] > 0
    laid = tuple(np.full(rows, -7, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.float32))
    sources, first = random.integers(-1, 5, (2, 6)).astype(np.int8), int(random.integers(0, rows))
    survival = random.random(rows - 1).astype(np.float32)
    core.flatten.lay_tree(*tree, survival, sources, first, min(rows - first, rows - 1), laid)
    told.append(laid)
    masks = np.full((rows, 2), -1, np.int64)
    core.flatten.ancestor_masks(np.maximum(parent, -1), starts, masks)
    told.append(masks.copy())
    ahead, room = random.integers(0, 70, count), np.diff(starts)
    bounds = np.cumsum([0, *(ahead + room)]).astype(np.int32)
    positions, prefix = random.integers(0, 900, bounds[-1]), np.empty(count, np.int64)
    whole = np.full((int(bounds[-1]), 2), -1, np.int64)
    trees = parent, starts, depth, random.random(count) < 0.7, bounds[:-1] + ahead
    core.flatten.batch_masks(*trees, bounds, positions, prefix, whole)
    told.append([positions, prefix, whole])
    places, path = np.zeros(count, np.int32), np.full((count, 80), -1, np.int32)
    told.append(core.verify.follow(token, parent, starts, sampled, places, path))
    stepped, active = np.zeros(count, np.int32), random.random(count) < 0.9
    for _ in range(4):
        here = sampled[starts[:-1] + stepped]
        core.verify.step_into(token, parent, starts, stepped, here, active)
    told.append([core.verify.is_chain(parent, *pair) for pair in pairwise(starts)])
    told.append(core.outcome.kv_moves(parent, starts, places, starts[:-1].astype(np.int64) * 3))
    counted = random.random(count) < 0.8
    columns = depth, random.integers(-1, 5, rows).astype(np.int8), random.random(rows).astype(np.float32)
    seen = core.outcome.tally(parent, starts, places, counted, *columns)
    told.append(seen)
    tree, source, depth, survival, accepted = seen[3]
    calibration, trust = core.calibration.Calibration(), core.calibration.SourceTrust()
    for _ in range(3):
        chance = calibration.value(source, depth, survival)
        trust.observe([str(index) for index in range(int(counted.sum()))], tree, source, chance, accepted)
        calibration.observe(source, depth, survival, accepted)
        told.append([chance, copies(calibration.factor, calibration.promised, calibration.accepted)])
    told.append([masks, places, path, stepped, active, list(trust.seen.values())])
    return told


@pytest.mark.parametrize("seed", range(100))
def test_verification(by_numba, seed):
    told_to_both(verify, by_numba, seed)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chances(by_numba, dtype):
    """Survivals a few roundings away from powers of two, where logarithms are rounded, too, and odd ones."""
    values = dtype(2.0) ** -np.arange(40, dtype=dtype)
    around = [values, np.array([0.0, 1.0, 0.3, 1e-9, 1e-30, np.inf], dtype)]
    for direction in (0.0, 2.0):
        near = values
        for _ in range(4):
            near = np.nextafter(near, dtype(direction), dtype=dtype)
            around.append(near)
    survival = np.concatenate([*around, np.random.default_rng(0).random(3000).astype(dtype)])
    factor = random_calibration(TWINS, np.random.default_rng(3))
    source, depth = (np.random.default_rng(1).integers(low, 5, len(survival)) for low in (0, 1))
    arguments = factor, source, depth, survival
    assert_same(TWINS.calibration._chances(*arguments), by_numba.calibration._chances(*arguments))
    for value in survival[:60]:
        assert_same(
            TWINS.calibration.calibrated(factor, 1, 2, value), by_numba.calibration.calibrated(factor, 1, 2, value)
        )


# --- planning ---------------------------------------------------------------------------------------


def plan(core, random):
    told = []
    rows = np.array([1, 2, 4, 8, 16, 32, 64])
    target, draft = (np.sort(random.uniform(0.5, 30, len(rows))) for _ in range(2))
    costs = core.costs.Costs(rows, target, draft, float(random.uniform(0, 1e-4)))
    tables = *costs.tables, float(random.uniform(0, 0.5)), float(random.uniform(0, 1))
    for number in (0, 1, 1.5, 63.2, 64, 200, 200.7):
        told.append(core.rates.read(tables[0], number))
    levels = int(random.integers(0, 7))
    told.append(core.rates.drafts_ms(tables, random.uniform(0, 90, levels), random.random(levels)))
    num_requests, context, spent = int(random.integers(1, 40)), int(random.integers(0, 10**6)), float(random.random())
    batch = tables, num_requests, context
    for dtype in (np.float32, np.float64):
        chances = random.choice(random.random(8), int(random.integers(0, 50))).astype(dtype)
        told.append(core.rates.best_rate(*batch, spent, chances))
    worth, children = 0.5 * 0.6 ** np.arange(16), random.random(int(random.integers(1, 9)))
    values = random.choice(random.random(9), int(random.integers(1, 60)))
    drafted = int(random.integers(0, num_requests + 1))
    told.append(core.rates.level_size(*batch, float(random.random()), spent, worth, drafted, values, children))
    usual = random.random(levels) * 9, random.random(levels)
    found, left = random.random(int(random.integers(0, 30))), float(random.random())
    told.append(core.rates.drafts_rate(*batch, spent, found, left, drafted, worth, *usual))
    core.rates.follow_children(children, random.random((3, len(children))).astype(np.float32), 0.25)
    told.append(copies(children))
    size = random.integers(0, 17, num_requests).astype(np.int32)
    value = -np.sort(-random.choice(random.random(30), (num_requests, 16)), axis=1).astype(np.float32)
    length, known = random.integers(1, 5000, num_requests), (worth, *usual)
    chosen = random.random(num_requests) < 0.6
    chosen[0] = True
    run = random.integers(1, 99, int(random.integers(0, levels + 1)))
    core.rates.follow_graphs(*known, value, size, chosen, run, int(random.integers(1, 9)), 0.04)
    told.append(copies(known))
    told.append(core.rates.best_nodes(*batch, value, size, length, spent, float(random.random())))
    overhead = core.overhead.Overhead()
    for _ in range(20):
        took, forward = random.uniform(1, 60, 2)
        overhead.observe_step(took, forward, int(random.integers(1, 20)), float(random.integers(9999)), drafted)
        overhead.observe_drafts(took, forward, levels)
        told.append(
            copies(overhead.step.weights, overhead.draft.weights, overhead.step.squares, overhead.step.products)
        )
    return told


@pytest.mark.parametrize("seed", range(100))
def test_planning(by_numba, seed):
    told_to_both(plan, by_numba, seed)


# --- who serves -------------------------------------------------------------------------------------

LOADED = """
import importlib, pkgutil, sys, vllm_gsd.core
for module in pkgutil.iter_modules(vllm_gsd.core.__path__):
    importlib.import_module("vllm_gsd.core." + module.name)
vllm_gsd.core.warmup.warm_up()
print("numba" in sys.modules, "torch" in sys.modules, type(vllm_gsd.core.graph.reset).__name__)
"""


@pytest.mark.parametrize(("switch", "expected"), [("", "False False builtin"), ("1", "True False CPUDispatcher")])
def test_numba_is_imported_only_where_it_serves(switch, expected):
    environment = {**os.environ, SWITCH: switch}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", LOADED]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip().startswith(expected)


def test_an_extension_that_does_not_load_is_told(monkeypatch, caplog):
    def fails(name):
        raise ImportError("symbol lookup error")

    monkeypatch.setattr(TWINS.compiled.importlib, "import_module", fails)
    assert TWINS.compiled._load_twins() is None
    assert "the compiled core does not load (symbol lookup error); numba is used instead" in caplog.text


def test_an_extension_of_other_sources_is_told(monkeypatch, caplog):
    monkeypatch.setattr(TWINS.compiled, "INTERFACE", -1)
    assert TWINS.compiled._load_twins() is None
    assert "it was built from other sources" in caplog.text


# --- what is refused --------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    graphs = TWINS.graph.new_graphs(2, 8)
    for row in range(2):
        TWINS.graph.reset(graphs, row, np.array([1], np.int64))
    return graphs


ONES = np.ones(2, np.int32)
FRONTIER = np.zeros((2, 3), np.int32)
TOKENS, PROBS = np.zeros((2, 4), np.int64), np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("place", "given", "error", "told"),
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
def test_arrays_that_do_not_fit(graphs, place, given, error, told):
    arguments = [FRONTIER, ONES, TOKENS, PROBS, ONES]
    arguments[place] = given
    with pytest.raises(error, match=told):
        TWINS.growth.add_candidates(graphs, *arguments, 0.1, 2)


def test_graphs_that_do_not_fit(graphs):
    with pytest.raises(TypeError, match="graphs must be a GraphBatch"):
        TWINS.graph.find_child(graphs[:5], 0, 0, 1)
    with pytest.raises(TypeError, match=r"graphs.prob must be .* float32"):
        TWINS.graph.find_child(graphs._replace(prob=graphs.prob.astype(np.float64)), 0, 0, 1)
    with pytest.raises(ValueError, match=r"graphs.merged must be of the shape"):
        TWINS.graph.find_child(graphs._replace(merged=graphs.merged[:1]), 0, 0, 1)
    with pytest.raises(IndexError, match="graphs: 2 is not below 2"):
        TWINS.graph.find_child(graphs, 2, 0, 1)
    with pytest.raises(ValueError, match=r"graphs.size"):
        TWINS.graph.find_child(graphs._replace(size=graphs.size + 9), 0, 0, 1)
    graphs.size.flags.writeable = False
    with pytest.raises(ValueError, match=r"graphs.size must be writable"):
        TWINS.graph.find_child(graphs, 0, 0, 1)


def test_rows_that_are_not_there(graphs):
    texts, ones = np.ones((2, 5), np.int32), np.ones(2, np.int64)
    with pytest.raises(IndexError, match="lines: 2 is not below 2"):
        TWINS.graph.reset_all(graphs, texts, 2 * ones, ones)
    with pytest.raises(ValueError, match="a text has 5 entries where 6"):
        TWINS.ngram.graft_all_ngrams(graphs, texts, 0 * ones, 6 * ones, ones > 0, 2, ones, 1)
    table = np.zeros((2, 3), np.int32)
    for rows, positions, told in ([2, 0], [0, 0], "rows: 2"), ([0, 0], [0, 48], "positions: 3 is not below 3"):
        with pytest.raises(IndexError, match=told):
            TWINS.text_rows.kv_slots(table, np.array(rows), np.array(positions), 16)
    with pytest.raises(ValueError, match="done has 2 entries where 3"):
        TWINS.text_rows.next_rows(ones, np.ones(3, np.int64), 4, np.zeros(3, np.int64))
    outputs = np.zeros(9, np.int64), np.zeros(9, np.int64), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="a text of token_ids has 5 entries where 6"):
        TWINS.text_rows.text_rows(ones, 5 * ones, texts, 0 * ones, *outputs)
    with pytest.raises(ValueError, match="token, position or request has 3 entries where 4"):
        TWINS.text_rows.text_rows(ones, 4 * ones, texts, 0 * ones, *outputs)
    parents, starts = np.array([-1, 0, 1], np.int32), np.array([0, 4], np.int32)
    tree = np.zeros(2, np.int64), np.zeros(2, np.int32), np.ones(2, np.int32), np.zeros(2, np.int8), np.zeros(2, bool)
    rows = tuple(np.zeros(3, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.float32))
    whole = *tree, np.ones(2, np.float32), np.zeros((2, 6), np.int8)
    with pytest.raises(ValueError, match="rows has 3 entries where 4"):
        TWINS.flatten.lay_tree(*whole, 2, 2, rows)
    with pytest.raises(ValueError, match="a tree has 2 entries where 3"):
        TWINS.flatten.lay_tree(*whole, 0, 3, rows)
    with pytest.raises(TypeError, match="rows must be a tuple"):
        TWINS.flatten.lay_tree(*whole, 1, 2, rows[:4])
    place = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="starts must rise"):
        TWINS.outcome.kv_moves(parents, starts, place, place)
    with pytest.raises(IndexError, match="places"):
        TWINS.outcome.kv_moves(parents, starts - [0, 1], place + 3, place)
    with pytest.raises(ValueError, match="parents must come before"):
        TWINS.outcome.kv_moves(np.array([-1, 2, 1], np.int32), np.array([0, 3]), place + 1, place)
    with pytest.raises(IndexError, match="depth"):
        TWINS.calibration._chances(np.ones((5, 3, 8), np.float32), place, place - 9, np.ones(1))
