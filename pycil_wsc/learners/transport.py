"""Optimal transport with entropic regularisation, and the classes between which it is."""

import numpy as np

from pycil_wsc.data.exemplars import normalise


def means_of(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The k classes of some samples, and the normalised mean of their normalised features: (k,), float64 (k, d).

    ``features``: (n, d); ``targets``: (n,).
    """
    features, labels = normalise(features), np.unique(targets)
    means = np.stack([features[targets == label].mean(0) for label in labels]).astype(float)
    return labels, means / np.linalg.norm(means, axis=1, keepdims=True)


def plan_between(
    sources: tuple[np.ndarray, np.ndarray],
    goals: tuple[np.ndarray, np.ndarray],
    norm: float,
    regularisation: float,
    total: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The classes of the sources, and the plan between these and the goals, which are as :func:`means_of` gives them.

    ``norm``: the power of the distance; ``total``: each class has a share of 1 / total; None: of 1 / the number of
    classes on its side.
    """
    (labels, means), (_, others) = sources, goals
    costs = (np.abs(means[:, None] - others) ** norm).sum(2) ** (1 / norm)
    rows, columns = (np.full(len(side), 1 / (total or len(side))) for side in (means, others))
    return labels, transport(costs, rows, columns, regularisation)


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
