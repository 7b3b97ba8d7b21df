"""Online calibration: how much of a survival probability the target really accepts.

Draft probabilities are over-confident, n-gram probabilities a rule of thumb. Nodes are sorted into cells by
source, depth and survival; a cell's factor is what was accepted in it over what had been promised.
"""

import numpy as np

from vllm_gsd.host import chances, learn, learn_of_requests
from vllm_gsd.method.constants import NATIVE, NUM_BINS, NUM_DEPTHS, NUM_SOURCES, OWN_PRIOR, PRIOR


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
        learn(self.factor, self.promised, self.accepted, source, depth, survival, accepted)
        promised, taken = self.promised[NATIVE, 0].tolist(), self.accepted[NATIVE, 0].tolist()
        self.first_level = sum(taken) / sum(promised)

    def value(self, source: np.ndarray, depth: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Chances that nodes are accepted, float32 [n]; arguments as of ``observe``."""
        return chances(self.factor, source, depth, survival)


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

    def observe(
        self, request_ids: list[str], row: np.ndarray, source: np.ndarray, chance: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Learn from the verified nodes of some requests.

        Args:
            row: int [n], which of the requests; source: int [n]; chance: float [n], calibrated; accepted: bool [n].
        """
        seen = self._seen(request_ids)
        learn_of_requests(seen, row, source, chance, accepted)
        self.seen.update(zip(request_ids, seen, strict=True))

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.seen.pop(request_id, None)
