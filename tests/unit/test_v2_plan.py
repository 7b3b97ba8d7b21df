"""``"budget": "auto"`` on Model Runner V2: with the same graphs, it chooses and learns the same as V1."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.copies import Copies
from vllm_gsd.engine.observe.measure_phases import by_level
from vllm_gsd.engine.observe.recorder import Recorder
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.schedule.scheduler import (
    GraphAsyncScheduler,
    GraphScheduler,
    GraphScheduling,
    cut_to_fit,
    nodes_that_fit,
)
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2 import host_growth
from vllm_gsd.engine.v2.plan import COPIES_ONLY, DRAFTED, NO_GRAPH, Phase, Plan
from vllm_gsd.engine.verify.draft_tree import NO_NODES
from vllm_gsd.method.constants import NONE, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.planner.calibration import SourceTrust
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import DECAY, FIRST_CHANCE, Planner

NODES, LEVELS, SLOTS, EPISODES, STATES = 8, 6, 12, 25, 40
ROWS = np.array([1, 2, 8, 32, 128])
CONFIG = GSDConfig(method="gsd", model="draft", num_speculative_tokens=NODES)
NAMES = "graph_value", "graph_origin", "graph_depth", "graph_survival"  # of what arrives


def costs_of(rng, level_ms: float) -> tuple[Costs, Costs]:
    """Equivalent cost tables for V1 and V2, from flat to steep; some drafts cost more than the target.

    A level of V2 always runs for the whole batch, so the cost of a level does not depend on the number of rows here.
    V1's table leaves out the overhead of a level, which its planner adds.
    """
    steep, draft = rng.choice([0.0, 0.05, 0.5, 3.0]), rng.choice([0.03, 0.1, 0.3, 1.0, 10.0])
    target, attention = 10 + steep * ROWS, rng.choice([0.0, 1e-4])
    by_level = np.full((LEVELS, len(ROWS)), draft + level_ms)
    return Costs(ROWS, target, np.full(len(ROWS), draft), attention), Costs(ROWS, target, by_level, attention)


def new_speculation(planner: Planner) -> Speculation:
    """The host's part of speculation, without a real drafter."""
    speculation = Speculation.__new__(Speculation)
    speculation.config, speculation.planner, speculation.stats = CONFIG, planner, GraphStats()
    speculation.trees, speculation.admitted, speculation.grammar_trees = {}, {}, {}
    speculation.trust, speculation.draft_kv = SourceTrust(), object()
    speculation.recorder = Recorder(CONFIG, None, None, speculation.stats)
    speculation.num_nodes, speculation.max_model_len, speculation.most_missed = NODES, 10**6, 100
    speculation.copies = Copies(CONFIG, NODES)
    speculation.admitted = {str(slot): (True, False, 10**6) for slot in range(SLOTS)}
    return speculation


def made_up(rng, count: int) -> Callable[..., FlatTrees]:
    """Random graphs, as a function of which requests are drafted for and of the levels; others have only copies."""
    width = np.arange(NODES)
    copied, drafted = rng.integers(0, 4, count) * rng.integers(0, 2, count), rng.integers(0, 5, count)
    chances = rng.uniform(0.001, 1.0, (count, NODES)).astype(np.float32)
    is_copied = width < copied[:, None]
    depth = rng.integers(1, LEVELS + 1, (count, NODES)).astype(np.int32)

    def trees(drafting, levels: int):
        inside = (width < (copied + drafted)[:, None]) & drafting[:, None] & (depth <= levels)
        real = is_copied | inside
        values = np.where(real, chances, 0.0)
        order = np.argsort(-values, axis=1, kind="stable")
        inside = width < real.sum(1)[:, None]
        origin = np.where(is_copied, ORIGIN_NGRAM, ORIGIN_DRAFT).astype(np.int8)
        fields = {name: np.zeros((count, 1 + NODES), np.int64) for name in FlatTrees._fields}
        fields |= {"size": real.sum(1).astype(np.int32), "parent": np.full((count, 1 + NODES), NONE)}
        for name, field in (("value", values), ("survival", values), ("depth", depth), ("origin", origin)):
            nodes = np.where(inside, np.take_along_axis(field, order, 1), 0).astype(field.dtype)
            fields[name] = np.pad(nodes, ((0, 0), (1, 0)))  # place 0 is the root
        return FlatTrees(**fields)

    return trees


def below_root(trees: FlatTrees, rows: np.ndarray) -> np.ndarray:
    """Survival of the root's children in the graphs of ``rows``, best first, float32 [len(rows), NODES]."""
    inside = (np.arange(1 + NODES) <= trees.size[:, None]) & (trees.depth == 1)
    return -np.sort(-np.where(inside, trees.survival, 0.0).astype(np.float32), axis=1)[rows, :NODES]


def on_v1(speculation: Speculation, batch: DraftBatch, missed, graphs) -> tuple[np.ndarray, np.ndarray, int]:
    """V1's budgets, the requests for which it drafts, and its number of levels."""
    chosen, levels = np.zeros(len(missed), np.bool_), 0
    rows, planner = np.flatnonzero(batch.sampled), speculation.planner

    def catch_up(batch, tracker, due, drafting):
        chosen[:] = drafting
        return drafting, object() if drafting.any() else None

    def grow(requests, drafted=None, hidden=None):
        nonlocal levels
        if drafted is None:
            copies = graphs(np.zeros(len(rows), np.bool_), 0)
            return copies if copies.size.any() else None
        assert np.array_equal(requests.index, rows)
        whole = graphs(drafted, LEVELS)
        drafts = (np.arange(1 + NODES) <= whole.size[:, None]) & (whole.origin == ORIGIN_DRAFT)
        while levels < LEVELS and (levels == 0 or planner.level_size(whole.value[drafts & (whole.depth == levels)])):
            # Learn nothing from children here: V2 learns only from those of roots, as below.
            planner.drafted(np.tile(planner.children, (int(drafted.sum()), 1)))
            levels += 1
        trees = graphs(drafted, levels)
        copied = ((trees.origin == ORIGIN_NGRAM) & (np.arange(1 + NODES) <= trees.size[:, None])).any(axis=1)
        if len(pure := np.flatnonzero(drafted & ~copied)):
            planner.learn_children(below_root(trees, pure))
        return trees

    speculation._grow = grow
    speculation.drafter = SimpleNamespace(missed=lambda *_: missed, catch_up=catch_up)
    trees = speculation.propose(batch)
    return np.array([tree.num_nodes for tree in trees]), chosen, levels


def graphs_of(trees: FlatTrees) -> dict[str, np.ndarray]:
    return {"graph_size": trees.size, **{name: getattr(trees, name[6:])[:, 1:] for name in NAMES}}


def on_v2(plan: Plan, batch: DraftBatch, missed, known: FlatTrees, kinds) -> tuple[np.ndarray, np.ndarray, int]:
    """V2's budgets, with these graphs on the host, the requests for which it drafts, and its number of levels."""
    rows, planner = np.flatnonzero(batch.sampled), plan.speculation.planner
    planner.begin(len(missed), int(batch.length.sum()))
    if len(rows):
        plan.arrived(batch.token_rows[rows], kinds, Phase(), graphs_of(known), invalid=True)
    chosen = plan.choose(batch, batch.sampled, missed)
    if len(rows):  # V1 has learned from these graphs, too
        plan.arrived(batch.token_rows[rows], chosen[rows], plan.phase, graphs_of(known), invalid=True)
    return plan.shares[batch.token_rows], chosen == DRAFTED, plan.phase.levels or 0


def test_both_runners_choose_the_same():
    seen = []
    for episode in range(EPISODES):
        rng = np.random.default_rng(episode)
        costs = costs_of(rng, Planner(4, LEVELS, NODES).overhead.level_ms)
        host, late = (new_speculation(Planner(4, LEVELS, NODES, table)) for table in costs)
        plan = Plan(late, SLOTS, NODES, LEVELS)
        most = rng.choice([1, 4, SLOTS])
        for _ in range(STATES):
            count = int(rng.integers(1, most + 1))
            slots = rng.permutation(SLOTS)[:count]
            batch = DraftBatch(
                request_ids=[str(slot) for slot in slots],
                requests=[None] * count,
                num_outputs=np.ones(count, np.int64),
                sampled=rng.random(count) < 0.95,
                length=(length := rng.integers(1, 2000, count)),
                whole=length,
                token_ids=np.zeros((SLOTS, 1), np.int32),
                token_rows=slots,
                block_table=torch.zeros((count, 1), dtype=torch.int32),
                num_blocks=np.ones(count, np.int64),
                block_size=16,
            )
            missed = rng.integers(0, 150, count) * (rng.random(count) < 0.1) + 1
            graphs = made_up(rng, int(batch.sampled.sum()))
            budgets, drafted, levels = on_v1(host, batch, missed, graphs)
            rows = np.flatnonzero(batch.sampled)
            kinds = np.where(drafted[rows], DRAFTED, COPIES_ONLY)
            known = graphs(drafted[rows], levels)
            shares, kept, chosen = on_v2(plan, batch, missed, known, kinds)
            if (shares[rows] >= known.size).all():  # V2 may reserve rows for more nodes of the next graphs
                shares[rows] = np.minimum(shares[rows], known.size)
            assert np.array_equal(shares, budgets) and np.array_equal(kept, drafted) and chosen == levels
            for name in ("worth", "children", "level_share"):
                assert getattr(host.planner, name) == pytest.approx(getattr(late.planner, name), rel=1e-12)
            names = ("nodes_cut", "drafts_skipped", "drafting_switches")
            assert [host.stats.counts[name] for name in names] == [late.stats.counts[name] for name in names]
            seen.append((budgets.sum(), drafted.any(), host.planner.probing, host.planner.resting, levels))
    budgets, drafted, probed, rested, levels = map(np.array, zip(*seen, strict=True))
    assert len(seen) == 1000
    assert 100 < np.count_nonzero(budgets) < 900 and 100 < drafted.sum() < 900 and probed.any()
    assert not budgets[rested].any()
    assert set(levels) == set(range(LEVELS + 1))


@pytest.fixture
def plan():
    flat = Costs(ROWS, np.full(5, 10.0), np.full((LEVELS, 5), 0.1), attention=0.0)
    return Plan(new_speculation(Planner(4, LEVELS, NODES, flat)), 4, NODES, LEVELS)


def test_graphs_that_have_not_arrived(plan):
    """Before a graph arrives, a new drafted graph is assumed to be average, and copies to be those of the last graph.

    Without an earlier graph, no copies are assumed.
    """
    for slot, kind in ((1, DRAFTED), (3, COPIES_ONLY)):
        value = np.array([[0.9, 0.5, 0.3, 0, 0, 0, 0, 0]])
        origin = np.array([[ORIGIN_DRAFT, ORIGIN_NGRAM, ORIGIN_NGRAM, 0, 0, 0, 0, 0]])
        graphs = {"graph_size": np.array([3]), "graph_value": value, "graph_origin": origin, "graph_depth": origin}
        plan.arrived(np.array([slot]), np.array([kind]), Phase(), {**graphs, "graph_survival": value})
    average = FIRST_CHANCE * DECAY ** np.arange(NODES)
    values, size = plan._expected(np.arange(4), np.full(4, DRAFTED))
    assert size.tolist() == [NODES, 3, NODES, NODES]
    assert values[[0, 2, 3]] == pytest.approx(np.tile(average, (3, 1)))
    values, size = plan._expected(np.arange(4), np.array([COPIES_ONLY, COPIES_ONLY, NO_GRAPH, COPIES_ONLY]))
    assert size.tolist() == [0, 2, 0, 2] and values[1, :3] == pytest.approx([0.5, 0.3, 0])
    plan.admit(1)  # another request
    assert plan._expected(np.array([1]), np.array([COPIES_ONLY]))[1] == [0]


def test_a_block_has_all_depths_after_one_forward():
    flat = Costs(ROWS, np.full(5, 10.0), np.full((1, 5), 0.1), attention=0.0)
    plan = Plan(new_speculation(Planner(4, LEVELS, NODES, flat)), 4, NODES, num_levels=1)
    value, depth = np.array([[0.9, 0.8, 0.7, 0.1, 0, 0, 0, 0]]), np.array([[1, 2, 3, 1, 0, 0, 0, 0]])
    graphs = {"graph_size": np.array([4]), "graph_value": value, "graph_depth": depth}
    graphs |= {"graph_origin": np.where(value > 0, ORIGIN_DRAFT, 0), "graph_survival": value}
    plan.arrived(np.array([1]), np.array([DRAFTED]), Phase(1, 1), graphs)
    for levels in (1, None):
        plan.phase = Phase(1, levels)
        values, size = plan._expected(np.array([1]), np.array([DRAFTED]))
        assert size == [4] and values[0] == pytest.approx(value[0])


def test_empty_graphs_tell_of_a_draft_that_gives_nan(plan):
    """Otherwise the device has drafted nothing, as at the end of an answer."""
    graphs, planner = {name: np.zeros((1, NODES), np.int64) for name in NAMES}, plan.speculation.planner
    graphs["graph_size"] = np.array([0])
    before = FIRST_CHANCE
    for on_device, on_host in (False, False), (True, False), (False, True):
        plan.arrived(np.array([1]), np.array([DRAFTED]), Phase(1, 3, invalid=on_host), graphs, on_device)
        assert (planner.worth[0] < before) == (planner.children[0] < before) == (on_device or on_host)
        before = max(planner.worth[0], planner.children[0])


def test_graphs_that_grow_on_the_host_tell_of_nan(monkeypatch):
    speculator, counts = MagicMock(), Counter()
    speculator.plan = SimpleNamespace(active=True, phase=Phase(1, 3), shares=np.array([NODES]), captured=[])
    speculator.batch.return_value = SimpleNamespace(request_ids=["a"], requests=[None], token_rows=np.array([0]))
    speculator.speculation.stats.counts = counts
    speculator.speculation.follows_grammar.return_value = False
    speculator.speculation.take_grammar_trees.return_value = {}
    for name in ("to_device", "_values"):
        monkeypatch.setattr(host_growth, name, lambda *_: None)
    for found in (0, 1):
        speculator.speculation.propose = lambda batch, found=found: [
            counts.update(draft_rows_invalid=found) or NO_NODES
        ]
        speculator.speculation.draft_kv.lengths.return_value = np.zeros(1)
        speculator.device = torch.device("cpu")
        host_growth.grow_on_host(speculator, None, np.array([0]), np.array([DRAFTED]))
        assert speculator.plan.phase == Phase(1, 3, invalid=found > 0)


@pytest.mark.parametrize("row_ms", [0.0, 0.3, 1.0, 20.0])
def test_one_share_for_all_is_the_best_that_was_captured(row_ms):
    rng, seen = np.random.default_rng(3), set()
    planner = Planner(4, LEVELS, NODES, Costs(ROWS, 10 + row_ms * ROWS, np.full(5, 0.1), attention=1e-4))
    plan = Plan(new_speculation(planner), SLOTS, NODES, LEVELS)
    plan.captured = [0, 2, NODES]
    for _ in range(20):
        count = int(rng.integers(1, SLOTS + 1))
        size = rng.integers(0, NODES + 1, count).astype(np.int32)
        real = np.arange(NODES) < size[:, None]
        values = np.where(real, -np.sort(-rng.uniform(0.001, 1.0, (count, NODES)), axis=1), 0).astype(np.float32)
        planner.begin(count, 100 * count)
        chosen = planner.sizes(values, size, np.full(count, 100), size > 0, plan.captured)
        rates = {}
        for share in plan.captured:
            rows, graph_ms = count * (1 + share), planner.overhead.graph_ms if share else 0
            took = planner.plain_ms + graph_ms + planner.costs.target_ms(rows, 100 * rows)
            rates[share] = (count + values[:, :share].sum()) / took
        assert len(set(chosen)) == 1 and rates[chosen[0]] == pytest.approx(max(rates.values()), rel=1e-6)
        assert not size.any() or planner.planned[0] == count * (1 + chosen[0])
        seen.add(int(chosen[0]))
    assert seen >= {0.0: {NODES}, 20.0: {0}}.get(row_ms, {2})


def test_levels_that_were_captured(plan):
    """The planner takes the smallest captured number of levels that has room for all levels that pay."""
    planner, chain = plan.speculation.planner, [np.array([value]) for value in (0.9, 0.8, 0.01, 0.7, 0.6)]
    planner.children[:] = 0.9, 0, 0, 0
    for draft_ms, levels in ((np.full(LEVELS, 0.1), 3), (np.full(LEVELS, 50.0), 1), (np.array([0.1, *[50.0] * 5]), 1)):
        planner.costs = Costs(ROWS, np.full(5, 10.0), np.tile(draft_ms[:, None], 5), attention=0.0)
        planner.begin(1, 100)
        assert planner.num_levels(1, 1, chain, range(1, LEVELS + 1)) == levels
        assert planner.rows == [1] * levels
        for options in ([1, 3, 6], [2, 6], [6]):
            assert planner.num_levels(1, 1, chain, options) == next(option for option in options if option >= levels)
        assert planner.forwards_ms() == pytest.approx(draft_ms.sum())


def test_graphs_of_other_levels(plan):
    """With fewer levels, deeper drafted nodes are missing. New requests have average graphs at each level."""
    value = np.array([[0.875, 0.5, 0.375, 0.25, 0, 0, 0, 0]])
    origin = np.array([[ORIGIN_DRAFT, ORIGIN_NGRAM, ORIGIN_AGREED, ORIGIN_DRAFT, 0, 0, 0, 0]])
    depth = np.array([[1, 2, 3, 2, 0, 0, 0, 0]])
    graphs = {"graph_size": np.array([4]), "graph_value": value, "graph_origin": origin, "graph_depth": depth}
    plan.arrived(np.array([1]), np.array([DRAFTED]), Phase(), {**graphs, "graph_survival": value})
    for plan.levels in (list(range(1, LEVELS + 1)), [1, 3, 6], [6]):  # for any captured numbers of levels
        known = plan._frontiers(np.array([1]))
        assert [level.tolist() for level in known] == [[0.875], [0.25], [0.375], [], []]
    children = FIRST_CHANCE * DECAY ** np.arange(4)
    both = plan._frontiers(np.array([1, 2]))
    assert both[0] == pytest.approx([0.875, *children])
    assert both[1] == pytest.approx([0.25, *sorted(np.outer(children, children).ravel())[: -NODES - 1 : -1]])
    for levels, left in ((6, [0.875, 0.5, 0.375, 0.25]), (2, [0.875, 0.5, 0.375, 0.25]), (1, [0.875, 0.5, 0.375])):
        plan.phase = Phase(1, levels)
        values, size = plan._expected(np.array([1]), np.array([DRAFTED]))
        assert size == len(left) and values[0, : len(left)] == pytest.approx(left)


def test_times_of_levels_from_those_of_phases():
    phases = np.array([[3.0, 6], [5.0, 4], [11.0, 16]])  # one phase was slowed down by other load
    assert by_level([1, 2, 5], phases).tolist() == [[3, 6], [2, 0], [2, 4], [2, 4], [2, 4]]


def test_rows_for_more_nodes_than_the_latest_graph_has(plan):
    """More rows are reserved if, at this cost of rows, an average graph would use them."""
    values, size = np.array([[0.9, 0.5, *[0] * 6]], np.float32), np.array([2], np.int32)
    planner = plan.speculation.planner
    for kind, row_ms, expected in ((DRAFTED, 0.0, NODES), (DRAFTED, 1.0, 3), (COPIES_ONLY, 0.0, 2), (DRAFTED, 3.0, 2)):
        planner.costs = Costs(ROWS, 10 + row_ms * ROWS, np.full(5, 0.1), attention=0.0)
        planner.begin(1, 100)
        assert plan._sizes(values, size, np.array([100]), np.array([kind])) == [expected]


def test_without_costs_every_node_is_verified(plan):
    """This applies to requests with a graph. The others get no rows for nodes."""
    plan.speculation.planner.costs = None
    plan.shares[:] = 1
    batch = SimpleNamespace(token_rows=np.array([2, 0]))
    assert plan.choose(batch, np.array([True, False]), np.zeros(2)).tolist() == [DRAFTED, NO_GRAPH]
    assert plan.shares.tolist() == [0, 1, NODES, 1] and not plan.active


@pytest.mark.parametrize("levels", [None, 0, 2])
def test_a_given_plan(levels):
    """Graphs grown on the host have the planned number of levels, and the step's plan is not changed."""
    planner = Planner(4, LEVELS, NODES, Costs(ROWS, 10.0 * ROWS, np.tile(10.0 * ROWS, (LEVELS, 1)), attention=0.0))
    planner.begin(3, 30)
    before, run = dict(vars(planner)), 0
    with planner.given(levels):
        planner.begin(1, 10)
        if planner.wants_drafts(1, np.zeros(0)):
            while run < LEVELS and (run == 0 or planner.level_size(np.full(2, 1e-9))):
                planner.drafted(np.ones((1, 4), np.float32))
                run += 1
        assert planner.choose(*np.ones((5, 1, 1)))[0] == 1
    assert run == (LEVELS if levels is None else levels) and vars(planner) == before


def test_no_request_waits_for_nodes_of_others():
    assert nodes_that_fit(NODES, 100, 11) is None
    assert nodes_that_fit(NODES, 20, 7) == [8, 8, 8, 5, 4, 3, 2, 1]
    assert nodes_that_fit(NODES, 2, 4) == [8, 1, 0, 0, 0]


def test_no_request_waits_for_nodes_of_others_without_async_scheduling():
    drafts = [[1, 2, 3, 4], [], [5, 6]]
    assert cut_to_fit(drafts, 9, more=0) == cut_to_fit(drafts, 10, more=1) == drafts
    assert cut_to_fit(drafts, 8, more=0) == [[1, 2, 3], [], [5, 6]]
    assert cut_to_fit(drafts, 6, more=0) == [[1], [], [5]]
    assert cut_to_fit(drafts, 9, more=1) == [[1], [], [5]]
    assert cut_to_fit(drafts, 3, more=1) == [[], [], []]
    assert cut_to_fit([], 1, more=1) == []


def test_no_prompt_waits_for_rows_that_the_plan_leaves_out(monkeypatch):
    """With async scheduling, rows are reserved for all nodes before the worker has planned the step."""
    monkeypatch.setattr(GraphScheduling, "schedule", lambda self: [len(one.spec_token_ids) for one in self.running])
    scheduler = GraphAsyncScheduler.__new__(GraphAsyncScheduler)
    placeholders = [-1] * NODES  # one list for all requests, as vLLM does it
    running = [SimpleNamespace(spec_token_ids=placeholders, is_prefill_chunk=False) for _ in range(3)]
    scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting = running, [], []
    scheduler.max_num_running_reqs, scheduler.planned = 4, 2
    assert scheduler.schedule() == [NODES] * 3  # a step without prompts keeps the widths of CUDA graphs
    scheduler.waiting = ["starts"]
    assert scheduler.schedule() == [2, 2, 2] and len(placeholders) == NODES
    scheduler.waiting, scheduler.planned = [], 0
    running.append(SimpleNamespace(spec_token_ids=[], is_prefill_chunk=True))
    assert scheduler.schedule() == [1, 1, 1, 0]  # a probe may verify one node
    running[3].is_prefill_chunk, scheduler.waiting = False, ["has no place"]
    running[0].spec_token_ids = placeholders
    assert scheduler.schedule() == [NODES, 1, 1, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 16), max_size=8), st.integers(1, 80), st.integers(0, 3))
def test_nodes_are_shared_fairly_and_completely(sizes, num_tokens, more):
    """No request gets fewer nodes than another unless it has no more, and another node for each does not fit."""
    cut = [*map(len, cut_to_fit([[0] * size for size in sizes], num_tokens, more))]
    share = max(cut, default=0)
    assert cut == [min(size, share) for size in sizes]
    left = num_tokens - len(sizes) - more - sum(cut)
    assert left >= 0 or share == 0
    if cut != sizes:
        lacking = sum(size > share for size in sizes)
        assert left - more * share < lacking + more


@pytest.mark.parametrize("queue", ["waiting", "kv_holding_waiting"])
def test_nodes_leave_room_for_a_request_of_either_queue(monkeypatch, queue):
    """vLLM has a queue of its own for requests that keep their KV, such as sessions of streaming input."""
    monkeypatch.setattr(GraphScheduling, "schedule", lambda self: None)
    scheduler = GraphScheduler.__new__(GraphScheduler)
    running = SimpleNamespace(spec_token_ids=[1, 2, 3], is_prefill_chunk=False)
    scheduler.running, scheduler.max_num_running_reqs = [running], 2
    scheduler.waiting, scheduler.kv_holding_waiting, scheduler.max_num_scheduled_tokens = [], [], 4
    for waiting, nodes in ([], [1, 2, 3]), ([object()], [1]):
        setattr(scheduler, queue, waiting)
        scheduler.schedule()
        assert scheduler.running[0].spec_token_ids == nodes


@pytest.mark.parametrize(
    ("v2", "num_tokens", "threshold", "pads"),
    [(True, 36, 0, True), (True, 35, 0, False), (False, 99, 0, False), (True, 36, 9, True), (True, 36, 8, False)],
)
def test_a_request_of_one_token_gets_placeholders_where_those_of_all_requests_fit(
    monkeypatch, v2, num_tokens, threshold, pads
):
    """Elsewhere, vLLM would let it wait for room, and all requests behind it."""

    def init(self):
        self.use_v2_model_runner, self.num_spec_tokens, self.max_num_scheduled_tokens = v2, NODES, num_tokens
        self.scheduler_config = SimpleNamespace(max_num_seqs=4, long_prefill_token_threshold=threshold)
        self.structured_output_manager, self.vllm_config = None, None

    monkeypatch.setattr(Scheduler, "__init__", init)
    assert GraphScheduling().dynamic_sd_lookup == (None if pads else 5 * [NODES])
