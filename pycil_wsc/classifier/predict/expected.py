"""The accuracy to expect on images without labels, from how confident the answers are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    """An estimate: the ``accuracy`` in percent on so many ``images``, beside that on the ``held_out`` ones."""

    accuracy: float
    images: int
    held_out: float


def expected_accuracy(confidence: np.ndarray, correct: np.ndarray) -> Expected:
    """The estimate: the mean calibrated probability of the most likely class.

    It holds for images of the classes that are known. If they are worse than those held out, it tends to be too high.
    Garg et al. (ICLR 2022) compare it with others, of which two were further off here: results/studies/unknown.

    Args:
        confidence: the probability of the most likely class of each image: (n,).
        correct: whether each held-out image is classified correctly: bool (m,).

    Returns:
        The estimate; nan if n is 0.
    """
    accuracy = 100 * float(confidence.mean()) if len(confidence) else float("nan")
    return Expected(accuracy, len(confidence), 100 * float(correct.mean()))
