"""Restricts a data set to some of its classes or training images, for trials."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pycil_wsc import seeding
from pycil_wsc.data.types import Dataset, Split, normal
from pycil_wsc.errors import UserError, did_you_mean


def only(dataset: Dataset, classes: Sequence[int | str]) -> Dataset:
    """``dataset`` with only these classes, given by label or name, renumbered in the given order.

    The fingerprint remains that of the whole data set. Raises a :class:`UserError` for an unknown or repeated class.
    """
    names = dataset.info.classes
    labels = [_label(chosen, names, dataset.info.name) for chosen in classes]
    if repeated := [names[label] for label in labels if labels.count(label) > 1]:
        raise UserError(f"classes: '{repeated[0]}' is named twice; name each class once")
    number = np.full(len(names), -1)
    number[labels] = np.arange(len(labels))
    info = replace(dataset.info, classes=tuple(names[label] for label in labels))
    return replace(dataset, info=info, train=_part(dataset.train, number), test=_part(dataset.test, number))


def _label(given, names, dataset):
    if isinstance(given, int) and 0 <= given < len(names):
        return given
    if isinstance(given, str) and normal(given) in names:
        return names.index(normal(given))
    hint = f"; its labels are 0..{len(names) - 1}" if isinstance(given, int) else did_you_mean(given, names)
    raise UserError(f"classes: {dataset} has no class {given!r}{hint}")


def _part(split, number):
    targets = number[split.targets]
    chosen = np.flatnonzero(targets >= 0)
    return Split(split.images[chosen], targets[chosen])


def long_tailed(dataset: Dataset, factor: float, seed: int) -> Dataset:
    """``dataset`` with a long tail: class k of C has ``n factor**(-k / (C - 1))`` training images, rounded down.

    n is the size of the largest class, of which the last class has one in ``factor`` (Cui et al., *Class-Balanced Loss
    Based on Effective Number of Samples*, CVPR 2019). Each class keeps at least one image, and a class that has fewer
    all of its own. Images are drawn as by :func:`at_most`.
    """
    classes = dataset.info.num_classes
    largest = np.bincount(dataset.train.targets, minlength=classes).max()
    places = np.arange(classes) / max(1, classes - 1)
    sizes = np.maximum(1, np.floor(largest * factor**-places + 1e-9).astype(np.int64))
    return at_most(dataset, sizes, seed)


def at_most(dataset: Dataset, number: int | np.ndarray, seed: int) -> Dataset:
    """``dataset`` with at most ``number`` training images of each class, drawn by ``seed``.

    They stay in the data set's order. A smaller ``number`` draws a part of the images of a larger one. The test
    images and the fingerprint remain those of the whole data set. ``number`` may have one for each class: (classes,).
    """
    train = dataset.train
    rng = np.random.default_rng(seeding.derived_seed(seed, "images per class"))
    order = rng.permutation(len(train))
    by_class = order[np.argsort(train.targets[order], kind="stable")]
    first = np.searchsorted(train.targets[by_class], train.targets[by_class])  # where the image's class begins
    place = np.arange(len(train)) - first
    limits = number if isinstance(number, int) else number[train.targets[by_class]]
    chosen = np.sort(by_class[place < limits])
    return replace(dataset, train=Split(train.images[chosen], train.targets[chosen]))
