"""Means that say how sure they are."""

from __future__ import annotations

import numpy as np

RESAMPLES = 10_000
# Of fewer values bounds would say more about chance than about the mean: those of two that happen to agree are narrow.
FEWEST = 4


def mean_with_bounds(values: list[float]) -> dict[str, float | None]:
    """The geometric mean of ratios, one of each prompt, and between what it lies were other prompts drawn.

    Args:
        values: above 0, at least one.

    Returns:
        ``mean``, and ``low`` and ``high``, 95% by bootstrap over the values; None of fewer than ``FEWEST``.
    """
    logs = np.log(values)
    low = high = None
    if len(logs) >= FEWEST:
        drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
        low, high = np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()
    return {"mean": float(np.exp(logs.mean())), "low": low, "high": high}
