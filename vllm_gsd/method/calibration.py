"""Online calibration: how much of a survival probability the target really accepts.

Draft probabilities are over-confident, n-gram probabilities a rule of thumb. Nodes are sorted into cells by
source, depth and survival; a cell's factor is what was accepted in it over what had been promised.
"""

import numpy as np

from vllm_gsd.method.compiled import compiled, compiled_helper

NATIVE, MERGED, NGRAM, SHARED, AGREED = 0, 1, 2, 3, 4  # sources
NUM_SOURCES = 5
NUM_DEPTHS = 3  # 1, 2, deeper
NUM_BINS = 8  # survival above 1/2, above 1/4, ... and all below 1/128
# Weight of "survival is right" against observations, in promised nodes.
PRIOR = 1.0
# Observations are forgotten over some 500 steps, so that a cell that is no longer verified is tried again.
KEEP = 0.998


class Calibration:
    """Factors by cell, ``factor[source, depth, bin]`` float32; all 1 before anything was observed."""

    def __init__(self) -> None:
        shape = (NUM_SOURCES, NUM_DEPTHS, NUM_BINS)
        self.promised = np.full(shape, PRIOR)
        self.accepted = np.full(shape, PRIOR)
        self.factor = np.ones(shape, np.float32)
        self.first_level = 1.0  # accepted over promised among all native children of the root

    def observe(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from the verified nodes of one step.

        Args:
            source: int [n]; depth: int [n], children of the root are 1; survival: float [n], as promised.
            accepted: bool [n], whether the node lies on its request's accepted path.
        """
        _learn(self.factor, self.promised, self.accepted, source, depth, survival, accepted)
        promised, taken = self.promised[NATIVE, 0].tolist(), self.accepted[NATIVE, 0].tolist()
        self.first_level = sum(taken) / sum(promised)

    def value(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Chances that nodes are accepted, float32 [n]; arguments as of ``observe``."""
        return _chances(self.factor, source, depth, survival)


# Weight of "as calibrated" against what was observed in one request, in nodes' worth of chances.
OWN_PRIOR = 3.0
# Observations in a request are forgotten over some 30 steps with graphs, so that a source that is off is tried again.
OWN_KEEP = 0.97
# A source whose nodes come true less often than this share of what calibration says is switched off for the request.
OFF_BELOW = 0.35


_NOTHING_SEEN = np.full((2, NUM_SOURCES), OWN_PRIOR)


class SourceTrust:
    """How far each request's own experience with the sources differs from what is true of all requests."""

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}  # float64 [2, sources], promised and accepted

    def of(self, request_ids: list[str]) -> np.ndarray:
        """Accepted over promised by request and source, float32 [num_requests, sources]; 1 before anything was seen."""
        seen = self._seen(request_ids)
        return (seen[:, 1] / seen[:, 0]).astype(np.float32)

    def _seen(self, request_ids: list[str]) -> np.ndarray:
        """A copy of what is known of these requests, float64 [num_requests, 2, sources]."""
        known = [self.seen.get(request_id, _NOTHING_SEEN) for request_id in request_ids]
        return np.array(known).reshape(-1, 2, NUM_SOURCES)

    def observe(self, request_ids: list[str], row, source, chance, accepted) -> None:
        """Learn from the verified nodes of some requests.

        Args:
            row: int [n], which of the requests; source: int [n]; chance: float [n], calibrated; accepted: bool [n].
        """
        seen = self._seen(request_ids)
        _learn_of_requests(seen, row, source, chance, accepted)
        self.seen.update(zip(request_ids, seen, strict=True))

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.seen.pop(request_id, None)


@compiled_helper
def _cell(depth, survival):
    """A node's cell among those of its source: depth and bin."""
    bin_of = int(-np.ceil(np.log2(max(survival, np.float32(1e-9)))))
    return min(depth, NUM_DEPTHS) - 1, min(max(bin_of, 0), NUM_BINS - 1)


@compiled
def calibrated(factor, source, depth, survival):
    """Chance that a node is accepted: its survival, corrected by its cell's factor."""
    level, bin_of = _cell(depth, survival)
    return min(np.float32(1.0), survival * factor[source, level, bin_of])


@compiled
def _chances(factor, source, depth, survival):
    chances = np.empty(len(survival), np.float32)
    for node in range(len(survival)):
        chances[node] = calibrated(factor, source[node], depth[node], survival[node])
    return chances


@compiled
def _learn(factor, promised, taken, source, depth, survival, accepted):
    """Let what was seen fade, add nodes to their cells, and set the cells' factors; float64 [sources, depths, bins]."""
    promised += (KEEP - 1) * (promised - PRIOR)
    taken += (KEEP - 1) * (taken - PRIOR)
    for node in range(len(survival)):
        level, bin_of = _cell(depth[node], survival[node])
        promised[source[node], level, bin_of] += survival[node]
        taken[source[node], level, bin_of] += accepted[node]
    factor[:] = (taken / promised).astype(np.float32)


@compiled
def _learn_of_requests(seen, row, source, chance, accepted):
    """Let what was seen fade, float64 [num_requests, 2, sources], and add nodes to it."""
    seen += (OWN_KEEP - 1) * (seen - OWN_PRIOR)
    for node in range(len(row)):
        seen[row[node], 0, source[node]] += chance[node]
        seen[row[node], 1, source[node]] += accepted[node]
