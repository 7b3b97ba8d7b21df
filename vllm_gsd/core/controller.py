"""Whether the next draft level pays: expected accepted tokens per second against what decoding yields anyway.

A level costs a forward of the draft model and can win at most the survival of the nodes it expands. Draft
probabilities are over-confident and differ by text, so the expectation is scaled by what the target
accepted at that depth lately. Everything here depends only on accepted lengths and on costs measured at
start-up, so that equal inputs give equal graphs.
"""

import numpy as np

# Weight of the newest step in the running averages: about the last 50 request-steps count.
NEWEST = 0.02
# Before anything was observed: how much of the survival a level expands turns out to be accepted.
INITIAL_YIELD = 0.5
# A level that doesn't pay is tried again every so many steps, since texts change.
PROBE_EVERY = 24


class DraftController:
    """Decides level by level, for the whole batch together.

    Args:
        max_depth: most draft levels.
        level_cost: cost of one draft level as a share of a target step; None: draft every level.
    """

    def __init__(self, max_depth: int, level_cost: float | None = None):
        self.level_cost = level_cost
        self.promised = np.ones(max_depth + 1)  # average survival expanded per request, by level (1-based)
        self.accepted = np.full(max_depth + 1, INITIAL_YIELD)  # average nodes accepted at that depth
        self.length = 1.0 + INITIAL_YIELD  # average tokens per request and target step
        self.refused = np.zeros(max_depth + 1, np.int64)

    def wants(self, level: int, promised: float, num_requests: int) -> bool:
        """Whether to draft ``level`` (1 is the root's) for ``num_requests`` requests.

        Args:
            promised: survival summed over the nodes the level would expand.
        """
        if promised <= 0:
            return False
        if self.level_cost is None:
            return True
        gain = promised * self.accepted[level] / self.promised[level]
        if gain >= self.level_cost * self.length * num_requests:
            self.refused[level] = 0
            return True
        self.refused[level] += 1
        if self.refused[level] >= PROBE_EVERY:
            self.refused[level] = 0
            return True
        return False

    def observe(self, promised: list[float], accepted_length: int) -> None:
        """Learn from one request's target step.

        Args:
            promised: survival expanded at each level that was drafted for the request, first level first.
            accepted_length: nodes of its graph that were accepted.
        """
        self.length += NEWEST * (1 + accepted_length - self.length)
        for level, survival in enumerate(promised, start=1):
            self.promised[level] += NEWEST * (survival - self.promised[level])
            self.accepted[level] += NEWEST * ((accepted_length >= level) - self.accepted[level])
