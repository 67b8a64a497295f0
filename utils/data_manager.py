"""PyCIL's ``DataManager``: class order, task sizes, and torch data sets of (index, image, label)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.tasks import tasks
from pycil_wsc.data.types import DatasetInfo
from pycil_wsc.errors import UserError


class DataManager:
    """Labels are renumbered so that class k is the k-th to be learned; a seed gives the same order as in PyCIL.

    ``dataset_name`` is any in-memory data set of ``pycil_wsc`` (``cifar100``, ``digits``, ``npz:PATH``). ``args`` are
    PyCIL's; ``data_root`` is the folder of the data (default: ``data``). ``manager`` and ``dataset`` are objects of
    ``pycil_wsc``.
    """

    def __init__(
        self,
        dataset_name: str,
        shuffle: bool,
        seed: int,
        init_cls: int,
        increment: int,
        args: Mapping[str, Any] | int = 1,
    ):
        args = {"aug": args} if isinstance(args, int) else args
        if args.get("aug", 1) != 1:
            raise UserError(f"aug: {args['aug']} views of an image are not available here; use 1")
        self.dataset_name, self.use_path = dataset_name, False
        self.dataset = load_dataset(dataset_name.lower() if ":" not in dataset_name else dataset_name, _root(args))
        if not self.dataset.train.in_memory:
            raise UserError(f"dataset: '{dataset_name}' consists of image files, which this DataManager cannot read")
        self.manager = tasks.DataManager(self.dataset, shuffle, seed, init_cls, increment)
        self._class_order, self._increments = self.manager.class_order, [t.num_new for t in self.manager.tasks]
        self._train_data, self._train_targets = self.dataset.train.images, self.manager.train_targets
        self._test_data, self._test_targets = self.dataset.test.images, self.manager.test_targets

    @property
    def nb_tasks(self) -> int:
        return len(self._increments)

    @property
    def nb_classes(self) -> int:
        return len(self._class_order)

    def get_task_size(self, task: int) -> int:
        return self._increments[task]

    def get_accumulate_tasksize(self, task: int) -> int:
        return sum(self._increments[: task + 1])

    def get_total_classnum(self) -> int:
        return self.nb_classes

    def getlen(self, index: int) -> int:
        """The number of training samples of class ``index``."""
        return int((self._train_targets == index).sum())

    def get_dataset(
        self,
        indices: Iterable[int],
        source: str,
        mode: str,
        appendent: tuple[np.ndarray, np.ndarray] | None = None,
        ret_data: bool = False,
        m_rate: float | None = None,
    ) -> Any:
        """The samples of the classes ``indices``, in that order, followed by those of ``appendent`` (images, labels).

        ``source``: "train" or "test". ``mode``: the transform, "train", "test" or "flip". Returns the data set, or with
        ``ret_data`` a tuple (images, labels, data set).
        """
        if m_rate is not None:
            raise UserError("get_dataset: m_rate is not available here; leave it out")
        if source not in ("train", "test"):
            raise UserError(f"get_dataset: source '{source}' is not train or test")
        images, labels = getattr(self, f"_{source}_data"), getattr(self, f"_{source}_targets")
        chosen = np.concatenate([np.flatnonzero(labels == index) for index in indices] or [np.empty(0, np.int64)])
        images, labels = images[chosen], labels[chosen]
        if appendent is not None and len(appendent) != 0:
            images, labels = np.concatenate([images, appendent[0]]), np.concatenate([labels, appendent[1]])
        data = DummyDataset(images, labels, Transform(self.dataset.info, mode))
        return (images, labels, data) if ret_data else data

    def get_dataset_with_split(
        self,
        indices: Iterable[int],
        source: str,
        mode: str,
        appendent: tuple[np.ndarray, np.ndarray] | None = None,
        val_samples_per_class: int = 0,
    ) -> "tuple[DummyDataset, DummyDataset]":
        """As :meth:`get_dataset`, in two parts: for training and for validation, both with the transform ``mode``.

        ``val_samples_per_class`` samples of each class, those of ``appendent`` included, are for validation. numpy's
        global generator draws them, as in PyCIL.
        """
        images, labels, data = self.get_dataset(indices, source, mode, appendent, ret_data=True)
        chosen = np.zeros(len(labels), bool)
        for label in dict.fromkeys(labels.tolist()):
            rows = np.flatnonzero(labels == label)
            if not 0 <= val_samples_per_class <= len(rows):
                raise UserError(
                    f"val_samples_per_class: {val_samples_per_class} of class {label}, which has {len(rows)} samples; "
                    f"give 0 to {len(rows)}"
                )
            chosen[np.random.choice(rows, val_samples_per_class, replace=False)] = True
        train, validation = (DummyDataset(images[part], labels[part], data.trsf) for part in (~chosen, chosen))
        return train, validation


class DummyDataset(Dataset):
    """(index, ``trsf`` of the image, label) of uint8 images (N, H, W, 3)."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, trsf: Callable[[Any], Any], use_path: bool = False, aug: int = 1
    ):
        if use_path or aug != 1:
            raise UserError("DummyDataset: image files and several views are not available here")
        if len(images) != len(labels):
            raise UserError(f"DummyDataset: {len(images)} images, but {len(labels)} labels")
        self.images, self.labels, self.trsf = images, labels, trsf

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, idx: int) -> tuple[int, Any, int]:
        return idx, self.trsf(Image.fromarray(self.images[idx])), self.labels[idx]


class Transform:
    """An image -> float32 (3, H, W), normalised; ``mode`` "train" augments as the data set defines, "flip" mirrors."""

    def __init__(self, info: DatasetInfo, mode: str):
        if mode not in ("train", "test", "flip"):
            raise UserError(f"get_dataset: mode '{mode}' is not train, test or flip")
        self.info, self.mode = info, mode
        self.normalise = augment.Normalise(info.mean, info.std, torch.device("cpu"))

    def __call__(self, image: Any) -> Tensor:
        batch = torch.from_numpy(np.array(image)[None])
        if self.mode == "train":
            batch = augment.random_crop_flip(batch, self.info.padding, self.info.flip, None)
            if self.info.brightness:
                batch = augment.random_brightness(batch, self.info.brightness, None)
        elif self.mode == "flip":
            batch = batch.flip(2)
        return self.normalise(batch)[0]


def _root(args):
    return args.get("data_root", "data")
