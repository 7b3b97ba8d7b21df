"""Recursive least squares with a prior and fading observations."""

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
    """Learn that the value at ``parts`` was ``took``, with the error clipped to ``most``.

    Args:
        squares, products: normal equations of the observations, which fade, float64 [n, n] and [n]; updated.
        belief_squares, belief_products: normal equations of the prior.
        weights: float64 [n], weights of the function; updated.
        parts: float64 [n], arguments of the function.
    """
    known = 0.0
    for weight, part in zip(weights.tolist(), parts.tolist(), strict=True):
        known += weight * part
    took = known + min(max(took - known, -most), most)
    products[:] = KEPT * products + took * parts
    squares[:] = KEPT * squares + np.outer(parts, parts)
    weights[:] = solve(squares + belief_squares, products + belief_products)


def solve(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve ``left`` [n, n] x = ``right`` [n] for a symmetric positive definite ``left``, which needs no pivots.

    Gaussian elimination adds in a fixed order, so that all ranks agree; a library's order may differ between machines.
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
