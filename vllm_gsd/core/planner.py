"""Whether a draft level pays, and how many nodes to verify: tokens per millisecond, for the whole batch together.

A step yields one token per request and those of its nodes that are accepted; it takes the draft levels run, the
target's forward over all rows, and overhead. The plan is the one with the most expected tokens per millisecond,
"no speculation now" among them; where more nodes cost next to nothing it takes them. Forwards are priced by a table
measured at start-up, overhead by what steps take beyond it.
"""

import numpy as np

from vllm_gsd.core.calibration import Calibration
from vllm_gsd.core.costs import Costs

# Weight of the newest step in running averages: about the last 50 steps count.
NEWEST = 0.02
# Weight of the newest draft level in the averages of its probabilities, which follow the text.
NEWEST_LEVEL = 0.1
# When speculation doesn't pay it is tried again every so many steps: texts change.
PROBE_EVERY = 16
# What graphs are like before any was seen: a middling draft's (see ``Planner.graph``).
FIRST_GRAPH = np.array([0.4, 3.0, 0.6])
# Chance from which a node counts as likely.
LIKELY = 0.05
# Rates this near to the best are equally good as far as the table can tell: the one with the most nodes wins.
TOLERANCE = 0.02
# Milliseconds of a step beside the forwards (scheduler, input preparation, sampling) before any was timed.
OVERHEAD_MS = 2.0


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
        # Average graph of one request: chance of its best node, number of likely nodes, and the sum of their chances.
        self.graph = FIRST_GRAPH.copy()
        self.deeper_ms = 0.0  # running average of what levels after the first cost
        self.gain = 1.0  # running average of a planned step's tokens per millisecond over plain decoding's
        self.refusals = 0
        self.overhead_ms = OVERHEAD_MS
        self.begin(1, 0)

    def begin(self, num_requests: int, context: int) -> None:
        """Start planning a step of ``num_requests`` requests that have ``context`` tokens in all."""
        self.num_requests = max(1, num_requests)
        self.context = context
        self.draft_ms = 0.0
        self.probing = False
        self.rows = self.num_requests  # of the next target step

    def step_took(self, milliseconds: float, rows: int) -> None:
        """A step of ``rows`` target rows took that long, drafting after it included: learn what it had beside forwards.

        The step must be the one before the latest ``begin``, of the same requests.
        """
        if self.costs is None:
            return
        forwards = self.draft_ms + float(self.costs.target_ms(rows, self.context * rows / self.num_requests))
        error = milliseconds - forwards - self.overhead_ms
        # Clipped: a pause of the machine says nothing.
        self.overhead_ms = max(0.0, self.overhead_ms + NEWEST * min(max(error, -20.0), 20.0))

    def _target_ms(self, rows, attended):
        assert self.costs is not None
        return self.overhead_ms + self.costs.target_ms(rows, attended)

    def wants_drafts(self, num_drafted: int) -> bool:
        """Whether to draft at all, for ``num_drafted`` of the batch's requests."""
        if self._graphs_pay(num_drafted):
            self.refusals = 0
            return True
        self.probing = self._refused()
        # What is not drafted is not seen: believe less and less in what graphs were like.
        self.graph += NEWEST_LEVEL * (FIRST_GRAPH - self.graph)
        return self.probing

    def _refused(self) -> bool:
        """Count a step without speculation; whether it is time to try again."""
        self.refusals = (self.refusals + 1) % PROBE_EVERY
        return self.refusals == 0

    def wants_level(self, values: np.ndarray) -> bool:
        """Whether to draft from nodes whose calibrated chances are ``values`` [n]."""
        return len(values) > 0 and self._pays(values)

    def _graphs_pay(self, count: int) -> bool:
        """Whether ``count`` graphs like the last ones are worth drafting, for their best nodes or all likely ones."""
        costs = self.costs
        if costs is None:
            return True
        best, nodes, chances = self.graph
        plain_ms = float(self._target_ms(self.num_requests, self.context))
        rate = self.gain * self.num_requests / plain_ms  # tokens per millisecond
        per_row = costs.attention * self.context / self.num_requests
        level_ms = float(costs.draft_ms(count))
        for tokens, rows, draft_ms in ((best, 1.0, level_ms), (chances, nodes, level_ms + self.deeper_ms)):
            verify_ms = float(self._target_ms(self.num_requests + count * rows, self.context)) - plain_ms
            if count * tokens >= rate * (draft_ms + verify_ms + count * rows * per_row):
                return True
        return False

    def _pays(self, values: np.ndarray) -> bool:
        costs = self.costs
        if costs is None:
            return True
        level_ms = float(costs.draft_ms(len(values)))
        rows, mean_context = self.num_requests, self.context / self.num_requests
        plain_ms = float(self._target_ms(rows, self.context))
        rate = self.gain * rows / plain_ms  # tokens per millisecond
        chances = np.outer(values, self.children * self.calibration.first_level()).ravel()
        # Verifying a child costs its row; children below that are not verified.
        row_ms = (float(self._target_ms(rows + len(chances), self.context)) - plain_ms) / len(chances)
        surplus = np.maximum(chances - rate * (row_ms + costs.attention * mean_context), 0).sum()
        return bool(surplus >= rate * level_ms)

    def drafted(self, probs: np.ndarray) -> None:
        """A level was drafted: candidates' probabilities, float [rows, top_k], best first."""
        self.children += NEWEST_LEVEL * (probs.mean(axis=0) - self.children)
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
        if self.costs is None or not size.any():
            self.rows += int(size.sum())
            return size
        self._remember(values, size)
        row = np.repeat(np.arange(len(size)), size)
        value = values[np.arange(values.shape[1]) < size[:, None]].astype(np.float64)
        order = np.argsort(-value, kind="stable")
        rows = self.num_requests + np.arange(len(value) + 1)
        attended = self.context + np.concatenate([[0], np.cumsum(context[row[order]])])
        tokens = self.num_requests + np.concatenate([[0.0], np.cumsum(value[order])])
        rate = tokens / (self.draft_ms + self._target_ms(rows, attended))
        best = int(rate.argmax())
        plain = self.num_requests / float(self._target_ms(self.num_requests, self.context))
        self.gain += NEWEST * (max(1.0, rate[best] / plain) - self.gain)
        if best > 0:
            best = int(np.flatnonzero(rate >= (1 - TOLERANCE) * rate[best])[-1])
            sizes = np.bincount(row[order[:best]], minlength=len(size)).astype(np.int32)
        elif self.probing or self._refused():
            sizes = np.minimum(size, 1)
        else:
            sizes = np.zeros_like(size)
        self.rows += int(sizes.sum())
        return sizes

    def _remember(self, values: np.ndarray, size: np.ndarray) -> None:
        """Follow what graphs are like now, whatever is chosen of them."""
        assert self.costs is not None
        if not self.draft_ms:
            return  # not of the draft model
        likely = np.where(np.arange(values.shape[1]) < size[:, None], values, 0.0)
        likely[likely < LIKELY] = 0.0
        graph = np.array([likely[:, 0].mean(), (likely > 0).sum(axis=1).mean(), likely.sum(axis=1).mean()])
        self.graph += NEWEST_LEVEL * (graph - self.graph)
        first_ms = float(self.costs.draft_ms(len(size)))
        self.deeper_ms += NEWEST_LEVEL * (max(0.0, self.draft_ms - first_ms) - self.deeper_ms)
