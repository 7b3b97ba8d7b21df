"""Counters that the worker collects for ``/metrics``.

The worker sends the changes with every step's output, the scheduler forwards them with its own statistics, and
``metrics`` converts them to Prometheus metrics in the front end.
"""

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class GraphStats:
    """Statistics since the last ``take``."""

    counts: Counter = field(default_factory=Counter)  # by the names of ``metrics.COUNTERS``
    fallbacks: Counter = field(default_factory=Counter)  # requests decoded without a graph, by reason
    verified: Counter = field(default_factory=Counter)  # graphs, by (depth, nodes, accepted nodes)

    def timed(self, name: str) -> "_Timed":
        """A context manager that adds the wall time of its body, in seconds, to the counter ``name``."""
        return _Timed(self, name)

    def take(self) -> dict[str, dict]:
        """Return all statistics as plain dicts and reset them."""
        taken = {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}
        self.__init__()  # type: ignore[misc]
        return taken


class _Timed:
    """The context of ``timed``. It is a class because a generator-based context manager costs four more calls."""

    __slots__ = ("name", "start", "stats")

    def __init__(self, stats: GraphStats, name: str):
        self.stats, self.name = stats, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *failed: object) -> None:
        self.stats.counts[self.name] += time.perf_counter() - self.start  # type: ignore[assignment]
