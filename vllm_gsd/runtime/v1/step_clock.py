"""Times steps for the planner, which learns what they take beyond their forwards."""

import time

import numpy as np

from vllm_gsd.core.planner import Planner
from vllm_gsd.runtime.ranks import from_first_rank


class StepClock:
    """Follows decode steps from the end of one proposal to the end of the next.

    Only a step that ran just what was planned counts: the same requests, no prefill beside them, no list cut.
    """

    def __init__(self, planner: Planner):
        self.planner = planner
        self.planned: tuple[list[str], int, float] | None = None  # requests, rows, milliseconds of the forward
        self.drafts_ms = 0.0  # of the draft levels before it
        self.time = 0.0
        self.drafting_took = 0.0

    def proposing(self, request_ids: list[str], rows: int) -> None:
        """A target step over ``rows`` rows of these requests is done, proposing begins."""
        now = time.perf_counter()
        if self.planned is not None and self.planned[:2] == (request_ids, rows):
            overhead = self.planner.overhead
            # The clock of one rank, so that all ranks plan the same.
            took, drafting = from_first_rank(np.array([1e3 * (now - self.time), self.drafting_took]))
            nodes = rows - len(request_ids)
            overhead.observe("graph" if nodes else "plain", took, self.planned[2], nodes)
            if self.drafts_ms:
                overhead.observe("draft", drafting, self.drafts_ms)
        self.time = now

    def proposed(self, request_ids: list[str]) -> None:
        """Proposing is done."""
        now, planner = time.perf_counter(), self.planner
        if planner.costs is None:
            return
        self.planned = (list(request_ids), *planner.planned)
        self.drafts_ms = planner.drafts_ms()
        self.drafting_took = 1e3 * (now - self.time)
        self.time = now
