"""What a learner answers about images: names, probabilities and logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from typing_extensions import NotRequired

from pycil_wsc.classifier.predict.arguments import probability
from pycil_wsc.classifier.predict.calibration import calibration_error
from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.expected import Expected, expected_accuracy
from pycil_wsc.classifier.predict.familiarity import Familiarity, Refused, refusals
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.predict.images import Images, Key, Transform
from pycil_wsc.classifier.predict.predictor import Model
from pycil_wsc.errors import UserError
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.training.outputs import best_classes

UNKNOWN = "unknown"


class Answer(NamedTuple):
    """The prediction for one image.

    ``image``: its file name, or its position, counted from 0. ``name``: the most likely class, ``otherwise`` if the
    image is refused, or None if it cannot be read; ``problem`` then says why. ``probability``: of the most likely
    class, 0 to 1. ``familiarity``: as :meth:`Answers.familiarity`, if ``unknown`` is given. ``top``: the most likely
    classes with their probabilities, best first, as many as were asked for.
    """

    image: Key
    name: str | None
    probability: float
    problem: str = ""
    familiarity: float | None = None
    top: Mapping[str, float] = {}


class Tested(TypedDict):
    """How good answers are: see ``Learner.evaluate``."""

    accuracy: float
    balanced_accuracy: float
    images: int
    classes: dict[str, float]
    ece: dict[str, float]
    temperature: float
    refused: NotRequired[Refused]


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
        features: those that the learner keeps, from which the familiarity of an image is told.
        known: the measure of familiarity, where there are no ``features``: of an export.
    """

    def __init__(
        self,
        classifier: Classifier,
        classes: Sequence[str],
        temperature: float = 1.0,
        version: int | None = None,
        features: Features | None = None,
        known: Familiarity | None = None,
    ) -> None:
        self.classifier = classifier
        self.classes = list(classes)
        self.temperature = temperature
        self.version = version
        self.features = Features() if features is None else features
        self._known = known

    def with_version(self, version: int) -> Answers:
        """These answers as those of a saved version."""
        known = vars(self).get("known", self._known)  # not made twice
        return Answers(self.classifier, self.classes, self.temperature, version, self.features, known)

    @functools.cached_property
    def known(self) -> Familiarity:
        """The measure of familiarity, made when it is first needed.

        Raises:
            UserError: if the learner keeps no features of held-out images.
        """
        known = Familiarity.of(self.features) if self._known is None else self._known
        return known.to(self.device).eval()

    @property
    def known_if_any(self) -> Familiarity | None:
        """:attr:`known`, or None if the learner does not keep what it takes."""
        try:
            return self.known
        except UserError:
            return None

    @property
    def device(self) -> torch.device:
        """Where :attr:`model` is."""
        return self.classifier.device

    @property
    def backbone(self) -> Backbone | None:
        """The network's backbone; None if a caller has had :attr:`model`, and may have changed it."""
        return None if self.classifier.is_shown else self.classifier.learner.network.backbone

    @property
    def model(self) -> Model:
        """The network by itself: see ``Learner.model``."""
        self.classifier.is_shown = True
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

    def predict(
        self,
        images: Images,
        threshold: float | None = None,
        otherwise: str = UNKNOWN,
        unknown: float | None = None,
    ) -> np.ndarray:
        """The most likely class of each image, or ``otherwise`` if it is refused: names, numpy (B,).

        Args:
            images: a list or generator of file names, PIL images or uint8 arrays (H, W, 3) of any size; a folder; or
                uint8 (B, side, side, 3), or (B, side, side) if greyscale, of the training images' side.
            threshold: refuse an image if the probability of the most likely class, 0 to 1, is lower; None: never.
            otherwise: the name to predict then; must not be the name of a class.
            unknown: the share of images of known classes that may be refused: an image is, if its :meth:`familiarity`
                is at most this; None: never.

        Raises:
            UserError: if an argument is invalid, ``unknown`` needs more held-out images, or an image cannot be read;
                names the image. :meth:`each` goes on with the next one.
        """
        self._check(threshold, otherwise, unknown)
        names = np.array([*self.classes, otherwise])
        parts = [names[:0]]
        for features, logits in self.classifier.outputs(images):
            best = best_classes(logits)[:, 0].cpu().numpy()
            is_refused, _ = self._refused(features, logits, best, threshold, unknown)
            parts.append(names[np.where(is_refused, len(self.classes), best)])
        return np.concatenate(parts)

    def familiarity(self, images: Images) -> np.ndarray:
        """The share of held-out images that are no more familiar than each image: float64 (B,), above 0, up to 1.

        Familiar is what is near to the mean of a class (:mod:`pycil_wsc.classifier.predict.familiarity`). Of images of
        known classes like those held out, a twentieth has 0.05 or less; of other images, more.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if the learner keeps no features of held-out images, ``images`` are invalid, or one of them
                cannot be read; names it.
        """
        known = self.known
        parts = [np.empty(0)]
        parts += [known.shares(features) for features, _ in self.classifier.outputs(images)]
        return np.concatenate(parts)

    def expected_accuracy(self, images: Images) -> Expected:
        """The accuracy to expect on unlabelled images of the known classes.

        See :mod:`pycil_wsc.classifier.predict.expected`. ``images``: as for :meth:`predict`.

        Raises:
            UserError: if the learner keeps no features of held-out images, or an image cannot be read; names it.
        """
        logits = [logits.cpu() for logits in self.classifier.batches(images)]
        return self.expected_of(torch.cat(logits) if logits else torch.empty(0, len(self.classes)))

    def expected_of(self, logits: torch.Tensor) -> Expected:
        """:meth:`expected_accuracy` on images with these logits, (n, classes)."""
        held_out = self.features.rows(self.features.held_out)
        if not len(held_out):
            raise UserError("expected_accuracy: no features of held-out images are kept; start with held_out=20")
        features = held_out.values.float().to(self.device)
        known = self.classifier.classified(features)[:, self.classifier.columns]
        correct = best_classes(known)[:, 0].cpu().numpy() == held_out.labels
        return expected_accuracy(self._confidence(logits), correct)

    def _confidence(self, logits: torch.Tensor) -> np.ndarray:
        """The probability of the most likely class, (n,)."""
        return self.probabilities(logits).amax(1).numpy()

    def _refused(
        self,
        features: torch.Tensor,
        logits: torch.Tensor,
        best: np.ndarray,
        threshold: float | None,
        unknown: float | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Whether each image of a batch is refused, bool (B,), and its familiarity, (B,), if ``unknown`` is given."""
        is_refused = np.zeros(len(best), bool)
        familiarity = None
        if threshold is not None:
            is_refused |= self.probabilities(logits).numpy()[np.arange(len(best)), best] < threshold
        if unknown is not None:
            familiarity = self.known.shares(features)
            is_refused |= familiarity <= unknown
        return is_refused, familiarity

    def top(self, images: Images, k: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` most likely classes of each image, best first: names (B, k) and probabilities (B, k).

        None: five, or all if there are fewer. ``images``: as for :meth:`predict`.

        Raises:
            UserError: if ``k`` is not a whole number from 1 to the number of classes, ``images`` are invalid, or one of
                them cannot be read; names it.
        """
        if k is None:
            k = min(5, len(self.classes))
        self._check_number(k, 1)
        names = np.array(self.classes)
        best_names = [np.empty((0, k), names.dtype)]
        values = [np.empty((0, k))]
        for logits in self.classifier.batches(images):
            best, probabilities = self._best_of(logits, k)
            best_names.append(names[best])
            values.append(probabilities)
        return np.concatenate(best_names), np.concatenate(values)

    def _best_of(self, logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` most likely classes of each image of a batch, best first: numbers and probabilities, (B, k)."""
        probabilities = self.probabilities(logits)
        first = best_classes(logits)[:, :1].cpu()  # of several that are equally likely, the one of predict
        best = probabilities.scatter(1, first, 2.0).topk(int(k)).indices
        return best.numpy(), probabilities.gather(1, best).numpy()

    def _check_number(self, k: object, low: int) -> None:
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not low <= k <= len(self.classes):
            raise UserError(f"k: {k!r} is not a whole number from {low} to the {len(self.classes)} learned classes")

    def each(
        self,
        images: Images,
        threshold: float | None = None,
        otherwise: str = UNKNOWN,
        unknown: float | None = None,
        k: int = 0,
    ) -> Iterator[Answer]:
        """Yield an :class:`Answer` for each image, batch by batch. An image that cannot be read raises no error.

        The arguments are those of :meth:`predict`, and ``k``: so many classes are in ``top`` of an answer.

        Raises:
            UserError: if an argument is invalid; if that is ``images``, when the first answer is asked for.
        """
        self._check(threshold, otherwise, unknown)
        self._check_number(k, 0)
        return self._each(images, threshold, otherwise, unknown, k)

    def _each(
        self, images: Images, threshold: float | None, otherwise: str, unknown: float | None, k: int
    ) -> Iterator[Answer]:
        for chunk in self.classifier.chunks(images):
            classified = iter(self._classified(chunk.pixels, threshold, otherwise, unknown, k))
            for place, key in enumerate(chunk.keys):
                if place in chunk.refused:
                    yield Answer(key, None, 0.0, str(chunk.refused[place]))
                else:
                    yield next(classified)._replace(image=key)

    def _classified(
        self, pixels: np.ndarray, threshold: float | None, otherwise: str, unknown: float | None, k: int
    ) -> Iterator[Answer]:
        """The answer for each image of an array, which is called by its number."""
        for features, logits in self.classifier.outputs(pixels):
            places, values = self._best_of(logits, max(1, k))
            is_refused, familiarity = self._refused(features, logits, places[:, 0], threshold, unknown)
            for number, labels in enumerate(places.tolist()):
                names = [self.classes[label] for label in labels]
                row = values[number].tolist()
                yield Answer(
                    number,
                    otherwise if is_refused[number] else names[0],
                    row[0],
                    familiarity=None if familiarity is None else float(familiarity[number]),
                    top=dict(zip(names[:k], row[:k], strict=True)),
                )

    def tested(self, images: Images, labels: np.ndarray, unknown: float | None = None) -> Tested:
        """How good the answers are about images with these ``labels``, numbers of classes.

        Images of classes that were never learned have -1; they only count for ``refused``, which is there if
        ``unknown`` is given, as for :meth:`predict`.
        """
        self._check(None, UNKNOWN, unknown)
        best = [np.empty(0, np.int64)]
        before = [np.empty(0)]  # the probability of the best class
        after = [np.empty(0)]
        familiarity = [np.empty(0)]
        for features, logits in self.classifier.outputs(images):
            best.append(best_classes(logits)[:, 0].cpu().numpy())
            before.append(logits.cpu().double().softmax(1).amax(1).numpy())
            after.append(self._confidence(logits))
            if unknown is not None:
                familiarity.append(self.known.shares(features))
        has_class = labels >= 0
        correct = (np.concatenate(best) == labels)[has_class]
        by_class = {}
        for label, name in enumerate(self.classes):
            correct_of_class = correct[labels[has_class] == label]
            if correct_of_class.size:
                by_class[name] = float(100 * correct_of_class.mean())
        tested: Tested = {
            "accuracy": float(100 * correct.mean()),
            "balanced_accuracy": float(np.mean(list(by_class.values()))),
            "images": int(has_class.sum()),
            "classes": by_class,
            "ece": {
                "before": calibration_error(np.concatenate(before)[has_class], correct),
                "after": calibration_error(np.concatenate(after)[has_class], correct),
            },
            "temperature": self.temperature,
        }
        if unknown is not None:
            tested["refused"] = refusals(np.concatenate(familiarity), has_class, correct, unknown)
        return tested

    def _check(self, threshold: float | None, otherwise: str, unknown: float | None) -> None:
        if threshold is not None:
            probability("threshold", threshold)
        if unknown is not None:
            self.known.check(unknown)
        if threshold is None and unknown is None:
            return
        if not isinstance(otherwise, str):
            raise UserError(f"otherwise: {otherwise!r} is not a name; give a string")
        if otherwise in self.classes:
            raise UserError(f"otherwise: '{otherwise}' is a learned class; give another name")
