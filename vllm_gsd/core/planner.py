"""Whether a draft level pays, and how many nodes to verify: tokens per millisecond, for the whole batch together.

A step yields one token per request and those of its nodes that are accepted; it takes the draft levels run, the
target's forward over all rows, and overhead. The plan is the one with the most expected tokens per millisecond,
"no speculation now" among them. It depends on costs measured once and on what was accepted, never on a
clock while running: equal inputs give equal graphs.
"""

import numpy as np

from vllm_gsd.core.calibration import Calibration
from vllm_gsd.core.costs import Costs

# Weight of the newest step in running averages: about the last 50 steps count.
NEWEST = 0.02
# When speculation doesn't pay it is tried again, one node a request, every so many steps: texts change.
PROBE_EVERY = 48


class Planner:
    """Plans the steps of one engine.

    Args:
        top_k: out-degree of the graph.
        costs: of this machine; None: draft every level and verify every node.
    """

    def __init__(self, top_k: int, costs: Costs | None = None):
        self.costs = costs
        self.calibration = Calibration()
        # Average probability of a drafted node's best, second best... child. Before any: a middling draft's.
        self.children = 0.4 * 0.4 ** np.arange(top_k)
        self.gain = 1.0  # running average of a planned step's tokens per millisecond over plain decoding's
        self.refusals = 0
        self.begin(1, 0)

    def begin(self, num_requests: int, context: int) -> None:
        """Start planning a step of ``num_requests`` requests that have ``context`` tokens in all."""
        self.num_requests = max(1, num_requests)
        self.context = context
        self.draft_ms = 0.0
        self.probing = False

    def wants_drafts(self, num_drafted: int) -> bool:
        """Whether to draft at all, for ``num_drafted`` of the batch's requests."""
        if self._pays(np.ones(num_drafted)):
            return True
        self.probing = self._refused()
        return self.probing

    def _refused(self) -> bool:
        """Count a step without speculation; whether it is time to try again."""
        self.refusals = (self.refusals + 1) % PROBE_EVERY
        return self.refusals == 0

    def wants_level(self, values: np.ndarray) -> bool:
        """Whether to draft from nodes whose calibrated chances are ``values`` [n]."""
        return len(values) > 0 and not self.probing and self._pays(values)

    def _pays(self, values: np.ndarray) -> bool:
        costs = self.costs
        if costs is None:
            return True
        level_ms = float(costs.draft_ms(len(values)))
        rows, mean_context = self.num_requests, self.context / self.num_requests
        plain_ms = float(costs.target_ms(rows, self.context))
        rate = self.gain * rows / plain_ms  # tokens per millisecond
        chances = np.outer(values, self.children * self.calibration.first_level()).ravel()
        # Verifying a child costs its row; children below that are not verified.
        row_ms = (float(costs.target_ms(rows + len(chances), self.context)) - plain_ms) / len(chances)
        surplus = np.maximum(chances - rate * (row_ms + costs.attention * mean_context), 0).sum()
        return bool(surplus >= rate * level_ms)

    def drafted(self, probs: np.ndarray) -> None:
        """A level was drafted: candidates' probabilities, float [rows, top_k], best first."""
        self.children += NEWEST * (probs.mean(axis=0) - self.children)
        if self.costs is not None:
            self.draft_ms += float(self.costs.draft_ms(len(probs)))

    def choose(self, values: np.ndarray, size: np.ndarray, context: np.ndarray) -> np.ndarray:
        """How many nodes of each flattened graph to verify.

        Args:
            values: float32 [num_graphs, max_nodes], calibrated chance of each node, descending along a row.
            size: int32 [num_graphs], nodes there are.
            context: int64 [num_graphs], committed tokens of each request.

        Returns:
            int32 [num_graphs], at most ``size``.
        """
        costs = self.costs
        if costs is None or not size.any():
            return size
        row = np.repeat(np.arange(len(size)), size)
        value = values[np.arange(values.shape[1]) < size[:, None]].astype(np.float64)
        order = np.argsort(-value, kind="stable")
        rows = self.num_requests + np.arange(len(value) + 1)
        attended = self.context + np.concatenate([[0], np.cumsum(context[row[order]])])
        tokens = self.num_requests + np.concatenate([[0.0], np.cumsum(value[order])])
        rate = tokens / (self.draft_ms + costs.target_ms(rows, attended))
        best = int(rate.argmax())
        if self.probing:
            return np.minimum(size, 1)
        plain = self.num_requests / float(costs.target_ms(self.num_requests, self.context))
        self.gain += NEWEST * (max(1.0, rate[best] / plain) - self.gain)
        if best == 0 and self._refused():
            return np.minimum(size, 1)
        if best > 0:
            self.refusals = 0
        return np.bincount(row[order[:best]], minlength=len(size)).astype(np.int32)
