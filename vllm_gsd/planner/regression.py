"""Least squares over the latest observations and over what was believed before, one observation at a time."""

import numpy as np

from vllm_gsd.method.constants import KEPT


def follow_clock(
    squares: np.ndarray,
    products: np.ndarray,
    belief_squares: np.ndarray,
    belief_products: np.ndarray,
    weights: np.ndarray,
    parts: np.ndarray,
    took: float,
    most: float,
) -> None:
    """Learn that at ``parts`` the function was ``took``; being wrong by more than ``most`` counts as by that.

    Args:
        squares, products: normal equations of the observations, float64 [n, n] and [n]; older ones fade; updated.
        belief_squares, belief_products: those of the belief.
        weights: float64 [n], the function's; solved for anew.
        parts: float64 [n].
    """
    known = 0.0
    for weight, part in zip(weights.tolist(), parts.tolist(), strict=True):
        known += weight * part
    took = known + min(max(took - known, -most), most)
    products[:] = KEPT * products + took * parts
    squares[:] = KEPT * squares + np.outer(parts, parts)
    weights[:] = solve(squares + belief_squares, products + belief_products)


def solve(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The solution of ``left`` [n, n] x = ``right`` [n], which is symmetric and positive, so it needs no pivots.

    Gaussian elimination in a fixed order of sums: a library's may differ between machines, and ranks must agree.
    """
    left, right = left.copy(), right.copy()
    count = len(right)
    for i in range(count):
        for row in range(i + 1, count):
            factor = left[row, i] / left[i, i]
            right[row] -= factor * right[i]
            left[row, i:] -= factor * left[i, i:]
    solution = np.zeros(count)
    for i in reversed(range(count)):
        rest = right[i]
        for column in range(i + 1, count):
            rest -= left[i, column] * solution[column]
        solution[i] = rest / left[i, i]
    return solution
