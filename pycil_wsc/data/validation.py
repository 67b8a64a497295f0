"""A part of the training data, to choose hyper-parameters by in place of the test set."""

from dataclasses import replace

import numpy as np

from pycil_wsc import seeding
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """``dataset`` with ``share`` of each class's training samples, drawn by ``seed``, in the place of its test split.

    The share is rounded, but at least a sample is held out and one is left: :class:`UserError` for a class that has
    only one. The test split is gone, and was not looked at.
    """
    train, chosen = dataset.train, []
    rng = np.random.default_rng(seeding.derived_seed(seed, "held out"))
    for label, name in enumerate(dataset.info.classes):
        samples = np.flatnonzero(train.targets == label)
        if len(samples) < 2:
            raise UserError(
                f"validation_split: class '{name}' of {dataset.info.name} has {len(samples)} training sample, "
                "so none can be held out; give it more or set 0"
            )
        chosen.append(rng.permutation(samples)[: min(max(1, round(share * len(samples))), len(samples) - 1)])
    held = np.isin(np.arange(len(train)), np.concatenate(chosen))
    kept, apart = (Split(train.images[part], train.targets[part]) for part in (~held, held))
    return replace(dataset, train=kept, test=apart, held_out=share)
