"""What a step takes on a machine, in milliseconds, as the planner counts it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_gsd.planner.costs import Costs

Curve = Callable[[float], float]


@dataclass(frozen=True)
class Machine:
    """A machine with a target and a draft."""

    costs: Costs  # forwards of both models
    plain: Curve  # a step that verifies nothing in plain vLLM, by running requests
    off: Curve  # the same in our engine
    # What verifying graphs at all, each node, drafting at all and each draft level add to a step, besides the forwards.
    graph_ms: float
    node_ms: float
    draft_ms: float
    level_ms: float
    prompt_ms: dict[str, Curve]  # a request's time outside of decoding, by method ("plain", "off", "gsd") and requests
    most: int | None  # most requests whose context fits into memory; None if unknown
    assumptions: list[str]  # sentences that say where the numbers come from


def curve(points: list[tuple[float, float]]) -> Curve:
    """Linear between the points, level before the first, and with the last slope (not below 0) after the last."""
    at, values = (np.array(side, np.float64) for side in zip(*sorted(points), strict=True))
    slope = max(0.0, (values[-1] - values[-2]) / (at[-1] - at[-2])) if len(at) > 1 else 0.0
    return lambda x: float(np.interp(x, at, values) + slope * max(0.0, x - at[-1]))
