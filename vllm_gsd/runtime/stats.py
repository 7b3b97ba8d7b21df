"""Counters of the graph's work, from the worker to ``/metrics``.

The worker sends what changed with every step's output, the scheduler hands it on with its own statistics, and
``metrics`` turns it into Prometheus metrics in the front end.
"""

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class GraphStats:
    """What happened since the last ``take``.

    ``counts`` holds plain counters (names in ``metrics.COUNTERS``), ``fallbacks`` requests decoded without a
    graph by reason, ``accepted_lengths`` how many walks accepted that many nodes, ``drafted_depths`` the depth of the
    graph verified for a request in this step.
    """

    counts: Counter = field(default_factory=Counter)
    fallbacks: Counter = field(default_factory=Counter)
    accepted_lengths: Counter = field(default_factory=Counter)
    drafted_depths: dict[str, int] = field(default_factory=dict)

    def timed(self, name: str) -> "_Timed":
        """A context that adds the seconds its body takes on the host."""
        return _Timed(self, name)

    def take(self) -> dict[str, dict]:
        """Everything as plain dicts, and start again from zero."""
        taken = {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}
        self.__init__()  # type: ignore[misc]
        return taken


class _Timed:
    """Every step has some of them, so it is a class: a generator's context takes four calls more."""

    __slots__ = ("name", "start", "stats")

    def __init__(self, stats: GraphStats, name: str):
        self.stats, self.name = stats, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *failed: object) -> None:
        self.stats.counts[self.name] += time.perf_counter() - self.start  # type: ignore[assignment]
