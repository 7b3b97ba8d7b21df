"""The planner decides whether to draft, whether to draft another level, and how many nodes to verify.

A step yields one token per request plus the accepted nodes. It costs the target's forward over all rows, the draft
levels, and overhead. The planner takes the plan with the most expected tokens per millisecond over the whole batch,
including "no speculation". Forward costs are measured at start-up, overhead is learned while running, and the value of
graphs is learned from the graphs. From time to time the planner tries what its present plan leaves out.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from vllm_gsd import host
from vllm_gsd.planner.calibration import Calibration
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.overhead import Overhead

# Weight of the newest graphs in the running average of the value of graphs: about the last 25 steps count.
NEWEST = 0.04
# Weight of graphs that were drafted to learn from them, which are the only evidence while drafting is off or all other
# graphs have copies.
NEWEST_TRIED = 0.25
# Steps until the first probe while speculation does not pay, since texts change. Each further probe waits twice as
# long, up to the maximum, unless the graphs of the last one were worth PROMISING times the average, or SURPRISING times
# as many of their nodes were accepted as calibration had promised.
PROBE_EVERY, PROBE_AT_MOST = 40, 640
PROMISING, SURPRISING = 1.1, 2.0
# Requests that a probe drafts or verifies for. It is few because the draft model has missed much of every text by then,
# and because every row costs time in a full batch.
PROBE_REQUESTS = 2
# Drafting stops as soon as it promises less than plain steps, but resumes only if it promises this much more, and
# copies alone are verified only if they do. Estimates are noisy, and a draft model that resumes must first run the text
# that it has missed.
TAKE_UP_ABOVE = 1.03
# Steps to the first plain step while drafting or copies pay, to learn what a plain step takes. Each further one waits
# twice as long, up to the maximum. Batches are counted by powers of two of their size, since what graphs cost beyond
# the table is unknown at first and differs with the batch. Graphs that promise less than LARGE_GAIN are compared more
# often: a plain step then loses less, and a small error in what graphs cost decides whether they pay.
PLAIN_AFTER, PLAIN_EVERY, LARGE_GAIN = 4, 100, 0.2
# The least speed of a step relative to the table. It bounds the effect of wrong estimates.
LEAST_SPEED = 0.3
# A row of text takes the draft about READING times what a row of a level does, whose candidates are scored too; it is
# the cost of the rows beyond READ_ROWS that counts. Texts of at most FEW_MISSED tokens are always read.
READING, READ_ROWS, FEW_MISSED = 0.5, 128, 64
# Prior of a draft: probability of its best child, and the ratio of each further child to the one before.
FIRST_CHANCE, DECAY = 0.5, 0.6


class Planner:
    """Plans the steps of one engine.

    Args:
        top_k, max_depth, num_nodes: maximum children of a node, draft levels, and verified nodes of a graph.
        costs: costs on this machine; None to draft every level and verify every node.
        first_rows: rows of a request in the draft's first forward if it has missed nothing: its last token, or a block.
    """

    def __init__(self, top_k: int, max_depth: int, num_nodes: int, costs: Costs | None = None, first_rows: int = 1):
        self.costs, self.first_rows = costs, first_rows
        self.limits = top_k, max_depth, num_nodes
        self.forget()

    def forget(self) -> None:
        """Forget everything learned; the measured costs stay."""
        top_k, max_depth, num_nodes = self.limits
        self.overhead = Overhead()
        self.calibration = Calibration()
        # Average probability of the best, second best... child of a drafted node.
        self.children = FIRST_CHANCE * DECAY ** np.arange(top_k)
        # Per drafted request: probability of its graph's best, second best... node, and rows of each level.
        self.worth = FIRST_CHANCE * DECAY ** np.arange(num_nodes)
        self.levels = np.ones(max_depth)
        self.levels[0] = self.first_rows
        self.level_share = 1.0 * (np.arange(max_depth) == 0)  # share of drafting steps that run the level
        self.drafting = True  # whether drafting pays at present
        self.given_levels: int | None = None  # levels to draft where a plan is given
        self.steps = 0
        self.plain_steps: dict[int, tuple[int, int]] = {}  # by size of the batch: steps since the last one, and between
        self._probe_after(PROBE_EVERY)
        # The step in which drafted graphs get no copies if none has taught anything until then, and steps to the next.
        self.next_alone = self.alone_every = PLAIN_AFTER
        self.begin(1, 0)

    def begin(self, num_requests: int, context: int) -> None:
        """Start planning a step of ``num_requests`` requests with ``context`` tokens in total."""
        self.rows: list[int] = []  # rows of the draft levels run so far
        self.num_drafted = 0
        self.caught_up_rows = 0  # rows of forwards over committed text, including the first level
        if self.given_levels is not None:
            return
        self.num_requests = max(1, num_requests)
        self.context = context
        self.steps += 1
        self.due = self.steps >= self.next_probe  # whether to probe in this step if speculation does not pay
        if self.due:
            self._probe_after(2 * self.pause)
        self.probing = self.resting = self.alone = self.waiting = False
        self.rates: tuple[float, ...] = ()  # expected tokens per millisecond with drafts and without, if compared
        # Rows of the coming target forward, and its milliseconds by the table.
        self.planned = self.num_requests, 0.0
        self.speed = 1.0  # milliseconds that pass in one of the table's
        if self.costs is not None:
            forward_ms, known = self.costs.target_ms(self.num_requests, context), self.overhead
            self.planned = self.num_requests, forward_ms
            # No step is shorter than its forward. If steps seem to be, the table was measured while the machine was
            # slower, and all its times are too long. Plans are compared in the time of the table.
            beyond_ms = known.plain_ms(num_requests, context)
            self.speed = max(LEAST_SPEED, 1.0 + min(0.0, beyond_ms) / forward_ms)
            # Times of levels that were measured in whole phases contain their overhead.
            level_ms = 0.0 if self.costs.by_level else known.level_ms
            times = max(0.0, beyond_ms), known.graph_ms, known.node_ms, known.draft_ms, level_ms
            self.plain_ms, self.graph_ms, self.node_ms, self.draft_ms, self.level_ms = (ms / self.speed for ms in times)
            self.tables = *self.costs.tables, self.node_ms, self.level_ms

    def _probe_after(self, steps: int) -> None:
        """Probe next in ``steps`` steps, or in the maximum."""
        self.pause = min(steps, PROBE_AT_MOST)
        self.next_probe = self.steps + self.pause

    @contextmanager
    def given(self, levels: int | None) -> Iterator[None]:
        """Inside this context, draft ``levels`` levels (None for all) and verify every node; then restore the plan."""
        kept = vars(self).copy()
        self.given_levels = len(self.levels) if levels is None else levels
        try:
            yield
        finally:
            vars(self).update(kept)

    @contextmanager
    def unlearned(self) -> Iterator[None]:
        """Forget what is learned inside this context at its end."""
        kept = copy.deepcopy(vars(self))
        try:
            yield
        finally:
            vars(self).update(kept)

    # --- before drafting --------------------------------------------------------------------------

    def drafts_pay(self) -> bool:
        """Whether the draft should read prompts: drafting for all requests of the batch would pay, or be tried.

        While drafting is off, it is cheaper to read the texts of the few requests that a probe drafts for. In a step
        that could draft for no request, as in one that only reads prompts, whether drafting was on before tells nothing
        of these requests.
        """
        if self.costs is None or self.due or self.waiting:
            return True
        if self.rates and not self.drafting:
            return False
        return self._drafts_rate(np.zeros(0), 1.0, self.num_requests) > self._plain_rate() * self._hurdle

    def reading_pays(self, missed: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Whether answers are long enough to make up for the time in which the draft reads their texts.

        Args:
            missed: int64 [n], tokens that the draft would have to read first.
            left: int64 [n], tokens of the answer that can be drafted.

        Returns:
            bool [n]; all True where drafts promise nothing, as then only a probe reads.
        """
        if self.costs is None or self.costs.by_level or self.given_levels is not None or (missed <= FEW_MISSED).all():
            return np.ones(len(missed), np.bool_)
        with_drafts, plain = self._drafts_rate(np.zeros(0), 1.0, self.num_requests), self._plain_rate()
        if with_drafts <= plain:
            return np.ones(len(missed), np.bool_)
        saved_ms = left * (1.0 / plain - 1.0 / with_drafts)
        row_ms = (self.costs.draft_ms(2 * READ_ROWS) - self.costs.draft_ms(READ_ROWS)) / READ_ROWS
        return (missed <= FEW_MISSED) | (READING * row_ms * missed < saved_ms)

    def put_off(self) -> None:
        """If this step was to probe, probe in the next one instead, because there is no request to draft for.

        Only the draft waits. Copies do not: they would be tried in every step until then.
        """
        if self.due:
            self.pause, self.next_probe = max(PROBE_EVERY, self.pause // 2), self.steps + 1
            self.due, self.probing, self.alone, self.waiting = False, False, False, True

    def _drafts_rate(self, found: np.ndarray, left: float, num_drafted: int) -> float:
        """Tokens per millisecond with drafts; arguments as for ``wants_drafts``."""
        assert self.costs is not None
        spent, share = self.plain_ms + self.graph_ms + self.draft_ms, self.level_share
        if self.costs.by_level:  # a level runs over the whole batch, whomever it drafts for
            spent += sum(part * self.costs.draft_ms(self.num_requests, level) for level, part in enumerate(share))
            share = np.zeros_like(share)
        usual = left, num_drafted, self.worth, self.levels, share
        return host.drafts_rate(self.tables, self.num_requests, self.context, spent, found, *usual)

    def wants_drafts(self, num_drafted: int, found: np.ndarray, left: float = 1.0) -> bool:
        """Whether to draft at all: while ``probing``, for a few requests only; while ``alone``, without copies.

        Args:
            num_drafted: number of requests that could be drafted for.
            found: float64 [n], probabilities of the nodes that other sources have found.
            left: mean probability that the target accepts none of these nodes, so that drafted nodes count.
        """
        if self.given_levels is not None:
            return self.given_levels > 0
        if self.costs is None:
            self.drafting = num_drafted > 0
            return self.drafting
        spent = self.plain_ms + self.graph_ms
        copied = host.best_rate(self.tables, self.num_requests, self.context, spent, found)
        without = max(self._plain_rate(), copied)
        rate = self._drafts_rate(found, left, num_drafted)
        self.drafting = rate > without * self._hurdle
        self.rates = (rate / self.speed, without / self.speed) if num_drafted else ()
        if self.drafting:
            self._probe_after(PROBE_EVERY)
            self.resting = self._plain_step_is_due(rate / self._plain_rate())
            self.alone = not self.resting and self._graphs_without_copies_are_due()
            return not self.resting
        self.probing = self.alone = self.due and num_drafted > 0
        return self.probing

    def _plain_step_is_due(self, speed_up: float) -> bool:
        """Count a step in which graphs promise ``speed_up``; return whether to verify nothing, to time a plain step."""
        size = self.num_requests.bit_length()
        since, pause = self.plain_steps.get(size, (1, PLAIN_AFTER))
        most = max(2 * PLAIN_AFTER, int(PLAIN_EVERY * min(1.0, (speed_up - 1.0) / LARGE_GAIN)))
        due = since >= min(pause, most)
        self.plain_steps[size] = (1, min(2 * pause, PLAIN_EVERY)) if due else (since + 1, pause)
        return due

    def _graphs_without_copies_are_due(self) -> bool:
        """Whether no drafted graph has taught anything for so long that some shall get no copies."""
        due = self.steps >= self.next_alone
        if due:
            self.alone_every = min(2 * self.alone_every, PLAIN_EVERY)
            self.next_alone = self.steps + self.alone_every
        return due

    @property
    def _hurdle(self) -> float:
        """The multiple of the rate without drafts that drafts must exceed; hysteresis against flapping."""
        return 1.0 if self.drafting else TAKE_UP_ABOVE

    def _plain_rate(self) -> float:
        """Tokens per millisecond without speculation."""
        assert self.costs is not None
        return self.num_requests / (self.costs.target_ms(self.num_requests, self.context) + self.plain_ms)

    @property
    def plan(self) -> str:
        """The decision on drafting in this step, for traces."""
        if self.costs is None:
            return "fixed"
        return "rests" if self.resting else "drafts" if self.drafting else "probes" if self.probing else "pauses"

    @property
    def as_usual(self) -> bool:
        """Whether this step drafted from the last accepted tokens only, without prompts or missed text."""
        return bool(self.rows) and self.caught_up_rows <= self.rows[0]

    def forwards_ms(self) -> float:
        """This step's draft forwards in the time of the table, with one-time catching up capped."""
        assert self.costs is not None
        return sum(self.costs.draft_ms(rows, level) for level, rows in enumerate(self.rows))

    def drafting_ms(self) -> float:
        """This step's drafting so far in the time of the table, including overhead; 0 without drafting."""
        if self.costs is None or not self.rows:
            return 0.0
        return self.forwards_ms() + self.draft_ms + len(self.rows) * self.level_ms

    # --- while drafting ---------------------------------------------------------------------------

    def caught_up(self, rows: int) -> None:
        """Record that the draft model ran over this many rows of committed text."""
        self.caught_up_rows += rows

    def drafted(self, probs: np.ndarray) -> None:
        """Record a drafted level and learn from its candidates' probabilities, float [rows, top_k], best first."""
        rows = len(probs)
        self.learn_children(probs)
        if not self.rows:
            # The first level runs over the last accepted tokens. Missed text is caught up only once, so its rows are
            # capped.
            self.num_drafted = rows
            rows = min(max(self.caught_up_rows, rows), rows * (len(self.levels) + self.first_rows))
        self.rows.append(rows)

    def num_levels(
        self, num_requests: int, num_drafted: int, frontiers: Sequence[np.ndarray], options: Sequence[int]
    ) -> int:
        """Choose how many levels a draft phase runs over a batch, where they are not chosen one by one.

        Levels are added while ``level_size`` would expand a node for the next, whose cost is that of the whole batch.

        Args:
            num_requests: the requests of the batch; num_drafted: those to draft for.
            frontiers: float [n] for each level but the last, calibrated probabilities of the nodes that it adds.
            options: the possible numbers of levels, ascending.

        Returns:
            the first of ``options`` that has room for the levels.
        """
        self.num_drafted, self.rows = num_drafted, [num_requests]
        most = options[-1] if self.costs is None else 1
        if self.costs is not None:
            while most < options[-1] and self.level_size(frontiers[most - 1]):
                most += 1
                self.rows.append(num_requests)
        chosen = next(levels for levels in options if levels >= most)
        self.rows = [num_requests] * chosen
        return chosen

    def learn_children(self, probs: np.ndarray) -> None:
        """Learn from the probabilities of some nodes' children, float32 [rows >= 1, any], best first."""
        most = min(len(self.children), probs.shape[1])
        host.follow_children(self.children[:most], np.ascontiguousarray(probs[:, :most]), NEWEST)

    def level_size(self, values: np.ndarray) -> int:
        """Number of nodes to expand, best first, given their calibrated probabilities ``values`` [n]; 0 to stop."""
        costs = self.costs
        if self.given_levels is not None:
            return len(values) if len(self.rows) < self.given_levels else 0
        if costs is None or len(values) == 0:
            return len(values)
        spent = self.plain_ms + self.graph_ms + self.drafting_ms()
        children, tables = self.children * self.calibration.first_level, self.tables
        if costs.by_level:  # it runs over the whole batch, however few nodes it expands
            tables = tables[0], np.full(3, costs.draft_ms(self.rows[0], len(self.rows))), *tables[2:]
        batch = tables, self.num_requests, self.context
        values = np.asarray(values, np.float64)
        return host.level_size(*batch, self._plain_rate(), spent, self.worth, self.num_drafted, values, children)

    # --- after drafting ---------------------------------------------------------------------------

    def choose(
        self, values: np.ndarray, size: np.ndarray, context: np.ndarray, drafted: np.ndarray, pure: np.ndarray
    ) -> np.ndarray:
        """Learn what the flattened graphs are worth, and choose how many nodes of each to verify.

        Args:
            values: float32 [num_graphs, max_nodes], calibrated probabilities, descending along a row.
            size: int32 [num_graphs], number of nodes.
            context: int64 [num_graphs], committed tokens of each request.
            drafted: bool [num_graphs], whether the draft model has grown a graph.
            pure: bool [num_graphs], whether it has, and nothing else has.

        Returns:
            int32 [num_graphs], at most ``size``.
        """
        if self.costs is None or self.given_levels is not None:
            return size
        self.learn_graphs(values, size, pure, self.rows, self.num_drafted, self.alone)
        return self.or_rest(self.sizes(values, size, context, drafted), values)

    def or_rest(self, chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The numbers of nodes to verify; if there are only copies, none where they hardly pay or a plain step is due.

        Args:
            chosen: int32 [num_graphs], from ``sizes``; values: as for ``choose``.
        """
        if self.num_drafted or self.due or self.costs is None or not chosen.any():
            return chosen
        rows, target_ms = self.planned
        spent = self.plain_ms + self.graph_ms + (rows - self.num_requests) * self.node_ms
        tokens = self.num_requests + float(values[np.arange(values.shape[1]) < chosen[:, None]].sum())
        speed_up = tokens / (spent + target_ms) / self._plain_rate()
        if speed_up > TAKE_UP_ABOVE:
            counted = self.drafting and bool(self.rates)  # by ``wants_drafts``, and then nothing could be drafted
            self.resting = not counted and self._plain_step_is_due(speed_up)
            if not self.resting:
                return chosen
        self.planned = self.num_requests, self.costs.target_ms(self.num_requests, self.context)
        return np.zeros_like(chosen)

    def learn_graphs(
        self, values: np.ndarray, size: np.ndarray, pure: np.ndarray, rows: Sequence[int], num_drafted: int, tried: bool
    ) -> None:
        """Learn what drafted graphs are worth. Model Runner V2 learns of them a step or two after the draft phase.

        Args:
            values, size, pure: as for ``choose``.
            rows: rows of each draft level of the step that drafted them.
            num_drafted: number of requests that the step drafted for.
            tried: whether it did so to learn from graphs that have no copies.
        """
        if not num_drafted or not pure.any():
            return
        self.next_alone = self.steps + self.alone_every
        weight = NEWEST_TRIED if tried else NEWEST
        known, before = (self.worth, self.levels, self.level_share), self.worth.sum()
        host.follow_graphs(*known, values, size, pure, np.array(rows), num_drafted, weight)
        if tried and self.worth.sum() > before * (1.0 + (PROMISING - 1.0) * weight):
            self._probe_after(PROBE_EVERY)

    def learn_accepted(self, promised: float, accepted: float) -> None:
        """Learn how many drafted nodes of a step were accepted, and how many their values had ``promised``."""
        if self.costs is not None and not self.drafting and accepted > SURPRISING * promised + 1.0:
            self._probe_after(PROBE_EVERY)

    def sizes(
        self, values: np.ndarray, size: np.ndarray, context: np.ndarray, drafted: np.ndarray, shares: Sequence[int] = ()
    ) -> np.ndarray:
        """Choose how many nodes to verify, and learn nothing; arguments and result as for ``choose``.

        Args:
            values, size, context, drafted: as for ``choose``. A probe verifies all nodes of the drafted graphs: it
                would never be learned of those that it left out that they have become better.
            shares: if any, all graphs get the same one of these numbers of nodes, whatever their sizes, because full
                CUDA graphs hold batches whose requests have equally many rows.
        """
        costs = self.costs
        if costs is None or not size.any():
            return size
        if self.resting:
            return np.zeros_like(size)
        spent = self.plain_ms + self.drafting_ms()
        batch = self.tables, self.num_requests, self.context
        if shares:
            chosen = np.full_like(size, self._share(values, size, spent, shares))
        else:
            chosen = host.best_nodes(*batch, values, size, context, spent, self.graph_ms)
        if self.probing:
            chosen = np.where(drafted, size, chosen)
        elif not chosen.any() and self.due:  # verify the best nodes to learn whether they are accepted
            best = np.argsort(np.where(size > 0, -values[:, 0], 0.0), kind="stable")[:PROBE_REQUESTS]
            chosen[best] = np.minimum(size[best], 1)
            return chosen
        rows = self.num_requests + int(chosen.sum())
        self.planned = rows, costs.target_ms(rows, self.context + float((chosen * context).sum()))
        return chosen

    def _share(self, values: np.ndarray, size: np.ndarray, spent: float, shares: Sequence[int]) -> int:
        """The one of ``shares`` with the most tokens per millisecond."""
        costs = self.costs
        assert costs is not None
        real = np.where(np.arange(values.shape[1]) < size[:, None], values, 0.0)
        gains = np.append(0.0, real.cumsum(0, dtype=np.float64)[-1].cumsum())  # of the first n nodes of every graph

        def rate(share: int) -> float:
            count = share * len(size)
            rows, context = self.num_requests + count, self.context * (1.0 + count / self.num_requests)
            took = costs.target_ms(rows, context) + count * self.node_ms
            return (self.num_requests + gains[share]) / (spent + took + (share > 0) * self.graph_ms)

        return max(shares, key=rate)
