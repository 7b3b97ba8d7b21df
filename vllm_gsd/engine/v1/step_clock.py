"""Times steps for the planner, which learns what they take beyond their forwards."""

import time
from typing import NamedTuple

import numpy as np

from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.planner.planner import Planner


class StepClock:
    """Follows decode steps from the end of one proposal to the end of the next.

    Only a step that ran just what was planned counts: the same requests, no prefill beside them, no list cut.
    """

    def __init__(self, planner: Planner):
        self.planner = planner
        self.planned: _Planned | None = None
        self.time = 0.0
        self.drafting_took = 0.0

    def proposing(self, request_ids: list[str], rows: int) -> None:
        """A target step over ``rows`` rows of these requests is done, proposing begins."""
        now = time.perf_counter()
        planned = self.planned
        if planned is not None and (planned.request_ids, planned.rows) == (request_ids, rows):
            overhead = self.planner.overhead
            # The clock of one rank, so that all ranks plan the same.
            took, drafting = from_first_rank(np.array([1e3 * (now - self.time), self.drafting_took]))
            nodes = rows - len(request_ids)
            overhead.observe_step(took, planned.forward_ms, len(request_ids), planned.context, nodes)
            if planned.levels:
                overhead.observe_drafts(drafting, planned.drafts_ms, planned.levels)
        self.time = now

    def proposed(self, request_ids: list[str]) -> None:
        """Proposing is done."""
        now, planner = time.perf_counter(), self.planner
        if planner.costs is None:
            return
        rows, forward_ms = planner.planned
        levels = len(planner.rows) if planner.as_usual else 0
        self.planned = _Planned(list(request_ids), rows, forward_ms, planner.context, levels, planner.forwards_ms())
        self.drafting_took = 1e3 * (now - self.time)
        self.time = now


class _Planned(NamedTuple):
    """A step to come, and the drafting before it."""

    request_ids: list[str]
    rows: int
    forward_ms: float
    context: int
    levels: int  # 0: none, or none to learn from
    drafts_ms: float
