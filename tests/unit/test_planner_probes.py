"""What a probe teaches the planner, together with the calibration that it plans by."""

import numpy as np
import pytest

from vllm_gsd.method.constants import NATIVE
from vllm_gsd.planner.calibration import Calibration
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import PROBE_AT_MOST, PROBE_REQUESTS, Planner

NUM_REQUESTS, LEVELS = 16, 6
# Each level has a likely node and an unlikely one, both children of the likely node above. A block drafts them at once.
LIKELY, UNLIKELY = 0.8, 0.1
DEPTH = np.repeat(np.arange(1, LEVELS + 1), 2)
SURVIVAL = (LIKELY ** (DEPTH - 1) * np.tile([LIKELY, UNLIKELY], LEVELS)).astype(np.float32)
NODES = len(DEPTH)


class Serving:
    """Steps of a full batch, in which graphs gain a fifth while the text suits the draft."""

    def __init__(self, seed):
        rows = np.array([1, 16, 64, 256])
        costs = Costs(rows, 20 + 0.6 * rows, 4 + 0.15 * rows, attention=0.0)
        self.planner, self.calibration = Planner(4, LEVELS, NODES, costs, LEVELS), Calibration()
        self.random = np.random.default_rng(seed)

    def accepted(self, count, suits):
        """Whether each of the nodes of ``count`` graphs is accepted, bool [count, NODES]."""
        chance = self.random.random((count, LEVELS))
        likely, unlikely = chance < LIKELY * suits, (chance >= LIKELY * suits) & (chance < (LIKELY + UNLIKELY) * suits)
        above = np.pad(likely.cumprod(1, dtype=bool)[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        return np.stack([above & likely, above & unlikely], 2).reshape(count, NODES)

    def step(self, suits):
        """Run a step in which a node is accepted ``suits`` times as often as its probability says; return the nodes."""
        planner = self.planner
        planner.begin(NUM_REQUESTS, 300 * NUM_REQUESTS)
        verified = 0
        if planner.wants_drafts(NUM_REQUESTS, np.zeros(0)):
            count = PROBE_REQUESTS if planner.probing else NUM_REQUESTS
            planner.caught_up(LEVELS * count)
            planner.drafted(np.tile(np.array([LIKELY, UNLIKELY, 0.05, 0.02], np.float32), (count, 1)))
            value = self.calibration.value(np.full(NODES, NATIVE), DEPTH, SURVIVAL)
            order = np.argsort(-value, kind="stable")
            size, all_drafted = np.full(count, NODES, np.int32), np.ones(count, np.bool_)
            values = np.tile(value[order], (count, 1))
            chosen = planner.choose(values, size, np.full(count, 300), all_drafted, all_drafted)
            seen = np.arange(NODES) < chosen[:, None]
            verified, nodes = int(seen.sum()), order[np.nonzero(seen)[1]]
            accepted = self.accepted(count, suits)[:, order][seen]
            planner.learn_accepted(float(value[nodes].sum()), float(accepted.sum()))
            self.calibration.observe(np.full(verified, NATIVE), DEPTH[nodes], SURVIVAL[nodes], accepted)
        if not verified:
            self.calibration.rest()
        return verified


@pytest.mark.parametrize("seed", range(3))
def test_drafting_comes_back_after_a_text_that_suited_the_draft_badly(seed):
    """A probe that verified only nodes that seem worth it would never learn that deeper ones have become better."""
    serving = Serving(seed)
    for suits, steps in ((1.0, 500), (0.4, 2000), (1.0, 3000)):
        for _ in range(steps):
            serving.step(suits)
        assert serving.planner.drafting == (suits == 1.0)


def test_a_probe_verifies_whole_graphs_of_few_requests():
    serving = Serving(0)
    verified = [serving.step(0.0) for _ in range(6 * PROBE_AT_MOST)][PROBE_AT_MOST:]
    assert set(verified) == {0, PROBE_REQUESTS * NODES}
