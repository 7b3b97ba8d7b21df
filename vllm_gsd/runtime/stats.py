"""Counters of the graph's work, from the worker to ``/metrics``.

The worker sends what changed with every step's output, the scheduler hands it on with its own statistics, and
``metrics`` turns it into Prometheus metrics in the front end.
"""

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

    def take(self) -> dict[str, dict]:
        """Everything as plain dicts, and start again from zero."""
        taken = {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}
        self.__init__()  # type: ignore[misc]
        return taken
