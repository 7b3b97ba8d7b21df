"""Linear functions whose weights wander, learned from noisy observations: a Kalman filter."""

import numpy as np


def follow_clock(
    weights: np.ndarray,
    covariance: np.ndarray,
    prior: np.ndarray,
    variance: np.ndarray,
    keep: np.ndarray,
    parts: np.ndarray,
    took: float,
    most: float,
) -> None:
    """Learn that the value at ``parts`` was ``took``, with the error clipped to ``most`` and a variance of 1.

    Between two observations, every weight wanders as an Ornstein-Uhlenbeck process does: its distance from the prior
    shrinks by the factor ``keep``, and without observations its variance becomes that of the prior.

    Args:
        weights: float64 [n], weights of the function; updated.
        covariance: float64 [n, n], of the errors of the weights; updated.
        prior, variance: float64 [n], means and variances of the weights before any observation.
        keep: float64 [n], between 0 and 1.
        parts: float64 [n], arguments of the function.
    """
    weights[:] = prior + keep * (weights - prior)
    covariance *= np.outer(keep, keep)
    covariance += np.diag((1.0 - keep * keep) * variance)
    shared = np.array([_sum(row * parts) for row in covariance])  # covariances of the weights with the value
    error = min(max(took - _sum(weights * parts), -most), most)
    total = 1.0 + _sum(shared * parts)
    weights += shared / total * error
    covariance -= np.outer(shared, shared) / total


def _sum(values: np.ndarray) -> float:
    """The sum in order, so that all ranks agree; a library's order may differ between machines."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total
