"""Trained weights as a classifier (``pycil_wsc.load``)."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.transforms import InterpolationMode

from pycil_wsc.config.loading import resolve
from pycil_wsc.config.options import KEYS, Config
from pycil_wsc.data.loader import open_source
from pycil_wsc.data.npz import three_channels
from pycil_wsc.data.sources import as_array
from pycil_wsc.data.tasks import tasks_of
from pycil_wsc.data.types import Arrivals, Dataset, DatasetInfo, Split
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.engine.prediction import best_classes
from pycil_wsc.errors import UserError
from pycil_wsc.keys import without_replaced
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.runs import weights

LARGEST_SIDE = 1 << 16  # of an image, in pixels
Images = np.ndarray | torch.Tensor | list[str]


def load(run_folder: str | Path, task: int | None = None, device: str = "cpu") -> "Classifier":
    """Load the :class:`Classifier` of a run with ``save_weights``.

    The data set and the result are not needed.

    Args:
        run_folder: the folder of the run.
        task: load the weights after this task, counted from 0 (needs ``"every"``); None: the last saved ones.
        device: as in the configuration.

    Raises:
        UserError: if there are no weights, or they cannot be used.
    """
    path = weights.find(Path(run_folder), task)
    again = "repeat the run with --redo"
    state = weights.read(path, again)
    try:
        info = checked_info(state["info"])
        config = without_replaced(state["config"], KEYS) | {"device": str(device), "pretrained": False}
        learner = rebuilt(resolve(config), info, state)
        return Classifier(learner, info, state["class_order"][: state["boundaries"][state["task"] + 1]])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # the checksums match, but another version or program wrote the file
        raise UserError(f"{path}: is not a file of weights of this version ({type(error).__name__}); {again}") from None


class Classifier(nn.Module):
    """A trained learner for inference on raw images. Calling it returns :meth:`logits`; :meth:`predict` returns labels.

    ``labels``: the data set's labels of the classes seen, in ascending order, one per column of the logits;
    ``class_names[label]`` is a label's name. Images are uint8 (B, side, side, 3), or (B, side, side) if
    greyscale, numpy or torch, with the ``side`` that the network was trained on. After training on image files, file
    names are accepted too and read by ``workers`` processes. The run's test transform is applied, and its
    batch size is used.
    """

    def __init__(self, learner: BaseLearner, info: DatasetInfo, classes: list[int], workers: int = 0) -> None:
        super().__init__()
        self.learner, self.info, self.class_names, self.workers = learner, info, info.classes, workers
        self.learned = np.array(classes)  # the labels in learning order
        self.labels = sorted(classes)
        self.columns = np.argsort(classes)
        self.eval()

    def forward(self, images: Images) -> torch.Tensor:
        return self.logits(images)

    def predict(self, images: Images) -> np.ndarray:
        """The most likely class of each image: labels of the data set, int64 numpy (B,). Ties break as in the run."""
        return self.learned[best_classes(self._logits(images))[:, 0].cpu().numpy()]

    def logits(self, images: Images) -> torch.Tensor:
        """Logits, float32 (B, len(labels)), on the device, without gradients."""
        return self._logits(images)[:, self.columns]

    def _logits(self, images):
        """Logits with columns in learning order."""
        learner = self.learner
        learner.device = next(self.parameters()).device  # may have changed by ``to``
        images = self._checked(images)
        split = Split(images, np.zeros(len(images), np.int64))
        parts = [torch.empty(0, len(self.labels), device=learner.device)]
        for features, _ in learner.forward_over(
            open_source(self.info, split, learner.device, self.workers), np.arange(len(images)), split.targets
        ):
            with torch.inference_mode(), learner.autocast():
                parts.append(learner.classify(features).float())
        return torch.cat(parts)

    def _checked(self, images):
        """Convert ``images`` to the form of :class:`Split`; raise a :class:`UserError` if they are invalid."""
        side, takes_files = self.info.stored_size or self.info.image_size, self.info.crop == "resized"
        wanted = f"uint8 (B, {side}, {side}, 3)"
        if isinstance(images, (str, os.PathLike)):
            raise UserError(f"images: give {'a list of file names' if takes_files else wanted}, not one name")
        images = as_array(images)
        if images.shape == (0,):
            return np.empty(0, str) if takes_files else np.empty((0, side, side, 3), np.uint8)
        if images.dtype.kind in "UO" and images.ndim == 1 and takes_files:
            return images.astype(str)
        if images.dtype == np.uint8 and images.shape[1:] == (side, side):
            return three_channels(images)
        if images.dtype != np.uint8 or images.shape[1:] != (side, side, 3):
            files = ", or names of image files" if takes_files else ""
            raise UserError(f"images: {images.dtype} of shape {images.shape}; this model takes {wanted}{files}")
        return images


def checked_info(saved: dict[str, Any]) -> DatasetInfo:
    """The :class:`DatasetInfo` with the ``saved`` values; raises an exception if they are invalid."""
    info, number = DatasetInfo(**saved), (int, float)
    fits = isinstance(info.classes, tuple) and all(isinstance(name, str) for name in info.classes)
    fits &= info.crop in ("pad", "resized") and info.interpolation in [mode.value for mode in InterpolationMode]
    for side in (info.image_size, info.stored_size or info.image_size):
        fits &= type(side) is int and 0 < side <= LARGEST_SIDE
    for name in ("padding", "brightness", "flip", "augmentation"):
        value = getattr(info, name)
        fits &= value is not None and KEYS[name].check(value) == value
    for triple in (info.mean, info.std):
        fits &= len(triple) == 3 and all(type(value) in number and math.isfinite(value) for value in triple)
    if not fits or not all(info.std):
        raise ValueError("not the description of a data set")
    return info


def rebuilt(config: Config, info: DatasetInfo, state: Mapping[str, Any]) -> BaseLearner:
    """The learner of ``config`` as it was after ``state["task"]``, with an empty data set."""
    device = numbered(resolved_device(config.device))
    none = Split(np.empty((0, info.image_size, info.image_size, 3), np.uint8), np.empty(0, np.int64))
    arrivals = Arrivals(tuple(state["boundaries"][1:]), none.targets, none.targets) if config.tasks else None
    manager = tasks_of(Dataset(info, none, none, arrivals=arrivals), config)
    own = manager.class_order, manager.boundaries
    if (state["class_order"], state["boundaries"]) != own or state["task"] not in range(len(manager.tasks)):
        raise UserError("its classes and tasks do not match its configuration; use an unmodified file")
    learner = config.learner(config, manager, open_source(info, none, device, 0), device)
    for task in manager.tasks[: state["task"] + 1]:
        learner.grow_for(task)
    try:
        learner.load_state_dict(state["learner"])
    except RuntimeError:
        raise UserError(
            f"the weights do not match the learner '{config.model_name}' of this version; use the version that saved "
            "them"
        ) from None
    return learner
