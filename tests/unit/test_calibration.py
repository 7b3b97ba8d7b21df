"""What is learned of acceptance: by source, depth and probability, and by request."""

import numpy as np
import pytest

from vllm_gsd.method.constants import MERGED, NATIVE, NGRAM, NUM_SOURCES, OFF_BELOW, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.planner.calibration import Calibration, SourceTrust


class TestCalibration:
    def test_starts_at_the_promise(self):
        survival = np.array([1.0, 0.6, 0.3, 0.01])
        np.testing.assert_allclose(Calibration().value(np.full(4, NATIVE), np.array([1, 2, 3, 9]), survival), survival)

    def test_learns_what_is_accepted_by_source_and_depth(self):
        calibration, random = Calibration(), np.random.default_rng(0)
        for _ in range(3000):
            survival = random.uniform(0.3, 0.45, 4)
            accepted = random.uniform(size=4) < survival * np.array([0.5, 0.1, 1.0, 2.0])
            calibration.observe(np.array([0, 0, 2, 2]), np.array([1, 2, 1, 7]), survival, accepted)
        value = calibration.value(np.full(2, NATIVE), np.array([1, 2]), np.full(2, 0.4))
        np.testing.assert_allclose(value, [0.2, 0.04], rtol=0.25)
        value = calibration.value(np.full(2, NGRAM), np.array([1, 3]), np.full(2, 0.4))
        np.testing.assert_allclose(value, [0.4, 0.8], rtol=0.25)
        assert calibration.value(np.full(1, NATIVE), np.array([1]), np.array([0.2]))[0] == pytest.approx(
            0.2, rel=0.01
        )  # other bin

    def test_forgets(self):
        calibration = Calibration()
        for _ in range(20):
            calibration.observe(np.array([0]), np.array([1]), np.array([0.4]), np.array([False]))
        low = calibration.factor[0, 0, 1]
        for _ in range(3000):
            calibration.observe(np.array([0]), np.array([2]), np.array([0.4]), np.array([False]))
        assert low < 0.2
        assert calibration.factor[0, 0, 1] > 0.95

    def test_steps_that_verify_nothing_take_the_weight_from_evidence_and_leave_the_factors(self):
        calibration, one = Calibration(), np.ones(1, np.int64)
        for _ in range(500):
            calibration.observe(np.zeros(8, int), np.ones(8, int), np.full(8, 0.6), np.arange(8) == 0)
        for _ in range(5000):
            calibration.rest()
        assert calibration.value(one - 1, one, np.full(1, 0.6))[0] == pytest.approx(1 / 8, rel=0.05)
        for _ in range(20):
            calibration.observe(one - 1, one, np.full(1, 0.6), np.ones(1, np.bool_))
        assert calibration.value(one - 1, one, np.full(1, 0.6))[0] > 0.6

    def test_copies_that_were_wrong_in_one_large_step_are_tried_again(self):
        """Copies at the beginnings of many answers may all be wrong. Drafted nodes are left to the planner's probes."""
        calibration, many, one = Calibration(), np.ones(16, np.int64), np.ones(1, np.int64)
        for source in (NATIVE, NGRAM):
            calibration.observe(source * many, many, np.full(16, 0.8), np.zeros(16, np.bool_))
            assert calibration.value(source * one, one, np.full(1, 0.8)) < 0.1
        for _ in range(150):
            calibration.rest()
        assert calibration.value(NATIVE * one, one, np.full(1, 0.8)) < 0.1
        assert calibration.value(NGRAM * one, one, np.full(1, 0.8)) > 0.45

    def test_never_above_one(self):
        calibration, random = Calibration(), np.random.default_rng(1)
        calibration.factor[:] = random.uniform(0, 3, calibration.factor.shape)
        depth, survival = random.integers(1, 7, 200), random.uniform(0, 1, 200).astype(np.float32)
        survival[:3] = [1.0, 0.5, 0.0]
        value = calibration.value(np.full(200, NGRAM), depth, survival)
        assert value.max() <= 1
        bins = np.clip(-np.ceil(np.log2(np.maximum(survival, 1e-9))), 0, 7).astype(int)
        factor = calibration.factor[NGRAM, np.minimum(depth, 3) - 1, bins]
        np.testing.assert_allclose(value, np.minimum(1, survival * factor), rtol=1e-6)


class TestSourceTrust:
    def test_a_request_without_experience_is_as_calibrated(self):
        assert (SourceTrust().of(["a", "b"]) == 1).all()
        assert SourceTrust().of([]).shape == (0, NUM_SOURCES)

    def test_each_request_and_source_for_itself(self):
        trust = SourceTrust()
        for step in range(80):
            source, even = np.array([NGRAM, NATIVE, NGRAM, NATIVE]), step % 2 == 0
            accepted = np.array([True, even, False, even])
            trust.observe(["copies", "free"], np.array([0, 0, 1, 1]), source, np.full(4, 0.5), accepted)
        copies, free = trust.of(["copies", "free"])
        assert copies[NGRAM] > 1.6
        assert free[NGRAM] < OFF_BELOW
        assert copies[NATIVE] == free[NATIVE] == pytest.approx(1, abs=0.1)
        assert copies[MERGED] == 1

    def test_what_is_off_is_tried_again(self):
        trust = SourceTrust()
        for _ in range(80):
            trust.observe(["a"], np.zeros(1, int), np.array([NGRAM]), np.array([0.6]), np.array([False]))
        assert trust.of(["a"])[0, NGRAM] < OFF_BELOW
        for _ in range(120):
            trust.observe(["a"], np.zeros(1, int), np.array([NATIVE]), np.array([0.6]), np.array([True]))
        assert trust.of(["a"])[0, NGRAM] > OFF_BELOW

    def test_an_only_source_that_is_off_is_tried_again(self):
        trust = SourceTrust()
        for _ in range(80):
            trust.observe(["a", "b"], np.arange(2), np.full(2, NGRAM), np.full(2, 0.6), np.zeros(2, np.bool_))
        off = trust.of(["b"])
        for _ in range(120):
            trust.fade(["never seen", "a"])
        assert trust.of(["a"])[0, NGRAM] > OFF_BELOW > off[0, NGRAM]
        assert (trust.of(["b"]) == off).all() and set(trust.seen) == {"a", "b"}

    def test_forgets_requests(self):
        trust = SourceTrust()
        trust.observe(["a"], np.zeros(1, int), np.array([NGRAM]), np.array([0.6]), np.array([False]))
        trust.forget("a")
        trust.forget("never seen")
        assert not trust.seen

    def test_flattening_ranks_by_it(self):
        graphs = new_graphs(2, 8)
        for row in range(2):
            reset(graphs, row, np.array([1], np.int64))
            add_child(graphs, row, 0, 5, np.float32(0.5), ORIGIN_DRAFT)
            add_child(graphs, row, 0, 6, np.float32(0.6), ORIGIN_NGRAM)
        trust = np.ones((2, NUM_SOURCES), np.float32)
        trust[1, NGRAM] = 0.5
        both = np.full(2, 2, np.int32)
        trees = flatten(graphs, both, both, trust=trust)
        assert trees.token.tolist() == [[1, 6, 5], [1, 5, 6]]
        np.testing.assert_allclose(trees.value[:, 1:], [[0.6, 0.5], [0.5, 0.3]], rtol=1e-6)
