"""The base class of learners that keep a row of numbers for each class, such as its mean feature."""

from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.training.learner import Arguments, BaseLearner


class ClassRows(BaseLearner):
    """Buffers with a row for each class seen, which are saved with the learner. New rows are 0."""

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.row_names: list[str] = []  # the names of the buffers

    def register_rows(self, name: str, *shape: int) -> None:
        """Register a buffer ``name``; ``shape`` is that of a row."""
        self.row_names.append(name)
        self.register_buffer(name, torch.empty(0, *shape, device=self.device))

    def grow(self, task: Task) -> None:
        super().grow(task)
        for name in self.row_names:
            rows = self.get_buffer(name)
            setattr(self, name, torch.cat([rows, rows.new_zeros(task.num_seen - len(rows), *rows.shape[1:])]))

    def features_and_targets(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """The features (n, d) of the task's images, in their order, and their classes (n,)."""
        return self.outputs.features(task.train_indices), self.manager.train_targets[task.train_indices]


def by_class(features: np.ndarray, targets: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each class of ``targets`` (n,), in ascending order, and its rows of ``features`` (n, d)."""
    for label in np.unique(targets).tolist():
        yield label, features[targets == label]
