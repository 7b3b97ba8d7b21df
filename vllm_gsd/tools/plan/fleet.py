"""How many replicas a load needs."""

import math
from typing import Any

from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.plan.model import Form, Model

# Replicas are planned to be busy for this share of the time, so that bursts do not queue.
BUSY = 0.8


def replicas(model: Model, form: Form | None, rate: float, latency: float | None, most: int) -> dict[str, Any]:
    """The fewest replicas that answer ``rate`` requests per second, each within ``latency`` seconds on average.

    A replica with n requests running finishes one every ``request_ms(n)``, so a request takes n times that (Little).

    Raises:
        ToolError: not even a single request is answered in time.
    """
    took = {n: model.request_ms(n, form) / 1e3 for n in range(1, most + 1)}
    fitting = [n for n, each in took.items() if latency is None or n * each <= latency]
    if not fitting:
        raise ToolError(
            f"--latency is {latency:g} s, but one request alone takes {took[1]:.2f} s; allow more or shorten answers."
        )
    best = min(fitting, key=lambda n: took[n])
    return {
        "replicas": math.ceil(rate * took[best] / BUSY - 1e-9),
        "requests_at_once": best,
        "requests_per_second": 1 / took[best],
        "seconds_per_request": best * took[best],
    }
