"""The time of steps beyond their forwards in the table, learned from the clock while the engine runs."""

from collections.abc import Sequence

import numpy as np

from vllm_gsd.host import follow_clock

# If nearly all steps of an engine verify graphs, noise can shift cost from graphs to plain steps. The planner therefore
# never takes graphs to cost less than this.
LEAST_GRAPH_MS = 0.3
# Standard deviation of a step's time, as a share of its forward's; at least a millisecond. Times of long steps are
# noisier, and if each counted as much as that of a short step, noise would outweigh the priors.
NOISE = 0.05
# Number of observations in which costs change, as with other texts; in which the machine's speed does; and in which the
# costs of drafting do.
MEMORY, SPEED_MEMORY, DRAFT_MEMORY = 500, 5, 100


class Overhead:
    """Milliseconds beyond the forwards, for a step and for its drafting.

    A step's overhead is a constant plus terms for each request, for the context (keys and values are read once per
    request), for verifying graphs at all, and for each node. The speed of the machine also varies by some per cent. All
    plans take longer or shorter by it, so it decides nothing; but if it were not learned, a slow second would count as
    a cost of whatever ran in it.
    """

    def __init__(self) -> None:
        # Steps without graphs may be rare, so the priors of what graphs and nodes add are firmer than the others, on
        # which every step gives evidence. The last weight is that of the forward: the machine's speed.
        self.step = Learned(
            prior=(2.0, 0.1, 0.5, 1.0, 0.0, 0.0),
            doubt=(4.0, 0.3, 2.0, 1.0, 0.15, 0.1),
            memory=(*[MEMORY] * 5, SPEED_MEMORY),
        )
        # At first, graphs may cost much more than that, so the first plain steps are believed.
        self.step.covariance[3, 3] = 4.0**2
        self.draft = Learned(prior=(0.5, 0.2), doubt=(2.0, 0.3), memory=(DRAFT_MEMORY, DRAFT_MEMORY))

    def plain_ms(self, num_requests: int, context: float) -> float:
        """Overhead of a step that verifies nothing; ``context`` is the total number of tokens of all requests."""
        return self.step.value(_step_parts(num_requests, context, 0, 0.0))

    @property
    def graph_ms(self) -> float:
        """Additional overhead of a step that verifies graphs, not less than LEAST_GRAPH_MS."""
        return max(LEAST_GRAPH_MS, float(self.step.weights[3]))

    @property
    def node_ms(self) -> float:
        """Additional overhead per verified node; at least what the table says."""
        return max(0.0, float(self.step.weights[4]))

    @property
    def draft_ms(self) -> float:
        """Overhead of drafting."""
        return float(self.draft.weights[0])

    @property
    def level_ms(self) -> float:
        """Additional overhead per draft level."""
        return float(self.draft.weights[1])

    def observe_step(self, took: float, forward: float, num_requests: int, context: float, nodes: int) -> None:
        """Learn from a step: its milliseconds without drafting, those of its forward by the table, and its size."""
        noise, most = max(1.0, NOISE * forward), 0.3 * forward + 1.0
        parts = _step_parts(num_requests, context, nodes, forward)
        self.step.observe(parts / noise, (took - forward) / noise, most / noise)

    def observe_drafts(self, took: float, forwards: float, levels: int) -> None:
        """Learn from drafting: its milliseconds, those of its forwards by the table, and its levels."""
        self.draft.observe(np.array([1.0, levels]), took - forwards, 0.3 * forwards + 1.0)

    def rest_drafts(self) -> None:
        """Let the evidence on drafting fade in a step that adds none.

        Otherwise drafting that other load slowed down for a while would count as slow for ever: probes run over text
        that the draft has missed, so their times are not typical and teach nothing.
        """
        self.draft.observe(np.zeros(2), 0.0, 0.0)


def _step_parts(num_requests: int, context: float, nodes: int, forward: float) -> np.ndarray:
    return np.array([1.0, num_requests, context / 1000, nodes > 0, nodes, forward], np.float64)


class Learned:
    """A linear function learned from recent observations, each of which has a standard deviation of 1.

    ``doubt`` is the standard deviation of each weight around its prior, and ``memory`` the number of observations in
    which a weight goes back to its prior if they say nothing of it (see ``follow_clock``).
    """

    def __init__(self, prior: Sequence[float], doubt: Sequence[float], memory: Sequence[int]):
        self.weights = np.array(prior)
        variance = np.square(doubt)
        self.covariance = np.diag(variance)
        self.belief = np.array(prior), variance, 1.0 - 1.0 / np.array(memory)

    def value(self, parts: np.ndarray) -> float:
        """The function at ``parts``, float64 [n]."""
        return sum(weight * part for weight, part in zip(self.weights.tolist(), parts.tolist(), strict=True))

    def observe(self, parts: np.ndarray, took: float, most: float) -> None:
        """Learn that the value at ``parts``, float64 [n], was ``took``, with the error clipped to ``most``.

        Clipping limits the effect of a single slow step, for example from a page fault.
        """
        follow_clock(self.weights, self.covariance, *self.belief, parts, took, most)
