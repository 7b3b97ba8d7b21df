"""Graphs by request slot, the rows that a step verifies, and asynchronous copies to the host.

``tests/kernels/gpu/test_lay_out.py`` tests the device's part of laying out rows.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_v2_rows import tree_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.v2.late_copies import LateCopies
from vllm_gsd.engine.v2.model_runner import GraphModelRunner
from vllm_gsd.engine.v2.proposals import Proposals, to_device, to_host
from vllm_gsd.engine.v2.verified_rows import DeviceStep
from vllm_gsd.engine.verify.draft_tree import NO_NODES
from vllm_gsd.upstream import wire

CPU = torch.device("cpu")
TREES = [tree_of([0, 0, 1]), NO_NODES, tree_of([0, 1]), NO_NODES, tree_of([0, 0, 1, 2])]
SLOTS = np.array([4, 0, 7, 2, 5])


def test_which_rows_are_verified():
    batch = SimpleNamespace(
        num_draft_tokens_per_req=np.array([5, 0, 4], np.int32),
        num_reqs=3,
        query_start_loc_np=np.array([0, 6, 13, 18, 18], np.int32),  # the second has a prompt
    )
    step = DeviceStep(Proposals(4, 5, CPU), batch)
    assert step.sizes.tolist() == [6, 1, 5] and step.batch_ends.tolist() == [6, 13, 18]
    assert step.tree_requests.tolist() == [0, 2] and step.has_nodes and not step.whole
    batch.num_draft_tokens_per_req = None
    step = DeviceStep(Proposals(4, 5, CPU), batch)
    assert step.sizes.tolist() == [1, 1, 1] and not step.has_nodes and not len(step.tree_requests)


def test_rows_of_decodes_that_are_attended_by_row():
    """Those without nodes too, but no prompts, not even the last token of one."""
    batch = SimpleNamespace(
        num_draft_tokens_per_req=None, num_reqs=4, query_start_loc_np=np.array([0, 1, 8, 9, 10], np.int32),
        is_prefilling_np=np.array([False, True, False, True]),
    )  # fmt: skip
    step = DeviceStep(Proposals(4, 5, CPU), batch, by_row=True)
    assert step.tree_requests.tolist() == [0, 2] and not step.has_nodes and not step.whole


def test_trees_come_back_as_they_went():
    kept = Proposals(8, 5, CPU)
    values = [tree.survival / 2 for tree in TREES]
    kept.store(torch.from_numpy(SLOTS), to_device(TREES, values, 5, CPU))
    assert torch.equal(kept.trees.value, kept.trees.survival / 2)
    trees = to_host({name: values[SLOTS].numpy() for name, values in kept.trees._asdict().items()})
    for got, given in zip(trees, TREES, strict=True):
        assert (got is None) == (given.num_nodes == 0)
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival"):
            if got is not None:
                assert np.array_equal(getattr(got, name), getattr(given, name))
                assert getattr(got, name).dtype == getattr(given, name).dtype


class Event:
    """A CUDA event whose state the test sets."""

    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True


def test_what_comes_from_the_host_has_arrived():
    late = LateCopies(CPU)
    given = {
        "flags": torch.tensor([[True], [False], [True]]),
        "values": torch.tensor([1, 2]),
        "nothing": torch.zeros((3, 0), dtype=torch.int32),
        "part": torch.arange(6, dtype=torch.float32).view(2, 3)[:, 1],
    }
    kept = {name: values.clone() for name, values in given.items()}
    late.send("first", given)
    given["values"].zero_()
    ((label, copies),) = late.take(wait=False)
    assert label == "first" and copies.keys() == kept.keys()
    for name, values in kept.items():
        assert np.array_equal(copies[name], values.numpy()) and copies[name].dtype == values.numpy().dtype
    assert not list(late.take(wait=True))


def test_the_last_step_is_counted_when_the_server_falls_idle(monkeypatch):
    """vLLM then runs a step without tokens, which tells the runner of the requests that have finished."""
    late, counts = LateCopies(CPU, in_step=True), Counter()
    late.send(3, {"values": torch.tensor([1])})
    runner = GraphModelRunner.__new__(GraphModelRunner)
    runner.speculator = SimpleNamespace(
        speculation=SimpleNamespace(stats=GraphStats()),
        share_of=None,
        learn=lambda wait=False: counts.update(target_steps=sum(label for label, _ in late.take(wait))),
        take_stats=lambda: {"counts": dict(counts)},
    )
    runner.execute_model_state = None
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda *_, **__: EMPTY_MODEL_RUNNER_OUTPUT)
    output = runner.execute_model(SchedulerOutput.make_empty())
    assert wire.attached(output, wire.STATS)["counts"] == {"target_steps": 3}


def test_what_has_not_arrived_waits_its_turn():
    late, events = LateCopies(CPU), [Event(), Event(), Event()]
    for place, event in enumerate(events):
        late.send(place, {"values": torch.tensor([place])})
        late.queue.append(late.queue.pop()._replace(event=event))
    events[1].reached = True
    assert not list(late.take(wait=False))
    events[0].reached = True
    assert [label for label, _ in late.take(wait=False)] == [0, 1]
    assert [label for label, _ in late.take(wait=True)] == [2]


@pytest.mark.parametrize("reached", [True, False])
def test_ranks_in_step_take_the_same_whatever_has_arrived(reached):
    late = LateCopies(CPU, in_step=True)
    for place in range(4):
        late.send(place, {"values": torch.tensor([place])})
        event = Event()
        event.reached = reached
        late.queue.append(late.queue.pop()._replace(event=event))
    assert [label for label, _ in late.take(wait=False)] == [0, 1, 2]
    assert [label for label, _ in late.take(wait=True)] == [3]
