"""What a step costs on this machine: a table measured at start-up, read between its rows by interpolation."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_gsd.core.rates import read

# Weight of the newest step in a learned overhead.
LATEST = 0.05
# ... and of the newest one that verified graphs, from which two numbers are learned.
LATEST_GRAPH = 0.02
# Weight of "a node takes what the table says", as variance of the number of nodes.
RIDGE = 1.0


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the two models' forward passes by number of rows.

    Args:
        rows: int64 [n >= 2], ascending.
        target: float64 [n], target forward and logits over that many rows, attention to the context left out.
        draft: float64 [n], one draft level over that many rows, down to its candidates; zeros without a draft model.
        attention: target attention of one row over one token of context, all layers.
    """

    rows: np.ndarray
    target: np.ndarray
    draft: np.ndarray
    attention: float

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, float]:
        """``target`` and ``draft`` by every number of rows from 0 on, and ``attention``, for ``rates``."""
        every = np.arange(max(3, int(self.rows[-1]) + 1))
        target, draft = (_filled(every, self.rows, known) for known in (self.target, self.draft))
        return target, draft, float(self.attention)

    def target_ms(self, rows: float, attended: float = 0.0) -> float:
        """A target forward over ``rows`` rows that attend ``attended`` tokens of context in all."""
        return float(read(self.tables[0], rows) + self.attention * attended)

    def draft_ms(self, rows: float) -> float:
        """One draft level over ``rows`` rows."""
        return float(read(self.tables[1], rows))


class Overhead:
    """Milliseconds of a step beyond its forwards by the table: scheduling, preparation, sampling, what the table lacks.

    Learned from the clock while running, as only there all of it shows. One number each for steps with nothing to
    verify (``plain``), steps that verify graphs (``graph``), and drafting (``draft``); and what each node takes that is
    verified (``node``), by a regression over the steps with graphs.
    """

    def __init__(self) -> None:
        self.plain, self.graph, self.draft, self.node = 2.0, 3.0, 0.5, 0.0
        self.seen = dict.fromkeys(("plain", "graph", "draft"), 0)
        self.nodes, self.took = 0.0, self.graph  # means of the steps that verified graphs
        self.variance, self.covariance = 0.0, 0.0

    def observe(self, kind: str, took: float, forwards: float, nodes: int = 0) -> None:
        """Learn from a step's part of that ``kind``.

        Args:
            took: milliseconds it took; forwards: those of its forwards by the table.
            nodes: verified in a step of kind ``graph``.
        """
        self.seen[kind] += 1
        known = getattr(self, kind)
        # An average over the latest steps that one slow step (another process, a page fault) hardly moves.
        most = 0.3 * forwards + 1.0
        wrong = float(np.clip(took - forwards - known - self.node * nodes, -most, most))
        if kind == "graph":
            self._learn_graph(nodes, known + self.node * nodes + wrong)
        else:
            setattr(self, kind, known + wrong * max(LATEST, 1 / self.seen[kind]))
        if kind != "draft" and not all(self.seen[other] for other in ("plain", "graph")):
            # Most of it is the same for both: until the other one is seen, what is learned goes for it too.
            other = "graph" if kind == "plain" else "plain"
            setattr(self, other, getattr(self, other) + getattr(self, kind) - known)

    def _learn_graph(self, nodes: int, took: float) -> None:
        """Follow a step that verified so many nodes and took so long beyond the table."""
        weight = max(LATEST_GRAPH, 1 / self.seen["graph"])
        more, longer = nodes - self.nodes, took - self.took
        self.nodes += weight * more
        self.took += weight * longer
        self.variance += weight * (more * more - self.variance)
        self.covariance += weight * (more * longer - self.covariance)
        self.node = self.covariance / (self.variance + RIDGE)
        self.graph = self.took - self.node * self.nodes


def rising(times: np.ndarray) -> np.ndarray:
    """Times float64 [n] as they are where they rise; more rows never cost less, so what says so is evened out."""
    return (np.maximum.accumulate(times) + np.minimum.accumulate(times[::-1])[::-1]) / 2


def _filled(every: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolated between the rows measured; beyond them on with the last slope, float64 [len(every)]."""
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
    return np.interp(every, at, values) + slope * np.maximum(every - at[-1], 0)
