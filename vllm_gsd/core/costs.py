"""What a step costs on this machine: a table measured at start-up, read between its rows by interpolation."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_gsd.core.rates import read

# Weight of the newest step in a learned overhead.
LATEST = 0.05


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
        """What ``rates`` reads: ``target`` and ``draft`` by every number of rows from 0 on, and ``attention``."""
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
    """Milliseconds of a step beyond its forwards (scheduling, preparation, sampling, talk between processes).

    Learned from the clock while running, as only there all of it shows. One number each for steps with nothing to
    verify (``plain``), steps that verify graphs (``graph``), and drafting (``draft``).
    """

    def __init__(self) -> None:
        self.plain, self.graph, self.draft = 2.0, 3.0, 0.5
        self.seen = dict.fromkeys(("plain", "graph", "draft"), 0)

    def observe(self, kind: str, took: float, forwards: float) -> None:
        """Learn from a step's part of that ``kind``: milliseconds it took, and those of its forwards by the table."""
        self.seen[kind] += 1
        known = getattr(self, kind)
        # An average over the latest steps that one slow step (another process, a page fault) hardly moves.
        most = 0.3 * forwards + 1.0
        step = np.clip(took - forwards - known, -most, most) * max(LATEST, 1 / self.seen[kind])
        setattr(self, kind, float(known + step))
        if kind != "draft" and not all(self.seen[other] for other in ("plain", "graph")):
            # Most of it is the same for both: until the other one is seen, what is learned goes for it too.
            other = "graph" if kind == "plain" else "plain"
            setattr(self, other, float(getattr(self, other) + step))


def _filled(every: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolated between the rows measured; beyond them on with the last slope, float64 [len(every)]."""
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
    return np.interp(every, at, values) + slope * np.maximum(every - at[-1], 0)
