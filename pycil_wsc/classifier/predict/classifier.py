"""A trained learner as a classifier of raw images: their logits, batch by batch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from pycil_wsc.classifier.predict.images import Chunk, Images, Transform, chunks
from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.images.parallel import at_most_one_per_core
from pycil_wsc.data.types import DatasetInfo
from pycil_wsc.errors import UserError
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.outputs import best_classes


class Classifier(nn.Module):
    """A trained learner for inference on raw images. Calling it returns :meth:`logits`; :meth:`predict` returns labels.

    ``labels``: the data set's labels of the classes seen, in ascending order, one per column of the logits;
    ``class_names[label]`` is a label's name. Images are uint8 (B, side, side, 3), or (B, side, side) if
    greyscale, numpy or torch, with the ``side`` that the network was trained on; or names of image files, PIL images
    or single arrays of any size, in a list or from a generator; or a folder
    (:mod:`pycil_wsc.classifier.predict.images`). The run's test transform is applied, and its batch size is used.
    ``workers`` threads read files. ``precision``: ``fp32`` or ``bf16``; None: that of the run. It computes where
    :meth:`to` has moved it.
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
        self.learner = learner
        self.info = info
        self.class_names = info.classes
        self.workers = workers
        self.learned = np.array(classes)  # the labels in learning order
        self.labels = sorted(classes)
        self.columns = np.argsort(classes)
        self.is_shown = False  # whether a caller has had its network, and may have changed it
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.parameters()).device

    def forward(self, images: Images) -> torch.Tensor:
        return self.logits(images)

    def predict(self, images: Images) -> np.ndarray:
        """The most likely class of each image: labels of the data set, int64 numpy (B,). Ties break as in the run.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        parts = [np.empty(0, np.int64)]
        for features in self._features(images):
            logits = self.classified(features)
            parts.append(self.learned[best_classes(logits)[:, 0].cpu().numpy()])
        return np.concatenate(parts)

    def logits(self, images: Images) -> torch.Tensor:
        """Logits, float32 (B, len(labels)), on the device, without gradients.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        none = torch.empty(0, len(self.labels), device=self.device)
        return torch.cat([none, *self.batches(images)])

    def batches(self, images: Images) -> Iterator[torch.Tensor]:
        """:meth:`logits` of one batch after another: images are read when their batch is asked for."""
        for _, logits in self.outputs(images):
            yield logits

    def outputs(self, images: Images) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Features (B, d) and :meth:`logits` (B, len(labels)) of one batch after another, float32, on the device."""
        for features in self._features(images):
            yield features, self.classified(features)[:, self.columns]

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

    def classified(self, features: torch.Tensor) -> torch.Tensor:
        """Features (B, d), on the device, -> logits (B, classes), float32, with columns in learning order."""
        with torch.inference_mode(), self._autocast(features.device):
            return self.learner.classify(features).float()

    def _features(self, images: Images) -> Iterator[torch.Tensor]:
        """Features of one batch after another, on the device: float32 (B, d)."""
        learner, info, device = self.learner, self.info, self.device
        if any(module.training for module in learner.modules()):  # by a caller, to whom ``model`` shows them
            learner.eval()
        normalise = augment.Normalise(info.mean, info.std, device)
        for chunk in self.chunks(images):
            for place, error in chunk.refused.items():
                key = chunk.keys[place]  # the error about a file names it already
                raise UserError(f"image {key}: {str(error).removeprefix('image: ')}") if isinstance(key, int) else error
            writable = np.require(chunk.pixels, requirements=["C", "W"])  # torch warns of others
            pixels = torch.from_numpy(writable).to(device)
            if pixels.shape[1] != info.image_size:
                pixels = augment.resize(pixels, info.image_size, info.tested_interpolation)
            with torch.inference_mode():
                with self._autocast(device):
                    features = learner.extract(normalise(pixels))
                features = features.float()
            yield features

    def _autocast(self, device: torch.device) -> torch.autocast:
        precision = self.precision or self.learner.precision.name_on(device)
        return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def precision_of_answers(learner: BaseLearner) -> str:
    """The precision in which a :class:`pycil_wsc.Learner` predicts: fp32, unless its configuration asks for bf16.

    ``auto`` is for training: an answer must not depend on whether a machine has bf16.
    """
    return learner.precision.name if learner.config.precision == "bf16" else "fp32"
