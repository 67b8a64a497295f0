"""Holds out training data to choose hyperparameters without the test set."""

from dataclasses import replace

import numpy as np

from pycil_wsc import seeding
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError, plural


def hold_out(dataset: Dataset, share: float, seed: int, one_task: bool = False) -> Dataset:
    """Replace the test split of ``dataset`` by ``share`` of each class's training samples, drawn by ``seed``.

    The number of samples is rounded, but at least one is held out and at least one is left. Raises a
    :class:`UserError` if a class has fewer than two. The original test split is discarded without being read.

    ``one_task``: the data set is one task of several, in which a class may have no samples.
    """
    train = dataset.train
    chosen = []
    rng = np.random.default_rng(seeding.derived_seed(seed, "held out"))
    for label, name in enumerate(dataset.info.classes):
        samples = np.flatnonzero(train.targets == label)
        if one_task and not len(samples):
            continue
        if len(samples) < 2:
            raise UserError(
                f"validation_split: class '{name}' of {dataset.info.name} has "
                f"{plural(len(samples), 'training sample')}, so none can be held out; add samples, or set "
                "validation_split to 0"
            )
        chosen.append(rng.permutation(samples)[: min(max(1, round(share * len(samples))), len(samples) - 1)])
    held = np.isin(np.arange(len(train)), np.concatenate(chosen))
    kept, validation = (Split(train.images[part], train.targets[part]) for part in (~held, held))
    return replace(dataset, train=kept, test=validation, validation_share=share)
