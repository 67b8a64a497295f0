"""Which images' features a learner keeps after a task."""

from __future__ import annotations

import numpy as np

from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.features import Features, joined
from pycil_wsc.data.types import Split

PER_CLASS = 50  # learned images of each class
MOST = 5000  # learned images in all, if that leaves one for each class


def features_after(
    before: Features, held_out: Features, learned: Split, digests: np.ndarray, classifier: Classifier, stays: bool
) -> Features:
    """The features to keep after a task.

    Of each class, those of the images with the smallest digests: which these are does not depend on the order in which
    images came, nor on other classes.

    Args:
        before: what was kept before the task.
        held_out: of the images that are held out now.
        learned: the images that the task was trained on, exemplars included.
        digests: of these images, (n,).
        classifier: the learner's network after the task.
        stays: whether its backbone is that of before, so that features still hold. Otherwise those of classes that have
            no image in ``learned`` are kept as they are, as there are no better ones.
    """
    old = before.rows(~before.held_out & ~np.isin(before.digests, [*digests, *held_out.digests]))
    if not stays:
        has_image = np.isin(old.labels, learned.targets)
        is_as_wide = old.values.shape[1] == held_out.values.shape[1]
        old = old.rows(~has_image & is_as_wide)
    both_labels = np.concatenate([old.labels, learned.targets])
    both_digests = np.concatenate([old.digests, digests])
    classes = max(1, len(np.unique(both_labels)))
    places = smallest_of_classes(both_labels, both_digests, max(1, min(PER_CLASS, MOST // classes)))
    rows = places[places >= len(old)] - len(old)
    values = classifier.features(learned.images[rows])
    new = Features.of(values, learned.targets[rows], digests[rows], held_out=False)
    return joined([old.rows(places[places < len(old)]), new, held_out])


def smallest_of_classes(labels: np.ndarray, digests: np.ndarray, number: int) -> np.ndarray:
    """The places of the ``number`` smallest different digests of each class, ascending."""
    order = np.lexsort((digests, labels))
    labels, digests = labels[order], digests[order]
    is_repeated = np.zeros(len(order), bool)
    is_repeated[1:] = (labels[1:] == labels[:-1]) & (digests[1:] == digests[:-1])
    order, labels = order[~is_repeated], labels[~is_repeated]
    rank = np.arange(len(labels)) - np.searchsorted(labels, labels)
    return np.sort(order[rank < number])
