import numpy as np
import torch
from torch.utils.data import Dataset


class DataManager:
    """Three tasks of classes that are random points around their centres."""

    def __init__(self, seed, init_cls, increment):
        rng = np.random.default_rng(seed)
        self.increments = [init_cls, increment, increment]
        classes = sum(self.increments)
        self.targets = np.repeat(np.arange(classes), 20)
        self.data = (4 * rng.normal(size=(classes, 6))[self.targets] + rng.normal(size=(20 * classes, 6))).astype(
            np.float32
        )

    @property
    def nb_tasks(self):
        return len(self.increments)

    def get_task_size(self, task):
        return self.increments[task]

    def get_dataset(self, classes, source, mode, appendent=None):
        chosen = np.isin(self.targets, classes)
        data, targets = self.data[chosen], self.targets[chosen]
        if appendent is not None:
            data, targets = np.concatenate([data, appendent[0]]), np.concatenate([targets, appendent[1]])
        return Points(data, targets)


class Points(Dataset):
    def __init__(self, data, targets):
        self.data, self.targets = data, targets

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return i, torch.from_numpy(self.data[i]), self.targets[i]
