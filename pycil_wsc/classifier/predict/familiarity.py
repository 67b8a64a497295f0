"""How familiar an image is: whether it may be of a class that was never learned."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pycil_wsc.classifier.predict.arguments import probability
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.errors import UserError


class Refused(TypedDict):
    """How well images of unknown classes are told from those of known ones.

    ``known`` and ``unknown``: the percentage of such images that is refused. ``accuracy``: in percent, on the images of
    known classes that are not refused. ``auroc``: the probability that an image of a known class is more familiar than
    one of an unknown class. None if there is no such image.
    """

    known: float
    unknown: float | None
    accuracy: float | None
    auroc: float | None


SHRINKAGE = 0.8  # chosen on held-out classes: results/studies/unknown


class Familiarity(nn.Module):
    """Features (B, d) -> the share of known images that are no more familiar than each of these, (B,), above 0.

    The score of an image is the cosine to the nearest class mean (:meth:`cosine`). Among the scores of the n held-out
    images, k are not larger, and (k + 1) / (n + 1) is returned. That is a conformal p-value (Vovk et al., *Algorithmic
    Learning in a Random World*, 2005): for another image from where the held-out ones came, it is at most ``unknown``
    with a probability of at most ``unknown``, whatever the network and the score.

    Args:
        classes: that have a mean.
        width: d.
        images: n, those held out.
    """

    centre: Tensor  # (d,)
    whitening: Tensor  # (d, d)
    means: Tensor  # (classes, d), whitened, of length 1
    scores: Tensor  # (n,), of the held-out images, ascending

    def __init__(self, classes: int, width: int, images: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("whitening", torch.zeros(width, width))
        self.register_buffer("means", torch.zeros(classes, width))
        self.register_buffer("scores", torch.zeros(images))

    @classmethod
    @torch.no_grad()
    def of(cls, features: Features) -> Familiarity:
        """That of a learner which keeps these ``features``.

        Raises:
            UserError: if no image is held out, or a class with such images has no others.
        """
        held_out = features.held_out
        if not held_out.any():
            raise UserError(
                "unknown: the learner keeps no features of held-out images, which tell what is unknown; start it with "
                "held_out=20"
            )
        labels = features.labels[~held_out]
        missing = np.setdiff1d(features.labels, labels)
        if len(missing):
            raise UserError(
                f"unknown: no features are kept of learned images of {len(missing)} of the classes; let it learn once "
                "more"
            )
        values = features.values[torch.from_numpy(~held_out)].float()
        names, places = np.unique(labels, return_inverse=True)
        familiarity = cls(len(names), values.shape[1], int(held_out.sum()))
        means = class_means(values, torch.from_numpy(places), len(names))
        if len(names) > 1:  # the mean of a single class tells no direction
            familiarity.centre = means.mean(0)
        familiarity.whitening = whitening_of(values - means[torch.from_numpy(places)], len(values) - len(names))
        familiarity.means = normalize((means - familiarity.centre) @ familiarity.whitening)
        scores = familiarity.cosine(features.values[torch.from_numpy(held_out)].float())
        familiarity.scores = scores.sort().values
        return familiarity

    def cosine(self, features: Tensor) -> Tensor:
        """The cosine of each image to the nearest class mean, in whitened features: (B, d) -> (B,)."""
        whitened = (features - self.centre) @ self.whitening
        return (normalize(whitened) @ self.means.T).amax(1)

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> (B,) float32."""
        return self.ranks(features).float() / (len(self.scores) + 1)

    def ranks(self, features: Tensor) -> Tensor:
        """k + 1 for each image: (B, d) -> int64 (B,)."""
        return (self.scores <= self.cosine(features)[:, None]).sum(1) + 1

    def shares(self, features: Tensor) -> np.ndarray:
        """What calling it returns, in float64: (B, d) -> numpy (B,). Exactly 0.05 is at most 0.05."""
        with torch.inference_mode():
            return self.ranks(features).cpu().numpy() / (len(self.scores) + 1)

    def check(self, unknown: float) -> None:
        """Raise a :class:`UserError` if ``unknown`` is no share, or so small that nothing could be refused."""
        probability("unknown", unknown)
        held_out = len(self.scores)
        if 0 < unknown < 1 / (held_out + 1):
            needed = math.ceil(1 / unknown) - 1
            possible = math.ceil(1000 / (held_out + 1)) / 1000
            raise UserError(
                f"unknown: {unknown:g} takes {needed} held-out images, and the learner has {held_out}; ask for "
                f"{possible:g} or more, or hold out more (held_out=20)"
            )


def class_means(values: Tensor, places: Tensor, classes: int) -> Tensor:
    """The mean of each class: (n, d), (n,) -> (classes, d)."""
    sums = torch.zeros(classes, values.shape[1]).index_add_(0, places, values)
    return sums / torch.bincount(places, minlength=classes)[:, None]


def whitening_of(deviations: Tensor, freedom: int, shrinkage: float = SHRINKAGE) -> Tensor:
    """W (d, d) such that x W has the covariance I, if x has that of the ``deviations`` from class means, (n, d).

    ``shrinkage``: the share of it that is replaced by a multiple of the identity. ``freedom``: n without the classes.
    """
    width = deviations.shape[1]
    identity = torch.eye(width)
    covariance = deviations.T @ deviations / max(1, freedom)
    variance = covariance.trace() / width
    if not variance > 0:
        return identity
    shrunk = (1 - shrinkage) * covariance / variance + shrinkage * identity
    factor = torch.linalg.cholesky(shrunk)  # L with L Lᵀ = covariance
    return torch.linalg.solve_triangular(factor, identity, upper=False).T


# ---- how well that works ---------------------------------------------------------------------------------------------


def refusals(familiarity: np.ndarray, is_known: np.ndarray, correct: np.ndarray, unknown: float) -> Refused:
    """How well refusing images works.

    Args:
        familiarity: of each image, (n,).
        is_known: whether its class was learned: bool (n,).
        correct: whether each image of a learned class is classified correctly: bool, as many as ``is_known``.
        unknown: images that are at most so familiar are refused.
    """
    is_refused = familiarity <= unknown
    answered = correct[~is_refused[is_known]]
    others = is_refused[~is_known]
    return {
        "known": float(100 * is_refused[is_known].mean()),
        "unknown": float(100 * others.mean()) if len(others) else None,
        "accuracy": float(100 * answered.mean()) if len(answered) else None,
        "auroc": auroc(familiarity[is_known], familiarity[~is_known]) if len(others) else None,
    }


def auroc(greater: np.ndarray, smaller: np.ndarray) -> float:
    """The probability that a value of the one sample is greater than one of the other; ties count one half."""
    ascending = np.sort(smaller)
    below = np.searchsorted(ascending, greater, "left") + np.searchsorted(ascending, greater, "right")
    return float(below.mean() / (2 * len(smaller)))
