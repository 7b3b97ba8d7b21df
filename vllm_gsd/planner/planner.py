"""Whether to draft, whether to draft another level, how many nodes to verify: tokens per millisecond, batch-wide.

A step yields one token per request and those of its nodes that are accepted; it takes the target's forward over all
rows, the draft levels, and overhead. Taken is the plan with the most expected tokens per millisecond, "no speculation
now" among them. What forwards cost is measured at start-up, what comes on top of them while running, and what graphs
are worth is learned from the graphs themselves. What the present plan leaves out is tried now and then.
"""

import numpy as np

from vllm_gsd import host
from vllm_gsd.planner.calibration import Calibration
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.overhead import Overhead

# Weight of the newest graphs in the running average of what graphs are worth: about the last 25 steps count.
NEWEST = 0.04
# ... and of those that were drafted only to see: they are all there is to learn from.
NEWEST_TRIED = 0.25
# When speculation doesn't pay it is tried again every so many steps: texts change.
PROBE_EVERY = 40
# So many requests are drafted for then: in a large batch the draft has missed much of every text.
PROBE_REQUESTS = 2
# Given up as soon as it promises less than plain steps, it is taken up again where it promises so much more: what is
# known is noisy, and who starts again has missed text to make up for.
TAKE_UP_ABOVE = 1.03
# While it pays, a plain step every so many steps tells what that would take.
PLAIN_EVERY = 100
# A middling draft: chance of its best child, and of each further one over the one before.
FIRST_CHANCE, DECAY = 0.5, 0.6


class Planner:
    """Plans the steps of one engine.

    Args:
        top_k: out-degree of the graph; max_depth: most draft levels; num_nodes: most nodes verified of a graph.
        costs: of this machine; None: draft every level and verify every node.
    """

    def __init__(self, top_k: int, max_depth: int, num_nodes: int, costs: Costs | None = None):
        self.costs = costs
        self.overhead = Overhead()
        self.calibration = Calibration()
        # Average probability of a drafted node's best, second best... child.
        self.children = FIRST_CHANCE * DECAY ** np.arange(top_k)
        # Of a drafted request's graph: chance of its best, second best... node, rows of its first, second... level.
        self.worth = FIRST_CHANCE * DECAY ** np.arange(num_nodes)
        self.levels = np.ones(max_depth)
        self.level_share = 1.0 * (np.arange(max_depth) == 0)  # of the steps that drafted, how many ran the level
        self.drafting = True  # whether drafts pay at present
        self.steps = 0
        self.begin(1, 0)

    def begin(self, num_requests: int, context: int) -> None:
        """Start planning a step of ``num_requests`` requests that have ``context`` tokens in all."""
        self.num_requests = max(1, num_requests)
        self.context = context
        self.steps += 1
        self.rows: list[int] = []  # of the draft levels run
        self.num_drafted = 0
        self.caught_up_rows = 0  # of forwards over committed text: the first level is one
        self.probing = self.resting = False
        # Rows of the coming target step and milliseconds of its forward, by the table as it was measured.
        self.planned = self.num_requests, 0.0
        if self.costs is not None:
            self.tables = *self.costs.tables, self.overhead.node_ms, self.overhead.level_ms
            self.plain_ms = self.overhead.plain_ms(num_requests, context)
            self.planned = self.num_requests, self.costs.target_ms(self.num_requests, context)

    # --- before drafting --------------------------------------------------------------------------

    def drafts_pay(self) -> bool:
        """Whether drafting for all requests of the batch would pay, as far as known by now: prompts ask."""
        if self.costs is None:
            return True
        return self._drafts_rate(np.zeros(0), 1.0, self.num_requests) > self._plain_rate() * self._hurdle

    def _drafts_rate(self, found: np.ndarray, left: float, num_drafted: int) -> float:
        """Tokens per millisecond with drafts; arguments as of ``wants_drafts``."""
        assert self.costs is not None
        spent = self.plain_ms + self.overhead.graph_ms + self.overhead.draft_ms
        usual = left, num_drafted, self.worth, self.levels, self.level_share
        return host.drafts_rate(self.tables, self.num_requests, self.context, spent, found, *usual)

    def wants_drafts(self, num_drafted: int, found: np.ndarray, left: float = 1.0) -> bool:
        """Whether to draft at all; if ``probing``, only for a few requests.

        Args:
            num_drafted: requests of the batch that could be drafted for.
            found: float64 [n], chances of the nodes that other sources have found already.
            left: mean chance that the target leaves those at the root, so that drafted nodes count.
        """
        if self.costs is None:
            return True
        without = max(self._plain_rate(), self._rate(found))
        self.drafting = self._drafts_rate(found, left, num_drafted) > without * self._hurdle
        if self.drafting:
            self.resting = self.steps % PLAIN_EVERY == 0
            return not self.resting
        self.probing = self.steps % PROBE_EVERY == 0
        return self.probing

    @property
    def _hurdle(self) -> float:
        """Share of the rate without drafts that drafts must exceed: hysteresis, so that drafting doesn't flap."""
        return 1.0 if self.drafting else TAKE_UP_ABOVE

    def _plain_rate(self) -> float:
        """Tokens per millisecond without speculation."""
        assert self.costs is not None
        return self.num_requests / (self.costs.target_ms(self.num_requests, self.context) + self.plain_ms)

    def _rate(self, chances: np.ndarray) -> float:
        """Tokens per millisecond without drafting, verifying the right number of the nodes; 0 if there are none."""
        assert self.costs is not None
        spent = self.plain_ms + self.overhead.graph_ms
        return host.best_rate(self.tables, self.num_requests, self.context, spent, chances)

    @property
    def as_usual(self) -> bool:
        """Whether this step's drafting was of what was accepted last alone, without prompts or a text missed so far."""
        return bool(self.rows) and self.caught_up_rows <= self.rows[0]

    def forwards_ms(self) -> float:
        """Milliseconds of this step's draft forwards as far as they are usual, by the table."""
        assert self.costs is not None
        return sum(self.costs.draft_ms(rows) for rows in self.rows)

    def drafting_ms(self) -> float:
        """Milliseconds that this step's drafting so far takes in the long run, 0 without any."""
        if self.costs is None or not self.rows:
            return 0.0
        return self.forwards_ms() + self.overhead.draft_ms + len(self.rows) * self.overhead.level_ms

    # --- while drafting ---------------------------------------------------------------------------

    def caught_up(self, rows: int) -> None:
        """The draft ran over so many rows of committed text."""
        self.caught_up_rows += rows

    def drafted(self, probs: np.ndarray) -> None:
        """A level was drafted: candidates' probabilities, float [rows, top_k], best first."""
        rows = len(probs)
        host.follow_children(self.children, probs, NEWEST)
        if not self.rows:
            # The first level runs over what was accepted last; a text that the draft had missed is made up for once.
            self.num_drafted = rows
            rows = min(max(self.caught_up_rows, rows), rows * (len(self.levels) + 1))
        self.rows.append(rows)

    def level_size(self, values: np.ndarray) -> int:
        """From how many nodes to draft, best first, whose calibrated chances are ``values`` [n]; 0: no such level."""
        costs = self.costs
        if costs is None or len(values) == 0:
            return len(values)
        batch = self.tables, self.num_requests, self.context
        spent = self.plain_ms + self.overhead.graph_ms + self.drafting_ms()
        children = self.children * self.calibration.first_level
        values = np.asarray(values, np.float64)
        return host.level_size(*batch, self._plain_rate(), spent, self.worth, self.num_drafted, values, children)

    # --- after drafting ---------------------------------------------------------------------------

    def choose(self, values: np.ndarray, size: np.ndarray, context: np.ndarray, pure: np.ndarray) -> np.ndarray:
        """How many nodes of each flattened graph to verify.

        Args:
            values: float32 [num_graphs, max_nodes], calibrated chance of each node, descending along a row.
            size: int32 [num_graphs], nodes there are.
            context: int64 [num_graphs], committed tokens of each request.
            pure: bool [num_graphs], whether there are nodes and all are the draft model's.

        Returns:
            int32 [num_graphs], at most ``size``.
        """
        costs = self.costs
        if costs is None or not size.any():
            return size
        if pure.any() and self.num_drafted:
            weight = NEWEST_TRIED if self.probing else NEWEST
            known = self.worth, self.levels, self.level_share
            host.follow_graphs(*known, values, size, pure, np.array(self.rows), self.num_drafted, weight)
        if self.resting:
            return np.zeros_like(size)
        spent = self.plain_ms + self.drafting_ms()
        batch = self.tables, self.num_requests, self.context
        chosen = host.best_nodes(*batch, values, size, context, spent, self.overhead.graph_ms)
        if not chosen.any() and self.steps % PROBE_EVERY == 0:
            return np.minimum(size, 1)  # only to learn what becomes of them
        rows = self.num_requests + int(chosen.sum())
        self.planned = rows, costs.target_ms(rows, self.context + float((chosen * context).sum()))
        return chosen
