"""Times steps, so that the planner learns their overhead beyond the model forwards."""

import time
from typing import NamedTuple

import numpy as np

from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.planner.planner import Planner


class StepClock:
    """Times decode steps from the end of one proposal to the end of the next.

    Only steps that ran exactly as planned count: the same requests, no prefill and no tree that the scheduler cut.

    Args:
        planner: learns the times.
        pipelined: whether the host runs ahead of the device. It then keeps step with the device over many steps, but
            does not see what drafting takes: what a whole step takes beyond the table counts as the step's overhead.
    """

    def __init__(self, planner: Planner, pipelined: bool = False):
        self.planner = planner
        self.pipelined = pipelined
        self.planned: _Planned | None = None
        self.time = 0.0  # when proposing last began or ended, in seconds
        self.drafting_ms = 0.0

    def proposing(self, request_ids: list[str], rows: int) -> None:
        """Record that proposing begins, after a target step over ``rows`` rows of these requests."""
        now = time.perf_counter()
        planned = self.planned
        if planned is not None and (planned.request_ids, planned.rows) == (request_ids, rows):
            overhead = self.planner.overhead
            # All ranks use the first rank's times, so that they make the same plans.
            took, drafting = from_first_rank(np.array([1e3 * (now - self.time), self.drafting_ms]))
            nodes = rows - len(request_ids)
            if self.pipelined:
                took += drafting - planned.drafting_ms
            overhead.observe_step(took, planned.forward_ms, len(request_ids), planned.context, nodes)
            if planned.levels and not self.pipelined:
                overhead.observe_drafts(drafting, planned.drafts_ms, planned.levels)
            else:
                overhead.rest_drafts()
        self.time = now

    def forget(self) -> None:
        """Do not time the step under way."""
        self.planned = None

    def proposed(self, request_ids: list[str]) -> None:
        """Record that proposing ends."""
        now, planner = time.perf_counter(), self.planner
        self.planned = None
        if planner.costs is None or (self.pipelined and planner.caught_up_rows):
            return
        rows, forward_ms = planner.planned
        levels = len(planner.rows) if planner.as_usual else 0
        drafts_ms = planner.speed * planner.forwards_ms(), planner.speed * planner.drafting_ms()
        self.planned = _Planned(list(request_ids), rows, forward_ms, planner.context, levels, *drafts_ms)
        self.drafting_ms = 1e3 * (now - self.time)
        self.time = now


class _Planned(NamedTuple):
    """The planned next step and the drafting that preceded it."""

    request_ids: list[str]
    rows: int
    forward_ms: float
    context: int
    levels: int  # draft levels; 0 if there were none or their times are not typical
    drafts_ms: float  # of its forwards by the table
    drafting_ms: float  # and with its overhead
