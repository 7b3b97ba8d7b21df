"""Probes: steps that draft for a few requests although drafting does not seem to pay."""

import numpy as np
import pytest

from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import PROBE_AT_MOST, PROBE_EVERY, PROBE_REQUESTS, Planner

NUM_REQUESTS, NODES = 16, 6
ROWS = np.array([1, 16, 64, 256])
VALUES = np.array([0.5, 0.05, 0.01, 0.001, 0.001, 0.001], np.float32)


@pytest.fixture
def planner():
    """A planner that has drafted graphs of too little worth for hundreds of steps."""
    planner = Planner(4, 6, NODES, Costs(ROWS, 20 + 2.0 * ROWS, 4 + 1.0 * ROWS, attention=0.0))
    for _ in range(4 * PROBE_AT_MOST):
        step(planner)
    assert not planner.drafting and planner.pause == PROBE_AT_MOST
    return planner


def step(planner):
    """Run a step whose drafted graphs have ``VALUES``; return how many nodes of each are verified."""
    planner.begin(NUM_REQUESTS, 300 * NUM_REQUESTS)
    if not planner.wants_drafts(NUM_REQUESTS, np.zeros(0)):
        return []
    count = PROBE_REQUESTS if planner.probing else NUM_REQUESTS
    planner.drafted(np.tile(VALUES[:4], (count, 1)))
    size, drafted = np.full(count, NODES, np.int32), np.ones(count, np.bool_)
    return planner.choose(np.tile(VALUES, (count, 1)), size, np.full(count, 300), drafted, drafted).tolist()


def test_a_probe_verifies_whole_graphs(planner):
    """Of nodes that it left out, it would never be learned that they have become better."""
    verified = [sizes for sizes in (step(planner) for _ in range(PROBE_AT_MOST)) if sizes]
    assert verified == [[NODES] * PROBE_REQUESTS]
    assert planner.planned[0] == NUM_REQUESTS + (NODES * PROBE_REQUESTS if planner.probing else 0)


def test_copies_of_other_requests_are_not_verified_for_a_probe(planner):
    while not planner.probing:
        step(planner)
    values, drafted = np.tile(VALUES, (3, 1)), np.array([False, True, True])
    sizes = planner.sizes(values, np.full(3, NODES, np.int32), np.full(3, 300), drafted)
    assert sizes.tolist() == [0, NODES, NODES]


@pytest.mark.parametrize(("promised", "accepted", "soon"), [(1.0, 4.0, True), (1.0, 3.0, False), (0.0, 1.0, False)])
def test_a_surprise_is_followed_by_a_probe(planner, promised, accepted, soon):
    """The text may have come to suit the draft."""
    while not planner.probing:
        step(planner)
    planner.learn_accepted(promised, accepted)
    assert planner.next_probe - planner.steps == (PROBE_EVERY if soon else PROBE_AT_MOST)
    planner.drafting, before = True, planner.next_probe
    planner.learn_accepted(1.0, 9.0)
    assert planner.next_probe == before
