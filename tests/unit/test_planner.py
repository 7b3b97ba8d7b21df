"""The planner: what it chooses against brute force, and that it goes on and off where it pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gsd.core.calibration import NATIVE, NGRAM, Calibration, calibrated
from vllm_gsd.core.costs import Costs
from vllm_gsd.core.planner import PROBE_EVERY, Planner

# Up to 8 rows cost little more than one, beyond them each adds a millisecond; as measured on a CPU.
ROWS = np.array([1, 8, 16, 64, 256])
COSTS = Costs(ROWS, np.array([20.0, 21, 29, 77, 269]), np.array([1.0, 1.2, 1.4, 3, 9]), attention=1e-4)
GPU = Costs(ROWS, np.full(5, 20.0), np.full(5, 1.0), attention=0.0)


def test_costs_between_and_beyond_the_table():
    assert COSTS.target_ms(1) == COSTS.overhead + 20
    assert COSTS.target_ms(12) == COSTS.overhead + 25
    assert COSTS.target_ms(512) == pytest.approx(COSTS.overhead + 269 + 256)
    assert COSTS.target_ms(1, 1000) == pytest.approx(COSTS.target_ms(1) + 0.1)
    np.testing.assert_allclose(COSTS.draft_ms(np.array([1, 256])), [1, 9])


def planned(costs, num_requests, context=100):
    planner = Planner(4, costs)
    planner.begin(num_requests, context * num_requests)
    return planner


values_of_rows = st.lists(
    st.lists(st.floats(0.001, 1.0), max_size=4).map(lambda row: sorted(row, reverse=True)),
    min_size=1,
    max_size=4,
)


@given(values_of_rows, st.integers(0, 60))
def test_the_choice_is_the_best_of_all(rows, others):
    size = np.array([len(row) for row in rows], np.int32)
    values = np.zeros((len(rows), 4), np.float32)
    for place, row in enumerate(rows):
        values[place, : len(row)] = row
    planner = planned(COSTS, len(rows) + others)
    planner.draft_ms = 3.0
    chosen = planner.choose(values, size, np.full(len(rows), 100))
    assert (chosen >= 0).all() and (chosen <= size).all()

    def rate(sizes):
        tokens = planner.num_requests + sum(float(values[i, :n].sum()) for i, n in enumerate(sizes))
        extra = int(sum(sizes))
        return tokens / (3.0 + COSTS.target_ms(planner.num_requests + extra, planner.context + 100 * extra))

    best = max(rate(sizes) for sizes in np.ndindex(*(size + 1)))
    assert rate(chosen) == pytest.approx(best, rel=1e-6)


def test_without_costs_everything_is_drafted_and_verified():
    planner = planned(None, 3)
    assert planner.wants_drafts(3)
    assert planner.wants_level(np.full(2, 1e-6))
    assert not planner.wants_level(np.zeros(0))
    size = np.array([2, 1], np.int32)
    assert planner.choose(np.full((2, 2), 1e-6, np.float32), size, np.zeros(2)).tolist() == [2, 1]


def test_speculates_alone_and_not_in_a_full_batch():
    assert planned(COSTS, 1).wants_drafts(1)
    assert not planned(COSTS, 64).wants_drafts(64)
    # Where rows are free it does in either.
    assert planned(GPU, 64).wants_drafts(64)


def test_nothing_is_verified_where_rows_cost_more_than_they_win():
    values, size = np.full((64, 1), 0.3, np.float32), np.ones(64, np.int32)
    assert planned(COSTS, 64).choose(values, size, np.full(64, 100)).sum() == 0
    assert planned(GPU, 64).choose(values, size, np.full(64, 100)).sum() == 64


def test_long_contexts_get_fewer_nodes():
    costs = Costs(ROWS, np.array([20.0, 21, 29, 77, 269]), np.ones(5), attention=2e-3)
    values, size = np.full((1, 4), 0.2, np.float32), np.full(1, 4, np.int32)
    assert planned(costs, 1, 10).choose(values, size, np.array([10])).sum() == 4
    assert planned(costs, 1, 4000).choose(values, size, np.array([4000])).sum() == 0


def test_tries_again_now_and_then():
    planner = Planner(4, COSTS)
    wanted = []
    for _ in range(2 * PROBE_EVERY):
        planner.begin(64, 6400)
        wanted.append(planner.wants_drafts(64))
        if wanted[-1]:
            assert not planner.wants_level(np.ones(64))
            chosen = planner.choose(np.full((64, 3), 0.3, np.float32), np.full(64, 3, np.int32), np.full(64, 100))
            assert (chosen == 1).all()
    assert sum(wanted) == 2


def test_drafts_that_are_never_verified_are_tried_too():
    """Average drafts promise enough, these ones don't: without a try, calibration would never hear of it."""
    planner = Planner(4, COSTS)
    chosen = []
    for _ in range(2 * PROBE_EVERY):
        planner.begin(1, 100)
        assert planner.wants_drafts(1)
        chosen.append(
            int(planner.choose(np.full((1, 2), 1e-3, np.float32), np.full(1, 2, np.int32), np.full(1, 99))[0])
        )
    assert chosen.count(1) == 2
    assert chosen.count(0) == len(chosen) - 2


def test_sources_without_a_draft_are_tried_again_too():
    planner = Planner(4, COSTS)
    chosen = []
    for _ in range(2 * PROBE_EVERY):
        planner.begin(64, 6400)
        chosen.append(
            planner.choose(np.full((64, 2), 0.1, np.float32), np.full(64, 2, np.int32), np.full(64, 99)).sum()
        )
    assert sorted(set(chosen)) == [0, 64]
    assert chosen.count(64) == 2


class TestCalibration:
    def test_starts_at_the_promise(self):
        survival = np.array([1.0, 0.6, 0.3, 0.01])
        np.testing.assert_allclose(Calibration().value(NATIVE, np.array([1, 2, 3, 9]), survival), survival)

    def test_learns_what_is_accepted_by_source_and_depth(self):
        calibration, random = Calibration(), np.random.default_rng(0)
        for _ in range(3000):
            survival = random.uniform(0.3, 0.45, 4)
            accepted = random.uniform(size=4) < survival * np.array([0.5, 0.1, 1.0, 2.0])
            calibration.observe(np.array([0, 0, 2, 2]), np.array([1, 2, 1, 7]), survival, accepted)
        value = calibration.value(NATIVE, np.array([1, 2]), np.full(2, 0.4))
        np.testing.assert_allclose(value, [0.2, 0.04], rtol=0.25)
        value = calibration.value(NGRAM, np.array([1, 3]), np.full(2, 0.4))
        np.testing.assert_allclose(value, [0.4, 0.8], rtol=0.25)
        assert calibration.value(NATIVE, np.array([1]), np.array([0.2]))[0] == pytest.approx(0.2, rel=0.01)  # other bin

    def test_forgets(self):
        calibration = Calibration()
        for _ in range(20):
            calibration.observe(np.array([0]), np.array([1]), np.array([0.4]), np.array([False]))
        low = calibration.factor[0, 0, 1]
        for _ in range(3000):
            calibration.observe(np.array([0]), np.array([2]), np.array([0.4]), np.array([False]))
        assert low < 0.2
        assert calibration.factor[0, 0, 1] > 0.95

    def test_never_above_one_and_the_compiled_twin_agrees(self):
        calibration, random = Calibration(), np.random.default_rng(1)
        calibration.factor[:] = random.uniform(0, 3, calibration.factor.shape)
        depth, survival = random.integers(1, 7, 200), random.uniform(0, 1, 200).astype(np.float32)
        survival[:3] = [1.0, 0.5, 0.0]
        value = calibration.value(NGRAM, depth, survival)
        assert value.max() <= 1
        twin = [calibrated(calibration.factor, NGRAM, d, s) for d, s in zip(depth, survival, strict=True)]
        np.testing.assert_allclose(value, twin, rtol=1e-6)
