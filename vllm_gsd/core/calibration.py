"""Online calibration: how much of a survival probability the target really accepts.

Draft probabilities are over-confident, n-gram probabilities a rule of thumb. Nodes are sorted into cells by
source, depth and survival; a cell's factor is what was accepted in it over what had been promised.
"""

import numba
import numpy as np

NATIVE, MERGED, NGRAM, SHARED = 0, 1, 2, 3  # sources
NUM_DEPTHS = 3  # 1, 2, deeper
NUM_BINS = 8  # survival above 1/2, above 1/4, ... and all below 1/128
# Weight of "survival is right" against observations, in promised nodes.
PRIOR = 1.0
# Observations are forgotten over some 500 steps, so that a cell that is no longer verified is tried again.
KEEP = 0.998


class Calibration:
    """Factors by cell, ``factor[source, depth, bin]`` float32; all 1 before anything was observed."""

    def __init__(self) -> None:
        shape = (4, NUM_DEPTHS, NUM_BINS)
        self.promised = np.full(shape, PRIOR)
        self.accepted = np.full(shape, PRIOR)
        self.factor = np.ones(shape, np.float32)

    def observe(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from the verified nodes of one step.

        Args:
            source: int [n]; depth: int [n], children of the root are 1; survival: float [n], as promised.
            accepted: bool [n], whether the node lies on its request's accepted path.
        """
        self.promised += (KEEP - 1) * (self.promised - PRIOR)
        self.accepted += (KEEP - 1) * (self.accepted - PRIOR)
        cells = (source, np.minimum(depth, NUM_DEPTHS) - 1, _bins(survival))
        np.add.at(self.promised, cells, survival)
        np.add.at(self.accepted, cells, accepted)
        self.factor[:] = self.accepted / self.promised

    def value(self, source: int, depth: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Chances that nodes are accepted, float [n]: ``calibrated``, for arrays."""
        factor = self.factor[source, np.minimum(depth, NUM_DEPTHS) - 1, _bins(survival)]
        return np.minimum(1.0, survival * factor)

    def first_level(self) -> float:
        """Accepted over promised among all native children of the root."""
        return float(self.accepted[NATIVE, 0].sum() / self.promised[NATIVE, 0].sum())


def _bins(survival: np.ndarray) -> np.ndarray:
    return np.clip(-np.ceil(np.log2(np.maximum(survival, 1e-9))), 0, NUM_BINS - 1).astype(np.int64)


@numba.njit(cache=True)
def calibrated(factor, source, depth, survival):
    """Chance that a node is accepted: its survival, corrected by its cell's factor."""
    level = min(depth, NUM_DEPTHS) - 1
    cell = int(-np.ceil(np.log2(max(survival, np.float32(1e-9)))))
    return min(np.float32(1.0), survival * factor[source, level, min(max(cell, 0), NUM_BINS - 1)])
