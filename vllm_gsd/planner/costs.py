"""The cost of a step on this machine: a table measured at start-up and interpolated."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_gsd.host import read


@dataclass(frozen=True)
class Costs:
    """Milliseconds of both models' forward passes by number of rows.

    Args:
        rows: int64 [n >= 2], ascending.
        target: float64 [n], target forward and logits over that many rows, without attention to the context.
        draft: float64 [n], one draft level over that many rows, including its candidates; zeros without a draft model.
            With Model Runner V2, float64 [levels, n], each level of a draft phase for that many requests.
        attention: milliseconds of the target's attention of one row to one token of context, over all layers.
    """

    rows: np.ndarray
    target: np.ndarray
    draft: np.ndarray
    attention: float

    @property
    def by_level(self) -> bool:
        """Whether each draft level has times of its own, which depend on the number of requests."""
        return self.draft.ndim == 2

    @cached_property
    def every(self) -> np.ndarray:
        """``target`` and then ``draft`` for every number of rows from 0, float64 [1 + levels, rows].

        Times of more rows continue the slope between the last two entries, which are extrapolated.
        """
        rows = np.arange(int(self.rows[-1]) + 3)
        return np.stack([_filled(rows, self.rows, known) for known in (self.target, *np.atleast_2d(self.draft))])

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, float]:
        """``target`` and ``draft`` for every number of rows from 0, and ``attention``, as ``rates`` takes them."""
        return self.every[0], self.every[1], float(self.attention)

    def target_ms(self, rows: float, attended: float = 0.0) -> float:
        """Milliseconds of a target forward over ``rows`` rows that attend ``attended`` tokens of context in total."""
        return float(read(self.tables[0], rows) + self.attention * attended)

    def draft_ms(self, rows: float, level: int = 0) -> float:
        """Milliseconds of a draft level over ``rows`` rows, or for this many requests; the first level is 0."""
        return float(read(self.every[1 + min(level, len(self.every) - 2)], rows))


def rising(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Fit a function that never falls to the measured times of a mixture of experts; arguments as for ``convex``.

    Each further row first adds the weights of experts that no other row has chosen, and less as fewer are left, so the
    times are not convex. Other load only adds to a time, so a time is at most that of more rows.
    """
    return np.minimum.accumulate(times[::-1])[::-1]


def convex(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Fit a convex function to measured times, so that noise does not make one more row look free.

    A pass is first bound by memory and then by arithmetic, so the cost of one more row never falls with the number of
    rows. Neighbouring slopes that contradict this are pooled (isotonic regression). The last time stays as measured.

    Args:
        rows: int64 [n >= 2], ascending; times: float64 [n].
    """
    gaps = np.diff(rows).astype(np.float64)
    pools: list[list[float]] = []  # added milliseconds, rows, measurements
    for gap, added in zip(gaps, np.diff(times), strict=True):
        pools.append([added, gap, 1])
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    slopes = np.concatenate([np.full(int(count), max(0.0, added / gap)) for added, gap, count in pools])
    before_last = np.cumsum((slopes * gaps)[::-1])[::-1]
    return times[-1] - np.append(before_last, 0.0)


def _filled(every: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolate between the measured rows and extrapolate with the last slope, float64 [len(every)].

    Noise may have levelled the last measurements; no further row costs less than the table's mean slope.
    """
    slope = max((values[-1] - values[start]) / (at[-1] - at[start]) for start in (-2, 0))
    return np.interp(every, at, values) + slope * np.maximum(every - at[-1], 0)
