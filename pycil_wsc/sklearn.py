"""A classifier for scikit-learn on the engine of a :class:`pycil_wsc.Learner`; ``partial_fit`` takes new labels."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from pycil_wsc.classifier import pixel_rows
from pycil_wsc.classifier.labels import (
    consistent_labels,
    labels_and_otherwise,
    labels_by_name,
    labels_of,
    name_of,
    plain_labels,
)
from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.pixel_rows import Samples
from pycil_wsc.classifier.predict.answers import UNKNOWN
from pycil_wsc.classifier.predict.arguments import folder_of, from_python, refusing
from pycil_wsc.classifier.predict.expected import Expected
from pycil_wsc.errors import UserError

NOTE = "ContinualClassifier"  # in the notes of its learner
AS_THEY_ARE = {"flip": False, "padding": 0}  # rows are often digits or no pictures at all
ARGUMENTS = ("epochs", "memory_per_class", "convnet_type", "batch_size", "device")  # that are keys of the same name
SMALLEST_SIDE = 8  # of the network's images, unless `image_size` says otherwise: the backbones halve them
FORM = ("form_", "bytes_", "value_range_", "image_shape_", "n_features_in_", "feature_names_in_")  # in the notes


class InvalidInput(UserError, ValueError):
    """A :class:`UserError` where scikit-learn expects a ``ValueError``."""


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """Learns one task after another with :meth:`partial_fit`, whose labels need not be known in advance.

    ``X`` is a list of names of image files; uint8 images (n, side, side, 3) or (n, side, side); or rows of pixels,
    numbers (n, pixels). All tasks have the same form.

    Args:
        method: ``"wsc"``, ``"replay"``, ...: ``model_name`` of the configuration.
        epochs: passes over the data and the exemplars in each task.
        memory_per_class: exemplars of each class that are kept between tasks, or ``"all"``.
        convnet_type: the backbone.
        batch_size: images in a training step.
        image_size: side of the images that the network sees; None: that of ``X``, but at least 8, or 224 for files.
        image_shape: (side, side) or (side, side, 3) of a row; None: the smallest greyscale square that holds it.
        value_range: the values of black and of white in rows; None: 0 and 255 if the first ``X`` is uint8, else its
            least and its greatest. Later rows must then be of the same kind: uint8, or other numbers.
        device: as in the configuration.
        random_state: an integer, a ``RandomState`` that gives one, or None for the configuration's ``seed``.
        keys: further keys of the configuration, such as ``{"lrate": 0.05}``, and ``held_out`` of the learner.
        quiet: print no progress.

    Attributes:
        classes_: the labels so far, in ascending order: the columns of :meth:`predict_proba`. They are those of the
            learner, also if that has been rolled back.
        learner_: the :class:`pycil_wsc.Learner` within.
        n_features_in_: the number of pixels of a row, if ``X`` has rows.
    """

    learner_: Learner
    label_of_: dict[str, np.generic]  # by the name of its class

    def __init__(
        self,
        method: str = "wsc",
        *,
        epochs: int = 10,
        memory_per_class: int | str = 200,
        convnet_type: str = "resnet20",
        batch_size: int = 32,
        image_size: int | None = None,
        image_shape: tuple[int, ...] | None = None,
        value_range: tuple[float, float] | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        keys: Mapping[str, object] | None = None,
        quiet: bool = True,
    ) -> None:
        self.method = method
        self.epochs = epochs
        self.memory_per_class = memory_per_class
        self.convnet_type = convnet_type
        self.batch_size = batch_size
        self.image_size = image_size
        self.image_shape = image_shape
        self.value_range = value_range
        self.device = device
        self.random_state = random_state
        self.keys = keys
        self.quiet = quiet

    # ---- learning ----------------------------------------------------------------------------------------------------

    def fit(self, X: Samples, y: ArrayLike) -> ContinualClassifier:
        """Learn ``X`` as the first task, and forget earlier ones.

        Raises:
            ValueError: if the images or labels are invalid, in one line; earlier tasks are kept then.
        """
        other = copy.copy(self)
        for name in vars(self):
            if name.endswith("_"):  # scikit-learn's mark of what was fitted
                delattr(other, name)
        return self._become(other, X, y)

    def partial_fit(self, X: Samples, y: ArrayLike, classes: ArrayLike | None = None) -> ContinualClassifier:
        """Learn ``X`` as one more task, with labels of known classes, new ones or both.

        The parameters are those of the first task. ``classes``: labels that ``y`` may have; None: any.

        Raises:
            ValueError: if the images or labels are invalid, in one line; earlier tasks are kept then.
        """
        return self._become(copy.copy(self), X, y, classes)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "learner_")

    @property
    def classes_(self) -> np.ndarray:
        """The labels so far, in ascending order.

        Raises :class:`UserError` if the learner has a class that is no label, as it was named by itself.
        """
        return np.sort(labels_of(self.learner_.classes, self.label_of_))

    def _become(
        self, other: ContinualClassifier, X: Samples, y: ArrayLike, allowed: ArrayLike | None = None
    ) -> ContinualClassifier:
        """Become ``other``, a copy of this one, with one more task. An error leaves this one as it is."""
        with as_value_errors():
            anew = not other.__sklearn_is_fitted__()
            images = other._images(X, reset=anew)
            check_consistent_length(images, y)
            labels = plain_labels(y, np.asarray(column_or_1d(y, warn=True)))
            check_classification_targets(labels)
            known = labels[:0] if anew else other.classes_
            labels = consistent_labels(labels, known, allowed)
            other.label_of_ = labels_by_name(np.union1d(known, labels))
            if anew:
                other.learner_ = Learner(self.method, quiet=self.quiet, **other._keys(images))
            else:  # for a thread that predicts before this has returned
                self.label_of_ = other.label_of_ | self.label_of_
            other.learner_.learn((images, np.array([name_of(label) for label in labels])))
        self.__dict__ = vars(other)
        return self

    def _images(self, X: Samples, reset: bool = False) -> np.ndarray | list[str]:
        """``X`` as images that the learner takes; ``reset``: it is of the first task, whose form the others have."""
        form = pixel_rows.form_of(X)
        if reset:
            self.form_ = form
        pixel_rows.check_form(form, self.form_)
        if form == "files":
            return pixel_rows.file_names(X)
        if form == "images":
            return np.asarray(X)
        numbers = np.asarray(validate_data(self, X, reset=reset, dtype=np.float64))  # pyright: ignore[reportArgumentType]
        given = np.asarray(X).dtype
        if reset:
            self.bytes_ = given == np.uint8
            self.value_range_ = pixel_rows.value_range_of(numbers, self.bytes_, self.value_range)
            self.image_shape_ = pixel_rows.image_shape_of(numbers.shape[1], self.image_shape)
        elif self.value_range is None:
            pixel_rows.check_bytes(given, self.bytes_)
        return pixel_rows.pictures(numbers, self.value_range_, self.image_shape_)

    def _keys(self, images: np.ndarray | list[str]) -> dict[str, Any]:
        """The configuration's keys."""
        if not isinstance(self.keys, Mapping | None):
            raise UserError(f"keys: {self.keys!r} are not keys with their values; give {{'lrate': 0.05}}")
        given = dict(self.keys or {})
        arguments = self.get_params(deep=False)
        for key in sorted(given):
            if key in ("out", "on_progress"):
                raise UserError(f"keys: '{key}' cannot be given here; leave it out")
            argument = {"name": "method", "model_name": "method", "seed": "random_state"}.get(key, key)
            if argument in arguments and (key != "seed" or self.random_state is not None):
                raise UserError(f"keys: '{key}' has an argument of its own; give {argument}=... instead")
        keys: dict[str, Any] = (AS_THEY_ARE if self.form_ == "rows" else {}) | given
        keys |= {name: arguments[name] for name in ARGUMENTS}
        if self.random_state is not None:
            keys["seed"] = seed_of(self.random_state)
        if self.image_size is not None:
            keys["image_size"] = self.image_size
        elif isinstance(images, np.ndarray) and images.shape[1] < SMALLEST_SIDE:
            keys["image_size"] = SMALLEST_SIDE
        return keys

    # ---- prediction --------------------------------------------------------------------------------------------------

    def predict(self, X: Samples, *, unknown: float | None = None, otherwise: str | float | None = None) -> np.ndarray:
        """The most likely label of each image, (n,), or ``otherwise`` for what may have none of the labels.

        Args:
            X: the images.
            unknown: the share of images with known labels that may be refused, as of
                :meth:`pycil_wsc.Learner.predict`; needs ``keys={"held_out": 20}``. None: no image is refused.
            otherwise: what is predicted then; None: ``"unknown"`` if labels are strings, and -1 if they are numbers.

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            ValueError: if the images or arguments are invalid, or no image is held out, in one line.
        """
        if unknown is None:
            probabilities, labels = self._answers(X)
            return labels[probabilities.argmax(1)]
        check_is_fitted(self)
        answers = self.learner_.answers
        with as_value_errors():
            labels = labels_and_otherwise(labels_of(answers.classes, self.label_of_), otherwise)
            refused = UNKNOWN
            while refused in answers.classes:
                refused += "_"
            names = answers.predict(self._images(X), otherwise=refused, unknown=unknown)
        place = {name: number for number, name in enumerate([*answers.classes, refused])}
        return labels[[place[name] for name in names]]

    def predict_proba(self, X: Samples) -> np.ndarray:
        """The probability of each label in :attr:`classes_`, float64 (n, classes).

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            ValueError: if the images are invalid, in one line.
        """
        return self._answers(X)[0]

    def familiarity(self, X: Samples) -> np.ndarray:
        """How familiar each image is, float64 (n,): a small value tells of a label that was never learned.

        It is that of :meth:`pycil_wsc.Learner.familiarity`, and needs ``keys={"held_out": 20}``. Of images with known
        labels, a twentieth has 0.05 or less.

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            ValueError: if the images are invalid, or no image is held out, in one line.
        """
        check_is_fitted(self)
        answers = self.learner_.answers
        with as_value_errors():
            return answers.familiarity(self._images(X))

    def expected_accuracy(self, X: Samples) -> Expected:
        """The accuracy to expect on images without labels: see :meth:`pycil_wsc.Learner.expected_accuracy`.

        Needs ``keys={"held_out": 20}``.

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            ValueError: if the images are invalid, or no image is held out, in one line.
        """
        check_is_fitted(self)
        answers = self.learner_.answers
        with as_value_errors():
            return answers.expected_accuracy(self._images(X))

    def _answers(self, X: Samples) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities and the labels, of one state of the learner, which another thread may train meanwhile."""
        check_is_fitted(self)
        answers = self.learner_.answers
        label_of = self.label_of_
        with as_value_errors():
            probabilities = answers.predict_proba(self._images(X))
        labels = labels_of(answers.classes, label_of)
        order = np.argsort(labels)
        return probabilities[:, order], labels[order]

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, copy_images: bool = False) -> None:
        """Save the learner in ``folder`` with what this class knows, in its notes: see :meth:`pycil_wsc.Learner.save`.

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            UserError: if the folder cannot be written, or an exemplar's file cannot be copied.
        """
        check_is_fitted(self)
        seed = None if "seed" in (self.keys or {}) else self.learner_.config.seed
        self.learner_.notes[NOTE] = {
            "parameters": from_python(self.get_params(deep=False) | {"random_state": seed}),
            "form": from_python({name: vars(self)[name] for name in FORM if name in vars(self)}),
            "labels": {"dtype": self.classes_.dtype.str, "values": self.classes_.tolist()},
        }
        self.learner_.save(folder, copy_images)

    @classmethod
    def load(cls, folder: str | Path, device: str | None = None) -> ContinualClassifier:
        """Load what :meth:`save` wrote. Nothing in the folder is executed. ``device`` overrides the saved one.

        Raises:
            UserError: if it is not a complete classifier.
        """
        folder = folder_of("folder", folder)
        given: dict[str, Any] = {} if device is None else {"device": device}
        learner = Learner.load(folder, **given)
        if NOTE not in learner.notes:
            raise UserError(f"{folder}: has a learner, but no ContinualClassifier; use pycil_wsc.Learner.load")
        with refusing(folder, "a saved classifier", "save it again"):
            return cls._within(learner, learner.notes[NOTE], given)

    @classmethod
    def _within(cls, learner: Learner, noted: Mapping[str, Any], given: Mapping[str, Any]) -> ContinualClassifier:
        """The classifier around a ``learner``, of which this is ``noted``."""
        classifier = cls(**noted["parameters"] | given)
        form = {name: noted["form"][name] for name in FORM if name in noted["form"]}
        if names := form.get("feature_names_in_"):
            form["feature_names_in_"] = np.array(names, object)
        vars(classifier).update(form)
        labels = np.array(noted["labels"]["values"]).astype(noted["labels"]["dtype"])
        classifier.label_of_ = labels_by_name(labels)
        learner.quiet = classifier.quiet
        classifier.learner_ = learner
        return classifier


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """A context in which a :class:`UserError` is also a ``ValueError``, as scikit-learn expects."""
    try:
        yield
    except UserError as error:
        raise InvalidInput(str(error)) from None


def seed_of(random_state: int | np.random.RandomState) -> int:
    """The seed of the configuration for scikit-learn's ``random_state``."""
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
