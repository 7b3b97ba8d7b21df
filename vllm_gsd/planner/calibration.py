"""Online calibration: how much of a survival probability the target accepts.

Draft probabilities are over-confident, and n-gram probabilities are a rule of thumb. Nodes belong to cells by source,
depth and survival. A cell's factor is the number of its accepted nodes over the sum of their survivals.
"""

from collections.abc import Iterable

import numpy as np

from vllm_gsd.host import chances, learn, learn_of_requests
from vllm_gsd.method.constants import KEEP, NATIVE, NGRAM, NUM_BINS, NUM_DEPTHS, NUM_SOURCES, OWN_PRIOR, PRIOR, SHARED

# Steps that verify nothing let a cell's evidence fade to no less than this many promised nodes.
LEAST_EVIDENCE = 5.0
# In such steps, observations of copies fade over about 50 steps, factors included. The nodes of one step are not
# independent, least of all where requests arrive together: all copies may be wrong at the beginnings of answers and
# right in the rest. To try them again costs rows of one step, as no draft has to run.
COPIES = [NGRAM, SHARED]
KEEP_COPIES = 0.98


class Calibration:
    """Factors by cell, ``factor[source, depth, bin]`` float32, all 1 before the first observation."""

    def __init__(self) -> None:
        shape = (NUM_SOURCES, NUM_DEPTHS, NUM_BINS)
        self.promised = np.full(shape, PRIOR)
        self.accepted = np.full(shape, PRIOR)
        self.factor = np.ones(shape, np.float32)
        self.first_level = 1.0  # accepted over promised for all native children of the root

    def observe(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from the verified nodes of one step.

        Args:
            source: int [n]; depth: int [n], 1 for children of the root; survival: float [n].
            accepted: bool [n], whether the node is on its request's accepted path.
        """
        learn(self.factor, self.promised, self.accepted, source, depth, survival, accepted)
        promised, taken = self.promised[NATIVE, 0].tolist(), self.accepted[NATIVE, 0].tolist()
        self.first_level = sum(taken) / sum(promised)

    def rest(self) -> None:
        """Let the evidence fade in a step that verified nothing, but not the factors of drafted nodes.

        While speculation does not pay, a probe verifies a few nodes every few hundred steps. Against the evidence of
        many full steps, they would not show the planner that nodes have become better.
        """
        keep = np.where(self.promised > LEAST_EVIDENCE, KEEP, 1.0)
        for sums in (self.promised, self.accepted):
            sums *= keep
            sums[COPIES] += (KEEP_COPIES - 1) * (sums[COPIES] - PRIOR)
        self.factor[COPIES] = self.accepted[COPIES] / self.promised[COPIES]

    def value(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Probabilities that nodes are accepted, float32 [n]; arguments as for ``observe``."""
        return chances(self.factor, source, depth, survival)


_NOTHING_SEEN = np.full((2, NUM_SOURCES), OWN_PRIOR)


class SourceTrust:
    """How far the acceptance of each source in a request differs from its acceptance in all requests."""

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}  # float64 [2, sources], promised and accepted

    def of(self, request_ids: list[str]) -> np.ndarray:
        """Accepted over promised by request and source, float32 [num_requests, sources]; 1 before any observation."""
        seen = self._seen(request_ids)
        return (seen[:, 1] / seen[:, 0]).astype(np.float32)

    def _seen(self, request_ids: list[str]) -> np.ndarray:
        """A copy of the sums of these requests, float64 [num_requests, 2, sources]."""
        known = [self.seen.get(request_id, _NOTHING_SEEN) for request_id in request_ids]
        return np.array(known).reshape(-1, 2, NUM_SOURCES)

    def observe(
        self, request_ids: list[str], row: np.ndarray, source: np.ndarray, chance: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Learn from verified nodes.

        Args:
            row, source: int [n], index of each node's request, and its source.
            chance: float [n], calibrated probabilities; accepted: bool [n].
        """
        seen = self._seen(request_ids)
        learn_of_requests(seen, row, source, chance, accepted)
        self.seen.update(zip(request_ids, seen, strict=True))

    def fade(self, request_ids: Iterable[str]) -> None:
        """Let the observations of requests that verified nothing in a step fade.

        Otherwise a request whose only source is off would never try it again.
        """
        if known := [request_id for request_id in request_ids if request_id in self.seen]:
            nothing = np.zeros(0, np.int64)
            self.observe(known, nothing, nothing, np.zeros(0), np.zeros(0, np.bool_))

    def forget(self, request_id: str) -> None:
        """Drop the observations of a finished request."""
        self.seen.pop(request_id, None)
