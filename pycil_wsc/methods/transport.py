"""Entropic optimal transport between classes."""

import numpy as np


def transport(
    costs: np.ndarray, rows: np.ndarray, columns: np.ndarray, regularisation: float, most: int = 1000
) -> np.ndarray:
    """Sinkhorn's algorithm (Cuturi, 2013): the plan diag(u) exp(-costs / regularisation) diag(v) with these marginals.

    Ends when the columns' sums are right to 1e-9, after ``most`` steps, or when a number would overflow. The rows' sums
    are right. If the marginals have different sums s and t, u is multiplied by s / t in each step and v by t / s. The
    plan then stays the same until one of them overflows; if s < t, it is 0 from then on.

    Args:
        costs: float64 (n, m).
        rows: (n,), the marginal of the rows; ``columns``, (m,), that of the columns.
    """
    kernel = np.exp(-costs / regularisation)
    scaled = kernel / rows[:, None]
    u, v = np.full(len(rows), 1 / len(rows)), np.full(len(columns), 1 / len(columns))
    for step in range(most):
        before = u, v
        with np.errstate(all="ignore"):
            v = columns / (kernel.T @ u)
            u = 1 / (scaled @ v)
        if not (np.isfinite(u).all() and np.isfinite(v).all()):
            u, v = before
            break
        if step % 10 == 0 and np.linalg.norm(v * (kernel.T @ u) - columns) < 1e-9:
            break
    return u[:, None] * kernel * v
