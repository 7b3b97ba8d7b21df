"""The host's operations in C++ equal their specification in Python bit for bit, including types.

The same random scenario runs with both implementations. All returned values and all arrays written must be equal,
because an engine may have ranks with and without a compiler. Other tests check that without the extension the
specification runs and warns, and that an extension built from other sources is refused.
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

from vllm_gsd import host, method, planner
from vllm_gsd.method import constants
from vllm_gsd.method.constants import NUM_BINS, NUM_DEPTHS, NUM_SOURCES, ORIGIN_SHARED
from vllm_gsd.method.draft_level import new_draft_slots
from vllm_gsd.method.graph import GraphBatch, new_graphs, reset
from vllm_gsd.planner.costs import Costs

COMPILED = pytest.importorskip("vllm_gsd._core", reason="vllm_gsd._core is not built")
SWITCH = "VLLM_GSD_NO_EXTENSION"
NAMES = [name for name, value in vars(COMPILED).items() if callable(value)]


def specified(name):
    """The function of the specification with that name."""
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for package in (method, planner)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    # Leave out functions that a module imports from another.
    own = (module for module in modules if getattr(vars(module).get(name), "__module__", "") == module.__name__)
    (function,) = (vars(module)[name] for module in own)
    return function


SPECIFIED = SimpleNamespace(**{name: specified(name) for name in NAMES})


def test_the_host_runs_every_operation_in_cpp():
    for name in NAMES:
        assert getattr(host, "_flatten" if name == "flatten" else name) is getattr(COMPILED, name)


# --- the same scenario with both implementations ----------------------------------------------------


def leaves(value):
    """All values in nested tuples and lists."""
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


def check_both(scenario, seed):
    assert_same(scenario(COMPILED, np.random.default_rng(seed)), scenario(SPECIFIED, np.random.default_rng(seed)))


def copies(*values):
    return [value.copy() if isinstance(value, np.ndarray) else value for value in leaves(values)]


def random_level(random, rows, top_k, vocab):
    """Random candidates, with some equal probabilities and some repeated and missing tokens."""
    tokens = random.integers(0, vocab, (rows, top_k))
    tokens[random.random((rows, top_k)) < 0.05] = -1
    probs = -np.sort(-random.random((rows, top_k)), axis=1)
    if random.random() < 0.3:
        probs = -np.sort(-random.choice([0.0, 0.125, 0.25, 0.5, 1.0], (rows, top_k)), axis=1)
    return tokens, probs.astype(np.float32)


def random_calibration(random):
    factor = np.ones((NUM_SOURCES, NUM_DEPTHS, NUM_BINS), np.float32)
    if random.random() < 0.7:
        factor[:] = random.uniform(0, 2, factor.shape)
    return factor


def grow(core, random):
    """Grow graphs of a few requests from all sources, as the engine does. Some graphs are small and overflow."""
    results = []
    vocab, top_k, width = (int(random.choice(values)) for values in ([2, 3, 5, 40], [1, 2, 4, 8], [1, 3, 12, 40]))
    count, capacity = int(random.integers(0, 4)), int(random.choice([1, 2, 7, 30, 130, 300]))
    whole = new_graphs(count + 1, capacity)
    graphs = GraphBatch(*(array[:count] for array in whole))
    texts = random.integers(0, vocab, (count + 2, 60)).astype(np.int32)
    lines, length = random.integers(0, count + 2, count), random.integers(1, 60, count)
    core.reset_all(graphs, texts, lines, length)
    num_nodes = random.integers(1, 40, count).astype(np.int32)
    trust = random.uniform(0.2, 1.5, (count, NUM_SOURCES)).astype(np.float32)
    factor = random_calibration(random)
    frontier = np.zeros((count + 1, width), np.int32)[:count]
    frontier_len = (random.random(count) < 0.9).astype(np.int32)
    slots = new_draft_slots(count, capacity, 6 * width)
    node_lines = np.zeros((count, capacity), np.int64)
    merge_ngram = random.integers(0, 4, count).astype(np.int32)
    theta_sib, theta_prob = float(random.choice([0.0, 0.1, 0.3])), np.float32(random.choice([0.0, 0.02, 0.2]))

    def graft():
        chosen, deepest = random.random(count) < 0.8, random.integers(1, 9, count)
        matches, least = int(random.integers(1, 6)), int(random.integers(1, 3))
        core.graft_all_ngrams(graphs, texts, lines, length, chosen, matches, deepest.astype(np.int32), least)
        for row in range(count):
            size = int(random.integers(1, 8))
            parents = np.array([-1, *(random.integers(0, i) for i in range(1, size))], np.int32)
            shares = np.append(np.float32(1), random.uniform(0.05, 1, size - 1).astype(np.float32))
            tree = random.integers(0, vocab, size), parents, shares, int(random.integers(2, 20))
            core.graft_tree(graphs, row, *tree, ORIGIN_SHARED)
        results.append(copies(*graphs))

    if random.random() < 0.3:
        graft()
    for _ in range(int(random.integers(1, 6))):
        first_new = graphs.size.copy()
        tokens, probs = random_level(random, int(frontier_len.sum()), top_k, vocab)
        limits = num_nodes, theta_sib, merge_ngram
        results.append(core.add_candidates(graphs, frontier, frontier_len, tokens, probs, *limits))
        room = np.where(random.random(count) < 0.9, 6 * width - slots.used, 0).astype(np.int32)
        core.next_frontier(graphs, first_new, num_nodes, room, theta_prob, frontier, frontier_len)
        results.append(copies(*graphs, frontier, frontier_len))
        chances = core.frontier_chances(graphs, frontier, frontier_len, factor, trust)
        core.keep_best(frontier, frontier_len, chances, int(random.integers(0, 12)))
        parents = core.parent_lines(graphs, frontier, frontier_len, node_lines)
        rows = int(frontier_len.sum())
        level = np.zeros(rows, np.int64), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        mask = np.zeros((rows, slots.mask.shape[2]), np.int64)
        core.level_rows(graphs, slots, frontier, frontier_len, *level, mask)
        results.append(copies(chances, parents, frontier, frontier_len, node_lines, *level, mask, *slots))
    graft()
    deepest = random.integers(0, 9, count).astype(np.int32)
    results.append(tuple(core.flatten(graphs, num_nodes, deepest, factor, trust)))
    return results


@pytest.mark.parametrize("seed", range(150))
def test_growth(seed):
    check_both(grow, seed)


def add_blocks(core, random):
    """Add lattices of drafted blocks, then copies from texts, with ties, missing candidates, NaN and full graphs."""
    results = []
    count, depth, k = int(random.integers(0, 4)), int(random.integers(1, 7)), int(random.choice([1, 2, 4, 8]))
    graphs = new_graphs(count, int(random.choice([1, 4, 30, 600])))
    texts, length = random.integers(0, 9, (count, 40)).astype(np.int32), random.integers(1, 41, count)
    core.reset_all(graphs, texts, np.arange(count), length)
    drafted = random.random(count) < 0.8
    shape = int(drafted.sum()), depth, k
    tokens = random.permuted(np.broadcast_to(np.arange(9), (*shape[:2], 9)), axis=2)[:, :, :k]
    tokens[random.random(shape) < 0.05] = -1
    probs = random.dirichlet(np.full(k + 1, 0.5), (*shape,)).astype(np.float32)[..., :k]
    if random.random() < 0.4:
        probs = random.choice([0.0, 0.25, 0.5, 1.0, np.nan], probs.shape).astype(np.float32)
    num_nodes, deepest = (random.integers(low, 40, count).astype(np.int32) for low in (1, 0))
    thetas = float(random.choice([0.0, 0.1, 0.5])), float(random.choice([0.0, 0.02, 0.3]))
    results.append(core.add_lattices(graphs, drafted, np.ascontiguousarray(tokens), probs, num_nodes, deepest, *thetas))
    results.append(copies(*graphs))
    core.graft_all_ngrams(graphs, texts, np.arange(count), length, drafted, 4, deepest, 1)
    trust = random.uniform(0.2, 1.5, (count, NUM_SOURCES)).astype(np.float32)
    results.append(tuple(core.flatten(graphs, num_nodes, deepest, random_calibration(random), trust)))
    return results


@pytest.mark.parametrize("seed", range(100))
def test_lattices(seed):
    check_both(add_blocks, seed)


def copy_texts(core, random):
    """Copy repetitive texts into graphs with little room."""
    results = []
    graphs = new_graphs(3, 9)
    texts, length = random.integers(0, 3, (3, 40)).astype(np.int32), random.integers(1, 41, 3)
    for row in range(3):
        reset(graphs, row, texts[row, : length[row]])
    for _ in range(2):
        matches, least = int(random.integers(0, 4)), int(random.integers(1, 20))
        core.graft_all_ngrams(graphs, texts, np.arange(3), length, length > 0, matches, random.integers(0, 6, 3), least)
        results.append(copies(*graphs))
    return results


@pytest.mark.parametrize("seed", range(60))
def test_copies(seed):
    check_both(copy_texts, seed)


def read_texts(core, random):
    count, longest = int(random.integers(0, 5)), int(random.integers(1, 150))
    texts = random.integers(0, 1000, (count + 2, 200)).astype(np.int32)
    lines, done = random.integers(0, count + 2, count), random.integers(0, 50, count)
    counts = random.integers(0, longest + 1, count)
    rows = int(counts.sum())
    token, position, request = (np.full(rows, -7, np.int64) for _ in range(3))
    core.text_rows(done, counts, texts, lines, token, position, request)
    blocks = random.integers(0, 9999, (count + 1, 40)).astype(np.int32)[:, :25]
    run, due = np.full(count, -7), done + random.integers(-5, longest, count)
    results = core.next_rows(done, due, int(random.integers(0, 2 * longest)), run)
    return results, run, token, position, request, core.kv_slots(blocks, request, position - 3, 8)


@pytest.mark.parametrize("seed", range(40))
def test_texts(seed):
    check_both(read_texts, seed)


# --- verification -----------------------------------------------------------------------------------


def verify(core, random):
    """Verify a batch of random trees, some with unused rows (-2): masks, accepted paths, KV moves and calibration."""
    results = []
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
    core.lay_tree(*tree, survival, sources, first, min(rows - first, rows - 1), laid)
    results.append(laid)
    masks = np.full((rows, 2), -1, np.int64)
    core.ancestor_masks(np.maximum(parent, -1), starts, masks)
    results.append(masks.copy())
    ahead, room = random.integers(0, 70, count), np.diff(starts)
    bounds = np.cumsum([0, *(ahead + room)]).astype(np.int32)
    positions, prefix = random.integers(0, 900, bounds[-1]), np.empty(count, np.int64)
    whole = np.full((int(bounds[-1]), 2), -1, np.int64)
    trees = parent, starts, depth, random.random(count) < 0.7, bounds[:-1] + ahead
    core.batch_masks(*trees, bounds, positions, prefix, whole)
    results.append([positions, prefix, whole])
    places, path = np.zeros(count, np.int32), np.full((count, 80), -1, np.int32)
    results.append(core.follow(token, parent, starts, sampled, places, path))
    stepped, active = np.zeros(count, np.int32), random.random(count) < 0.9
    for _ in range(4):
        tokens = sampled[starts[:-1] + stepped]
        core.step_into(token, parent, starts, stepped, tokens, active)
    results.append([core.is_chain(parent, *pair) for pair in pairwise(starts)])
    results.append(core.kv_moves(parent, starts, places, starts[:-1].astype(np.int64) * 3))
    counted = random.random(count) < 0.8
    columns = depth, random.integers(-1, 5, rows).astype(np.int8), random.random(rows).astype(np.float32)
    seen = core.tally(parent, starts, places, counted, *columns)
    results.append(seen)
    tree, source, depth, survival, accepted = seen[3]
    shape = NUM_SOURCES, NUM_DEPTHS, NUM_BINS
    factor, promised, taken = np.ones(shape, np.float32), np.ones(shape), np.ones(shape)
    trust = np.full((int(counted.sum()), 2, NUM_SOURCES), 3.0)
    for _ in range(3):
        chance = core.chances(factor, source, depth, survival)
        core.learn_of_requests(trust, tree, source, chance, accepted)
        core.learn(factor, promised, taken, source, depth, survival, accepted)
        results.append([chance, copies(factor, promised, taken, trust)])
    results.append([masks, places, path, stepped, active])
    return results


@pytest.mark.parametrize("seed", range(100))
def test_verification(seed):
    check_both(verify, seed)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chances(dtype):
    """Survival probabilities next to powers of two, where bins begin, and special values."""
    values = dtype(2.0) ** -np.arange(40, dtype=dtype)
    around = [values, np.array([0.0, 1.0, 0.3, 1e-9, 1e-30, np.inf], dtype)]
    for direction in (0.0, 2.0):
        near = values
        for _ in range(4):
            near = np.nextafter(near, dtype(direction), dtype=dtype)
            around.append(near)
    survival = np.concatenate([*around, np.random.default_rng(0).random(3000).astype(dtype)])
    factor = random_calibration(np.random.default_rng(3))
    source, depth = (np.random.default_rng(1).integers(low, 5, len(survival)) for low in (0, 1))
    arguments = factor, source, depth, survival
    assert_same(COMPILED.chances(*arguments), SPECIFIED.chances(*arguments))


# --- planning ---------------------------------------------------------------------------------------


def plan(core, random):
    results = []
    rows = np.array([1, 2, 4, 8, 16, 32, 64])
    target, draft = (np.sort(random.uniform(0.5, 30, len(rows))) for _ in range(2))
    costs = Costs(rows, target, draft, float(random.uniform(0, 1e-4)))
    tables = *costs.tables, float(random.uniform(0, 0.5)), float(random.uniform(0, 1))
    for number in (0, 1, 1.5, 63.2, 64, 200, 200.7):
        results.append(float(core.read(tables[0], number)))
    levels = int(random.integers(0, 7))
    num_requests, context, spent = int(random.integers(1, 40)), int(random.integers(0, 10**6)), float(random.random())
    batch = tables, num_requests, context
    for dtype in (np.float32, np.float64):
        chances = random.choice(random.random(8), int(random.integers(0, 50))).astype(dtype)
        results.append(core.best_rate(*batch, spent, chances))
    worth, children = 0.5 * 0.6 ** np.arange(16), random.random(int(random.integers(1, 9)))
    values = random.choice(random.random(9), int(random.integers(1, 60)))
    drafted = int(random.integers(0, num_requests + 1))
    results.append(core.level_size(*batch, float(random.random()), spent, worth, drafted, values, children))
    usual = random.random(levels) * 9, random.random(levels)
    found, left = random.random(int(random.integers(0, 30))), float(random.random())
    results.append(core.drafts_rate(*batch, spent, found, left, drafted, worth, *usual))
    core.follow_children(children, random.random((3, len(children))).astype(np.float32), 0.25)
    results.append(copies(children))
    size = random.integers(0, 17, num_requests).astype(np.int32)
    value = -np.sort(-random.choice(random.random(30), (num_requests, 16)), axis=1).astype(np.float32)
    length, known = random.integers(1, 5000, num_requests), (worth, *usual)
    chosen = random.random(num_requests) < 0.6
    chosen[0] = True
    run = random.integers(1, 99, int(random.integers(0, levels + 1)))
    core.follow_graphs(*known, value, size, chosen, run, int(random.integers(1, 9)), 0.04)
    results.append(copies(known))
    results.append(core.best_nodes(*batch, value, size, length, spent, float(random.random())))
    parts, variance = random.random((20, 4)) * 9, random.uniform(0.1, 5, 4)
    learned = random.random(4), np.diag(variance), random.random(4), variance, random.random(4)
    for each in parts:
        core.follow_clock(*learned, each, float(random.uniform(1, 60)), float(random.uniform(1, 20)))
        results.append(copies(learned))
    return results


@pytest.mark.parametrize("seed", range(100))
def test_planning(seed):
    check_both(plan, seed)


# --- the choice of the implementation ---------------------------------------------------------------

LOADED = """
import sys, vllm_gsd.host as host
print(type(host.reset_all).__name__, sorted({"numba", "torch", "vllm"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(("switch", "expected"), [("", "builtin"), ("1", "function")])
def test_the_specification_serves_where_there_is_no_extension(switch, expected):
    environment = {**os.environ, SWITCH: switch}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected)
    assert done.stdout.strip().endswith("[]")
    warned = "graphs are grown in plain Python, which is slow" in done.stderr
    assert warned == bool(switch)


def test_an_extension_that_does_not_load_is_told(monkeypatch, caplog):
    def fails(name):
        raise ImportError("symbol lookup error")

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(host.importlib, "import_module", fails)
    assert host.load_extension() is None
    assert "the extension vllm_gsd._core is not used (symbol lookup error)" in caplog.text


def test_constants_are_those_that_the_extension_was_built_with():
    host.check_constants(COMPILED.CONSTANTS)
    assert {name for name in vars(constants) if name.isupper()} == COMPILED.CONSTANTS.keys()


@pytest.mark.parametrize(("name", "value"), [("MAX_CONTEXT", 17), ("KEEP", 0.99), ("MATCH_PROB", (0.0, 0.5))])
def test_an_extension_of_other_constants_is_told(monkeypatch, caplog, name, value):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(constants, name, value)
    assert host.load_extension() is None
    assert f"it was built from other sources: its {name} is" in caplog.text
