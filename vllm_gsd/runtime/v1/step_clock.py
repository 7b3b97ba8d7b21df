"""Times steps for the planner, which learns what they take beyond their forwards."""

import time

from vllm_gsd.core.planner import Planner


class StepClock:
    """Follows decode steps from the end of one proposal to the end of the next.

    Only a step that ran just what was planned counts: the same requests, no prefill beside them, no list cut.
    """

    def __init__(self, planner: Planner):
        self.planner = planner
        self.planned: tuple[list[str], int, float] | None = None  # requests, rows, milliseconds of the forward
        self.time = 0.0

    def proposing(self, request_ids: list[str], rows: int) -> None:
        """A target step over ``rows`` rows of these requests is done, proposing begins."""
        now = time.perf_counter()
        if self.planned is not None and self.planned[:2] == (request_ids, rows):
            kind = "plain" if rows == len(request_ids) else "graph"
            self.planner.overhead.observe(kind, 1e3 * (now - self.time), self.planned[2])
        self.time = now

    def proposed(self, request_ids: list[str]) -> None:
        """Proposing is done."""
        now, planner = time.perf_counter(), self.planner
        if planner.costs is None:
            return
        if planner.rows:
            took = 1e3 * (now - self.time)
            planner.overhead.observe("draft", took, planner.drafts_ms(planner.rows))
        self.planned = (list(request_ids), *planner.planned)
        self.time = now
