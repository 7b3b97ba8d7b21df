"""What a step costs on this machine: a table measured at start-up, read between its rows by interpolation."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the two models' forward passes by number of rows.

    Args:
        rows: int64 [n >= 2], ascending.
        target: float64 [n], target forward and logits over that many rows, attention to the context left out.
        draft: float64 [n], one draft level over that many rows, down to its candidates; zeros without a draft model.
        attention: target attention of one row over one token of context, all layers.
        overhead: everything of a step that depends on none of these (scheduler, input preparation, sampling).
    """

    rows: np.ndarray
    target: np.ndarray
    draft: np.ndarray
    attention: float
    overhead: float = 2.0

    def target_ms(self, rows, attended=0.0):
        """A target step over ``rows`` rows that attend ``attended`` tokens of context in all; arrays go too."""
        return self.overhead + _read(self.rows, self.target, rows) + self.attention * attended

    def draft_ms(self, rows):
        """One draft level over ``rows`` rows."""
        return _read(self.rows, self.draft, rows)


def _read(at: np.ndarray, values: np.ndarray, rows):
    """Interpolate; beyond the table go on with its last slope."""
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
    return np.interp(rows, at, values) + slope * np.maximum(np.asarray(rows) - at[-1], 0)
