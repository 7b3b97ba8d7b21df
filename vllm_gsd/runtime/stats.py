"""Counters of the graph's work, from the worker to ``/metrics``.

The worker sends what changed with every step's output, the scheduler hands it on with its own statistics, and
``metrics`` turns it into Prometheus metrics in the front end.
"""

import time
from collections import Counter
from contextlib import contextmanager
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

    @contextmanager
    def timed(self, name: str):
        """Add the seconds that the body takes on the host."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.counts[name] += time.perf_counter() - start  # type: ignore[assignment]

    def take(self) -> dict[str, dict]:
        """Everything as plain dicts, and start again from zero."""
        taken = {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}
        self.__init__()  # type: ignore[misc]
        return taken
