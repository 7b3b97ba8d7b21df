"""What steps take beyond their forwards by the table: learned from the clock while running, as only there all shows."""

import numpy as np

from vllm_gsd.host import follow_clock


class Overhead:
    """Milliseconds beyond the forwards: of a step, and of drafting before it.

    A step's part is what each holds anyway, more for each request and for its context (keys and values are read once
    a request, whatever it verifies), more where graphs are verified at all, and for each of their nodes.
    """

    def __init__(self) -> None:
        # What is believed beforehand, and how surely. Steps without graphs may be rare, so what tells both apart is
        # believed longer than the rest, which every step shows.
        self.step = Learned(prior=(2.0, 0.1, 0.5, 1.0, 0.0), doubt=(5.0, 0.3, 2.0, 0.5, 0.5))
        self.draft = Learned(prior=(0.5, 0.2), doubt=(2.0, 0.3))

    def plain_ms(self, num_requests: int, context: float) -> float:
        """Of a step that verifies nothing; ``context``: tokens of all requests together."""
        return self.step.value(_step_parts(num_requests, context, 0))

    @property
    def graph_ms(self) -> float:
        """More where graphs are verified."""
        return float(self.step.weights[3])

    @property
    def node_ms(self) -> float:
        """More for each node verified."""
        return float(self.step.weights[4])

    @property
    def draft_ms(self) -> float:
        """Of drafting."""
        return float(self.draft.weights[0])

    @property
    def level_ms(self) -> float:
        """More for each draft level."""
        return float(self.draft.weights[1])

    def observe_step(self, took: float, forward: float, num_requests: int, context: float, nodes: int) -> None:
        """Learn from a step.

        Args:
            took: milliseconds of all of it but drafting; forward: of its forward by the table.
            num_requests, context, nodes: that it had.
        """
        self.step.observe(_step_parts(num_requests, context, nodes), took - forward, 0.3 * forward + 1.0)

    def observe_drafts(self, took: float, forwards: float, levels: int) -> None:
        """Learn from drafting: milliseconds it took, those of its forwards by the table, how many levels."""
        self.draft.observe(np.array([1.0, levels]), took - forwards, 0.3 * forwards + 1.0)


def _step_parts(num_requests: int, context: float, nodes: int) -> np.ndarray:
    return np.array([1.0, num_requests, context / 1000, nodes > 0, nodes], np.float64)


class Learned:
    """A linear function of a few parts: least squares over the latest observations, and over what was believed before.

    Args:
        prior: what a part takes, as believed beforehand.
        doubt: standard deviation of that belief, where one observation's is 1.
    """

    def __init__(self, prior: tuple[float, ...], doubt: tuple[float, ...]):
        self.weights = np.array(prior)
        # Normal equations of the observations, and of the belief.
        self.squares, self.products = np.zeros((len(prior), len(prior))), np.zeros(len(prior))
        self.belief = np.diag(1.0 / np.array(doubt) ** 2), np.array(prior) / np.array(doubt) ** 2

    def value(self, parts: np.ndarray) -> float:
        """The function at ``parts``, float64 [n]."""
        return sum(weight * part for weight, part in zip(self.weights.tolist(), parts.tolist(), strict=True))

    def observe(self, parts: np.ndarray, took: float, most: float) -> None:
        """At ``parts``, float64 [n], it was ``took``; being wrong by more than ``most`` counts as being so by that.

        One slow step (another process, a page fault) hardly moves what is known.
        """
        follow_clock(self.squares, self.products, *self.belief, self.weights, parts, took, most)
