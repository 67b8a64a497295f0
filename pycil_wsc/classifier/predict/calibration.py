"""Probabilities that mean what they say: a temperature for the logits, and how far off the probabilities are."""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

BINS = 15  # as Guo et al. (2017)
LIMIT = 10.0  # the logarithm of the temperature is between -LIMIT and LIMIT


def fitted_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature T for which softmax(logits / T) has the least negative log-likelihood.

    That is Guo et al., *On Calibration of Modern Neural Networks* (ICML 2017), with one pseudo-image that belongs to
    all classes equally, without which a few images that are all classified correctly would make T zero.

    Args:
        logits: (N, classes), of images that were not trained on. Those of a class that is never answered are -inf; it
            is left out, with its images.
        labels: (N,), their classes.

    Returns:
        T > 0; 1 if there are no images, or fewer than two classes.
    """
    answered = logits[np.arange(len(labels)), labels] > -np.inf
    columns = np.isfinite(logits).any(0)
    places = np.cumsum(columns) - 1  # of each class among those that are left
    logits = logits[answered][:, columns]
    labels = places[labels[answered]]
    count, classes = logits.shape
    if not count or classes < 2:
        return 1.0
    logits = logits.astype(np.float64)
    share = 1 / (count + 1)
    targets = np.full(logits.shape, share / classes)
    targets[np.arange(count), labels] += 1 - share

    def loss(log_temperature: float) -> float:
        return -float((targets * log_softmax(logits / np.exp(log_temperature), axis=1)).sum())

    minimum = minimize_scalar(loss, bounds=(-LIMIT, LIMIT), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(minimum.x))


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """The expected calibration error in percent: how far confidence is from accuracy, on average.

    Images are put into 15 bins of equal width by the probability of their most likely class. The error is the mean over
    the images of the difference between a bin's mean probability and its accuracy (Guo et al., 2017).

    Args:
        confidence: the probability of each image's most likely class, (N,).
        correct: whether that is its class: bool (N,).
    """
    numbers = np.ceil(confidence * BINS).astype(int).clip(1, BINS) - 1
    surplus = np.bincount(numbers, weights=confidence - correct, minlength=BINS)
    return float(100 * np.abs(surplus).sum() / len(correct))
