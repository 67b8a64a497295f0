"""What a learner answers about images: names, probabilities and logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from pycil_wsc.classifier.predict.arguments import probability
from pycil_wsc.classifier.predict.calibration import calibration_error
from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.images import Images, Key, Transform
from pycil_wsc.classifier.predict.model import Model
from pycil_wsc.errors import UserError
from pycil_wsc.training.outputs import best_classes

UNKNOWN = "unknown"


class Answer(NamedTuple):
    """The prediction for one image.

    ``image``: its file name, or its position, counted from 0. ``name``: the most likely class, ``otherwise`` if its
    probability is below ``threshold``, or None if the image cannot be read; ``problem`` then says why.
    ``probability``: of the most likely class, 0 to 1.
    """

    image: Key
    name: str | None
    probability: float
    problem: str = ""


class Tested(TypedDict):
    """How good answers are: see ``Learner.evaluate``."""

    accuracy: float
    balanced_accuracy: float
    images: int
    classes: dict[str, float]
    ece: dict[str, float]
    temperature: float


def numbers_of(labels: np.ndarray, names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Labels of classes with these ``names`` as numbers of the ``classes``; -1 for one that is not among them."""
    number = {name: label for label, name in enumerate(classes)}
    return np.array([number.get(names[int(label)], -1) for label in labels], np.int64)


class Answers:
    """Predicts with one state of a learner. It never changes: after another task, the learner has a new object.

    Any number of threads may use it at the same time. Images are read and classified batch by batch, and only the
    predictions are kept.

    Args:
        classifier: the network and its transform.
        classes: the name of each column of its logits.
        temperature: the number by which logits are divided before the softmax.
        version: the number of the saved version; None if it is not saved.
    """

    def __init__(
        self, classifier: Classifier, classes: Sequence[str], temperature: float = 1.0, version: int | None = None
    ) -> None:
        self.classifier = classifier
        self.classes = list(classes)
        self.temperature = temperature
        self.version = version

    def with_version(self, version: int) -> Answers:
        """These answers as those of a saved version."""
        return Answers(self.classifier, self.classes, self.temperature, version)

    @property
    def device(self) -> torch.device:
        """Where :attr:`model` is."""
        return self.classifier.device

    @property
    def model(self) -> Model:
        """The network by itself: see ``Learner.model``."""
        return Model(self.classifier.learner, self.classes)

    @property
    def transform(self) -> Transform:
        """What is done to an image: see ``Learner.transform``."""
        return Transform(self.classifier.info)

    def logits(self, images: Images) -> torch.Tensor:
        """Logits, float32 (B, classes), on the device, without gradients; not divided by the temperature.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        return self.classifier.logits(images)

    def predict_proba(self, images: Images) -> np.ndarray:
        """The probability of each class, float64 (B, classes); rows sum to 1.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if ``images`` are invalid, or one of them cannot be read; names it.
        """
        parts = [np.empty((0, len(self.classes)))]
        parts += [self.probabilities(logits).numpy() for logits in self.classifier.batches(images)]
        return np.concatenate(parts)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) -> probabilities, float64, on the CPU."""
        return (logits.cpu().double() / self.temperature).softmax(1)

    def predict(self, images: Images, threshold: float | None = None, otherwise: str = UNKNOWN) -> np.ndarray:
        """The most likely class of each image, or ``otherwise`` below ``threshold``: names, numpy (B,).

        Args:
            images: a list or generator of file names, PIL images or uint8 arrays (H, W, 3) of any size; a folder; or
                uint8 (B, side, side, 3), or (B, side, side) if greyscale, of the training images' side.
            threshold: predict ``otherwise`` if the probability of the most likely class, 0 to 1, is lower; None: never.
            otherwise: the name to predict then; must not be the name of a class.

        Raises:
            UserError: if an argument is invalid, or an image cannot be read; names the image. :meth:`each` goes on with
                the next one.
        """
        self._check(threshold, otherwise)
        names = np.array([*self.classes, otherwise])
        parts = [names[:0]]
        for logits in self.classifier.batches(images):
            best = best_classes(logits)[:, 0].cpu()
            if threshold is not None:
                reached = self.probabilities(logits)[torch.arange(len(best)), best] >= threshold
                best = torch.where(reached, best, len(self.classes))
            parts.append(names[best.numpy()])
        return np.concatenate(parts)

    def top(self, images: Images, k: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` most likely classes of each image, best first: names (B, k) and probabilities (B, k).

        None: five, or all if there are fewer. ``images``: as for :meth:`predict`.

        Raises:
            UserError: if ``k`` is not a whole number from 1 to the number of classes, ``images`` are invalid, or one of
                them cannot be read; names it.
        """
        if k is None:
            k = min(5, len(self.classes))
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= len(self.classes):
            raise UserError(f"k: {k!r} is not a whole number from 1 to the {len(self.classes)} learned classes")
        names = np.array(self.classes)
        best_names = [np.empty((0, k), names.dtype)]
        values = [np.empty((0, k))]
        for logits in self.classifier.batches(images):
            probabilities = self.probabilities(logits)
            first = best_classes(logits)[:, :1].cpu()  # of several that are equally likely, the one of predict
            best = probabilities.scatter(1, first, 2.0).topk(int(k)).indices
            best_names.append(names[best.numpy()])
            values.append(probabilities.gather(1, best).numpy())
        return np.concatenate(best_names), np.concatenate(values)

    def each(self, images: Images, threshold: float | None = None, otherwise: str = UNKNOWN) -> Iterator[Answer]:
        """Yield an :class:`Answer` for each image, batch by batch. An image that cannot be read raises no error.

        The arguments are those of :meth:`predict`.

        Raises:
            UserError: if an argument is invalid; if that is ``images``, when the first answer is asked for.
        """
        self._check(threshold, otherwise)
        return self._each(images, threshold, otherwise)

    def _each(self, images: Images, threshold: float | None, otherwise: str) -> Iterator[Answer]:
        for chunk in self.classifier.chunks(images):
            logits = self.classifier.logits(chunk.pixels)
            best = best_classes(logits)[:, 0].tolist()
            classified = zip(best, self.probabilities(logits).tolist(), strict=True)
            for place, key in enumerate(chunk.keys):
                if place in chunk.refused:
                    yield Answer(key, None, 0.0, str(chunk.refused[place]))
                    continue
                label, row = next(classified)
                unsure = threshold is not None and row[label] < threshold
                yield Answer(key, otherwise if unsure else self.classes[label], row[label])

    def tested(self, images: Images, labels: np.ndarray) -> Tested:
        """How good the answers are about images with these ``labels``, numbers of classes."""
        best = [np.empty(0, np.int64)]
        before = [np.empty(0)]  # the probability of the best class
        after = [np.empty(0)]
        for logits in self.classifier.batches(images):
            best.append(best_classes(logits)[:, 0].cpu().numpy())
            before.append(logits.cpu().double().softmax(1).amax(1).numpy())
            after.append(self.probabilities(logits).amax(1).numpy())
        correct = np.concatenate(best) == labels
        by_class = {}
        for label, name in enumerate(self.classes):
            correct_of_class = correct[labels == label]
            if correct_of_class.size:
                by_class[name] = float(100 * correct_of_class.mean())
        return {
            "accuracy": float(100 * correct.mean()),
            "balanced_accuracy": float(np.mean(list(by_class.values()))),
            "images": len(labels),
            "classes": by_class,
            "ece": {
                "before": calibration_error(np.concatenate(before), correct),
                "after": calibration_error(np.concatenate(after), correct),
            },
            "temperature": self.temperature,
        }

    def _check(self, threshold: float | None, otherwise: str) -> None:
        if threshold is None:
            return
        probability("threshold", threshold)
        if not isinstance(otherwise, str):
            raise UserError(f"otherwise: {otherwise!r} is not a name; give a string")
        if otherwise in self.classes:
            raise UserError(f"otherwise: '{otherwise}' is a learned class; give another name")
