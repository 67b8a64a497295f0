"""The projection of a gradient to the nearest one that no constraint forbids."""

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.devices import widest_float


def projected(gradients: Tensor) -> Tensor:
    """The vector nearest to the last row g that has no negative product with another row of G: (k + 1, n) -> (n,).

    It is g + v G, where v >= 0 minimises its norm: the dual of the quadratic program. Synchronises with the device.
    """
    wide = gradients.to(widest_float(gradients.device))
    products = (wide @ wide.T).cpu().double().numpy()
    weights = np.zeros(len(gradients) - 1)
    if np.isfinite(products).all() and (products[:-1, -1] < 0).any():
        from scipy.optimize import nnls  # slow to import, and needed by this method alone

        values, vectors = np.linalg.eigh(products)
        rows = np.sqrt(values.clip(0))[:, None] * vectors.T  # (k + 1, k + 1), with the same products
        weights, _ = nnls(rows[:, :-1], -rows[:, -1])  # raises if it does not converge
    return (wide[-1] + torch.from_numpy(weights).to(wide.dtype).to(wide.device) @ wide[:-1]).to(gradients)
