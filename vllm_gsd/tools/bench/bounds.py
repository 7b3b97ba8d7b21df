"""Means with confidence bounds."""

import numpy as np

RESAMPLES = 10_000
# Bounds over fewer values are unreliable: two values that happen to agree would give narrow ones.
FEWEST = 4


def mean_with_bounds(values: list[float]) -> dict[str, float | None]:
    """The geometric mean of ratios above 0, one per prompt, with 95% bootstrap bounds over the prompts.

    Returns:
        ``mean``, ``low`` and ``high``. The bounds are None for fewer than ``FEWEST`` values.
    """
    logs = np.log(values)
    low = high = None
    if len(logs) >= FEWEST:
        drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
        low, high = np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()
    return {"mean": float(np.exp(logs.mean())), "low": low, "high": high}
