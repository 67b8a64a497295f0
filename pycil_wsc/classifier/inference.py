"""Trained weights as a classifier (``pycil_wsc.load``)."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torchvision.transforms import InterpolationMode

from pycil_wsc.classifier.model import Transform
from pycil_wsc.classifier.settings import folder_of, refusing
from pycil_wsc.classifier.streams import Chunk, Images, chunks
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.loading import resolve
from pycil_wsc.config.options import KEYS, Config
from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.parallel import at_most_one_per_core
from pycil_wsc.data.options import AugmentationOptions
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.data.types import Arrivals, Dataset, DatasetInfo, Split
from pycil_wsc.devices import numbered, out_of_memory, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.keys import declared
from pycil_wsc.methods.consolidation.consolidated import configured_learner
from pycil_wsc.old_formats import load_state
from pycil_wsc.runs.checkpoint import WEIGHTS
from pycil_wsc.seeding import restored
from pycil_wsc.state import State
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.prediction import best_classes

LARGEST_SIDE = 1 << 16  # largest side of an image, in pixels


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
    path = weights_of(folder_of("run_folder", run_folder), task)
    again = "repeat the run with --redo"
    try:
        state = load_state(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path}: is not a complete file of weights ({error}); {again}") from None
    except MemoryError:
        raise UserError(f"{path}: there is not enough memory to load it; free some") from None
    with refusing(path, "a file of weights of this version", again, named=True):  # its checksums match
        info = checked_info(state["info"])
        config = without_dropped(state["config"]) | {"device": str(device), "pretrained": False}
        reached = Reached(state["class_order"], state["boundaries"], state["task"])
        learner = rebuilt(resolve(config), info, reached, state["learner"])
        return Classifier(learner, info, reached.classes)


def weights_of(folder: Path, task: int | None) -> Path:
    """The file with the weights after ``task`` (None: the last ones); raises a :class:`UserError` if there is none."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); name the folder of a run") from None
    kept = {int(match[1]): match[0] for name in names if (match := re.fullmatch(r"weights-task(\d+)\.pt", name))}
    found = kept.get(max(kept, default=0) if task is None else task)
    if task is None and WEIGHTS in names:
        found = WEIGHTS
    if found:
        return folder / found
    if kept or WEIGHTS in names:
        available = [*map(str, sorted(kept)), *["the last (task=None)"] * (WEIGHTS in names)]
        raise UserError(
            f"{folder}: no weights of task {task}, only of {', '.join(available)}; "
            '"save_weights": "every" saves them after every task'
        )
    problem = "this finished run did not save its weights" if "result.json" in names else "no weights there (yet)"
    raise UserError(f'{folder}: {problem}; "save_weights": true saves them, in a finished run with --redo')


class Reached(NamedTuple):
    """How far a run, or a learner, has come.

    ``class_order``: its labels in learning order. ``boundaries``: of its tasks in this order, 0 first. ``task``: the
    last one, counted from 0.
    """

    class_order: list[int]
    boundaries: list[int]
    task: int

    @classmethod
    def of_stream(cls, seen: Sequence[int]) -> "Reached":
        """That of a learner with ``seen[t]`` classes after task t; they are numbered in learning order."""
        return cls(list(range(seen[-1])), [0, *seen], len(seen) - 1)

    @property
    def classes(self) -> list[int]:
        """The labels of the classes seen, in learning order."""
        return self.class_order[: self.boundaries[self.task + 1]]


class Classifier(nn.Module):
    """A trained learner for inference on raw images. Calling it returns :meth:`logits`; :meth:`predict` returns labels.

    ``labels``: the data set's labels of the classes seen, in ascending order, one per column of the logits;
    ``class_names[label]`` is a label's name. Images are uint8 (B, side, side, 3), or (B, side, side) if
    greyscale, numpy or torch, with the ``side`` that the network was trained on; or names of image files, PIL images
    or single arrays of any size, in a list or from a generator; or a folder (:mod:`pycil_wsc.classifier.streams`).
    The run's test transform is applied, and its batch size is used. ``workers`` threads read files. ``precision``:
    ``fp32`` or ``bf16``; None: that of the run.
    """

    def __init__(
        self,
        learner: BaseLearner,
        info: DatasetInfo,
        classes: list[int],
        workers: int = 0,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.learner, self.info, self.class_names, self.workers = learner, info, info.classes, workers
        self.learned = np.array(classes)  # the labels in learning order
        self.labels = sorted(classes)
        self.columns = np.argsort(classes)
        self.eval()

    def forward(self, images: Images) -> torch.Tensor:
        return self.logits(images)

    def predict(self, images: Images) -> np.ndarray:
        """The most likely class of each image: labels of the data set, int64 numpy (B,). Ties break as in the run.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        parts = [np.empty(0, np.int64)]
        for logits in self._batches(images):
            parts.append(self.learned[best_classes(logits)[:, 0].cpu().numpy()])
        return np.concatenate(parts)

    def logits(self, images: Images) -> torch.Tensor:
        """Logits, float32 (B, len(labels)), on the device, without gradients.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        none = torch.empty(0, len(self.labels), device=next(self.parameters()).device)
        return torch.cat([none, *self.batches(images)])

    def batches(self, images: Images) -> Iterator[torch.Tensor]:
        """:meth:`logits` of one batch after another: images are read when their batch is asked for."""
        for logits in self._batches(images):
            yield logits[:, self.columns]

    def chunks(self, images: Images) -> Iterator[Chunk]:
        """``images`` in batches, each read when it is needed."""
        threads = at_most_one_per_core(self.workers)
        return chunks(images, Transform(self.info), self.learner.config.batch_size, threads)

    def features(self, images: Images) -> np.ndarray:
        """What the backbone makes of each image: float32 numpy (B, d).

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        parts = [features.cpu().numpy() for features in self._features(images)]
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    def _batches(self, images: Images) -> Iterator[torch.Tensor]:
        """Logits of one batch after another, with columns in learning order."""
        for features in self._features(images):
            with torch.inference_mode(), self._autocast(features.device):
                logits = self.learner.classify(features).float()
            yield logits

    def _features(self, images: Images) -> Iterator[torch.Tensor]:
        """Features of one batch after another, on the device: float32 (B, d)."""
        learner, info = self.learner, self.info
        device = learner.device = next(self.parameters()).device  # may have changed by ``to``
        learner.eval()
        normalise = augment.Normalise(info.mean, info.std, device)
        for chunk in self.chunks(images):
            for place, error in chunk.refused.items():
                key = chunk.keys[place]  # the error about a file names it already
                raise UserError(f"image {key}: {str(error).removeprefix('image: ')}") if isinstance(key, int) else error
            writable = np.require(chunk.pixels, requirements=["C", "W"])  # torch warns of others
            pixels = torch.from_numpy(writable).to(device)
            if pixels.shape[1] != info.image_size:
                pixels = augment.resize(pixels, info.image_size, info.interpolation)
            with torch.inference_mode():
                with self._autocast(device):
                    features = learner.extract(normalise(pixels))
                features = features.float()
            yield features

    def _autocast(self, device: torch.device) -> torch.autocast:
        precision = self.precision or self.learner.precision.name
        return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def precision_of_answers(learner: BaseLearner) -> str:
    """The precision in which a :class:`pycil_wsc.Learner` predicts: fp32, unless its configuration asks for bf16.

    ``auto`` is for training: an answer must not depend on whether a machine has bf16.
    """
    return learner.precision.name if learner.config.precision == "bf16" else "fp32"


def checked_info(saved: State) -> DatasetInfo:
    """The :class:`DatasetInfo` with the ``saved`` values; raises an exception if they are invalid."""
    info, number = DatasetInfo(**saved), (int, float)
    fits = isinstance(info.classes, tuple) and all(isinstance(name, str) for name in info.classes)
    fits &= info.crop in ("pad", "resized") and info.interpolation in [mode.value for mode in InterpolationMode]
    for side in (info.image_size, info.stored_size or info.image_size):
        fits &= type(side) is int and 0 < side <= LARGEST_SIDE
    for name in declared(AugmentationOptions):
        value = getattr(info, name)
        fits &= value is not None and KEYS[name].check(value) == value
    for triple in (info.mean, info.std):
        fits &= len(triple) == 3 and all(type(value) in number and math.isfinite(value) for value in triple)
    if not fits or not all(info.std):
        raise ValueError("not the description of a data set")
    return info


def rebuilt(config: Config, info: DatasetInfo, reached: Reached, state: State) -> BaseLearner:
    """The learner of ``config`` with this ``state``, in which it was after the task ``reached``, without images."""
    learner = grown(config, info, reached)
    try:
        learner.load_state_dict(state)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise UserError(
            f"the weights do not match the learner '{config.model_name}' of this version; use the version that saved "
            "them"
        ) from None
    return learner


def grown(config: Config, info: DatasetInfo, reached: Reached) -> BaseLearner:
    """A learner of ``config`` with the classes of the tasks ``reached``, but new weights, and without images."""
    device = numbered(resolved_device(config.device))
    none = Split(np.empty((0, info.image_size, info.image_size, 3), np.uint8), np.empty(0, np.int64))
    arrivals = Arrivals(tuple(reached.boundaries[1:]), none.targets, none.targets) if config.tasks else None
    manager = tasks_of(Dataset(info, none, none, arrivals=arrivals), config)
    own = Reached(manager.class_order, manager.boundaries, reached.task)
    if reached != own or reached.task not in range(len(manager.tasks)):
        raise UserError("its classes and tasks do not match its configuration; use an unmodified file")
    with restored([]):  # once, not for each part: a thread that trains has it for an epoch
        learner = configured_learner(config)(config, manager, open_source(info, none, device, 0), device)
        for task in manager.tasks[: reached.task + 1]:
            learner.grow_for(task)
        _ = learner.precision.name  # which may draw random numbers, too: predicting must not wait
    return learner
