"""Calibration: how much of a survival probability the target accepts, by cells of source, depth and survival.

``factor``, ``promised`` and ``taken`` are arrays [sources, depths, bins].
"""

import numpy as np

from vllm_gsd.method.constants import KEEP, NUM_BINS, NUM_DEPTHS, OWN_KEEP, OWN_PRIOR, PRIOR

# Lower edges of the bins: a survival that is at most the k-th edge lies in bin k or above.
_EDGES = 0.5 ** np.arange(1, NUM_BINS)


def cell(depth: int, survival: np.floating) -> tuple[int, int]:
    """Depth and bin of a node's cell, among the cells of its source."""
    return min(depth, NUM_DEPTHS) - 1, int((survival <= _EDGES).sum())


def calibrated(factor: np.ndarray, source: int, depth: int, survival: np.floating) -> np.floating:
    """Probability that a node is accepted: its survival times its cell's factor, at most 1."""
    level, bin_of = cell(depth, survival)
    return min(survival.dtype.type(1.0), survival * factor[source, level, bin_of])


def chances(factor: np.ndarray, source: np.ndarray, depth: np.ndarray, survival: np.ndarray) -> np.ndarray:
    """``calibrated`` for n nodes, float32 [n].

    Args:
        factor: float32; source, depth: int [n]; survival: float [n].
    """
    nodes = zip(source, depth, survival, strict=True)
    return np.array([calibrated(factor, *node) for node in nodes], np.float32)


def learn(
    factor: np.ndarray,
    promised: np.ndarray,
    taken: np.ndarray,
    source: np.ndarray,
    depth: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
) -> None:
    """Let earlier observations fade, add n nodes to their cells, and update the factors.

    Args:
        factor, promised, taken: float32, float64, float64; updated.
        source, depth, survival: as for ``chances``; accepted: bool [n].
    """
    promised += (KEEP - 1) * (promised - PRIOR)
    taken += (KEEP - 1) * (taken - PRIOR)
    for node in range(len(survival)):
        place = source[node], *cell(depth[node], survival[node])
        promised[place] += survival[node]
        taken[place] += accepted[node]
    factor[:] = taken / promised


def learn_of_requests(
    seen: np.ndarray, row: np.ndarray, source: np.ndarray, chance: np.ndarray, accepted: np.ndarray
) -> None:
    """Let the requests' earlier observations fade, and add n nodes.

    Args:
        seen: float64 [num_requests, 2, sources], promised and accepted sums; updated.
        row, source: int [n], request and source of each node.
        chance: float [n], calibrated probabilities; accepted: bool [n].
    """
    seen += (OWN_KEEP - 1) * (seen - OWN_PRIOR)
    np.add.at(seen[:, 0], (row, source), chance)
    np.add.at(seen[:, 1], (row, source), accepted)
