"""The accuracy to expect on images without labels, from how confident the answers are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    """An estimate: the ``accuracy`` in percent on so many ``images``, beside that on the ``held_out`` ones."""

    accuracy: float
    images: int
    held_out: float


def expected_accuracy(confidence: np.ndarray, held_out: np.ndarray, correct: np.ndarray) -> Expected:
    """The estimate by average thresholded confidence (Garg et al., ICLR 2022).

    The share of confident images, where as many held-out images are confident as are classified correctly. It holds for
    images of the classes that are known; if they differ from those held out, it is too high more often than too low.

    Args:
        confidence: the probability of the most likely class of each image: (n,).
        held_out: that of each held-out image: (m,).
        correct: whether that is its class: bool (m,).

    Returns:
        The estimate; nan if n is 0.
    """
    wrong = int((~correct).sum())
    threshold = np.sort(held_out)[wrong] if wrong < len(held_out) else np.inf
    accuracy = 100 * float((confidence >= threshold).mean()) if len(confidence) else float("nan")
    return Expected(accuracy, len(confidence), 100 * float(correct.mean()))
