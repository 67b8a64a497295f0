"""A classifier for scikit-learn on the engine of a :class:`pycil_wsc.Learner`; ``partial_fit`` takes new labels."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.predict.arguments import folder_of, from_python, refusing
from pycil_wsc.data.images.npz import three_channels
from pycil_wsc.data.types import normal
from pycil_wsc.errors import UserError

NOTE = "ContinualClassifier"  # in the notes of its learner
AS_THEY_ARE = {"flip": False, "padding": 0}  # rows are often digits or no pictures at all
SMALLEST_SIDE = 8  # of the network's images, unless `image_size` says otherwise: the backbones halve them
Samples = ArrayLike | Sequence[str | os.PathLike[str]]
LABELS = {"b": "booleans", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "U": "strings"}


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
        classes_: the labels so far, in ascending order: the columns of :meth:`predict_proba`.
        learner_: the :class:`pycil_wsc.Learner` within.
        n_features_in_: the number of pixels of a row, if ``X`` has rows.
    """

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
        return self._learn(X, y, anew=True)

    def partial_fit(self, X: Samples, y: ArrayLike, classes: ArrayLike | None = None) -> ContinualClassifier:
        """Learn ``X`` as one more task, with labels of known classes, new ones or both.

        The parameters are those of the first task. ``classes``: labels that ``y`` may have; None: any.

        Raises:
            ValueError: if the images or labels are invalid, in one line; earlier tasks are kept then.
        """
        return self._learn(X, y, anew=not self.__sklearn_is_fitted__(), allowed=classes)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "learner_")

    def _learn(self, X, y, anew, allowed=None):
        with as_value_errors(), self._unchanged_by_errors():
            if anew:
                self._set_form({})
            form = form_of(X)
            self._check_form(form, X)
            images, labels = self._validated(X, y, anew)
            known = np.empty(0, labels.dtype) if anew else self.classes_
            labels = spelled_alike(in_common(labels, known.dtype), known)
            check_labels(labels, known, allowed)
            names = np.array([name_of(label) for label in labels.tolist()])
            learner = Learner(self.method, quiet=self.quiet, **self._keys(images, form)) if anew else self.learner_
            self._coming = np.union1d(known, labels)  # for a thread that predicts before classes_ is set
            learner.learn((images, names))
            self.form_ = form
            self.learner_ = learner
            self.classes_ = self._coming
        return self

    def _check_form(self, form: str, X: Samples) -> None:
        """Raise a :class:`UserError` if rows of pixels, which are scaled, meet images, which are not, or if the values
        of black and of white come from uint8, and these rows have other numbers, or the other way round.
        """
        fitted = getattr(self, "form_", form)  # missing before the first task
        if "rows" in {form, fitted} and form != fitted:
            raise UserError(f"X: {form}, but the classifier was fitted on {fitted}; give {fitted}, or fit it again")
        if form != "rows" or self.value_range is not None or not hasattr(self, "bytes_"):
            return
        given = np.asarray(X).dtype
        if (given == np.uint8) != self.bytes_:
            before = "uint8" if self.bytes_ else "other numbers"
            raise UserError(
                f"X: rows of {given}, but the classifier was fitted on rows of {before}; give the same type, or "
                "value_range=(black, white) when you make the classifier"
            )

    @contextlib.contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """A context in which an error leaves what is known of the form of ``X`` as it was."""
        before = self._form()
        try:
            yield
        except BaseException:
            self._set_form(before)
            raise
        finally:
            vars(self).pop("_coming", None)

    def _form(self) -> dict[str, object]:
        """What is known of the form of ``X``, by attribute."""
        return {name: value for name, value in vars(self).items() if name in FITTED}

    def _set_form(self, form: Mapping[str, object]) -> None:
        for name in FITTED & vars(self).keys():
            delattr(self, name)
        vars(self).update(form)

    def _keys(self, images: np.ndarray | list[str], form: str) -> dict[str, Any]:
        """The configuration's keys."""
        if not isinstance(self.keys, Mapping | None):
            raise UserError(f"keys: {self.keys!r} are not keys with their values; give {{'lrate': 0.05}}")
        of_arguments = {name: name for name in self.get_params(deep=False)} | {"name": "method", "model_name": "method"}
        if self.random_state is not None:
            of_arguments["seed"] = "random_state"
        if others := sorted({"out", "on_progress"} & (self.keys or {}).keys()):
            raise UserError(f"keys: '{others[0]}' cannot be given here; leave it out")
        if twice := sorted(of_arguments.keys() & (self.keys or {}).keys()):
            argument = of_arguments[twice[0]]
            raise UserError(f"keys: '{twice[0]}' has an argument of its own; give {argument}=... instead")
        keys: dict[str, Any] = (AS_THEY_ARE if form == "rows" else {}) | dict(self.keys or {})
        keys |= {name: getattr(self, name) for name in ("epochs", "memory_per_class", "convnet_type", "batch_size")}
        keys["device"] = self.device
        if self.random_state is not None:
            keys["seed"] = seed_of(self.random_state)
        if self.image_size is not None:
            keys["image_size"] = self.image_size
        elif isinstance(images, np.ndarray) and images.shape[1] < SMALLEST_SIDE:
            keys["image_size"] = SMALLEST_SIDE
        return keys

    # ---- prediction --------------------------------------------------------------------------------------------------

    def predict(self, X: Samples) -> np.ndarray:
        """The most likely label of each image, (n,).

        Raises:
            NotFittedError: before :meth:`fit` or :meth:`partial_fit`.
            ValueError: if the images are invalid, in one line.
        """
        probabilities, labels = self._answers(X)
        return labels[probabilities.argmax(1)]

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
            self._check_form(form_of(X), X)
            return answers.familiarity(self._images(X, reset=False))

    def _answers(self, X):
        """The probabilities and the labels, of one state of the learner, which another thread may train meanwhile."""
        check_is_fitted(self)
        before, answers = self.classes_, self.learner_.answers
        possible = [vars(self).get("_coming", before), before, self.classes_]
        with as_value_errors():
            self._check_form(form_of(X), X)
            images = self._images(X, reset=False)
            learned = answers.predict_proba(images)
            place = {name: column for column, name in enumerate(answers.classes)}
            for labels in possible:
                names = [name_of(label) for label in labels.tolist()]
                if place.keys() == set(names):
                    return learned[:, [place[name] for name in names]], labels
            raise UserError(
                "learner_: was trained or rolled back directly, so its classes differ from classes_; save the "
                "classifier, and load it again"
            )

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
            "form": from_python(self._form()),
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
        form = {name: noted["form"][name] for name in FITTED & noted["form"].keys()}
        if names := form.get("feature_names_in_"):
            form["feature_names_in_"] = np.array(names, object)
        classifier._set_form(form)
        labels = labels_of(learner.classes, np.dtype(noted["labels"]["dtype"]))
        classifier.classes_ = np.unique(spelled_alike(labels, np.array(noted["labels"]["values"])))
        learner.quiet = classifier.quiet
        classifier.learner_ = learner
        return classifier

    # ---- images and labels -------------------------------------------------------------------------------------------

    def _validated(self, X, y, reset):
        """The images in a form that the learner takes, and the labels, (n,)."""
        if y is None:
            raise ValueError("ContinualClassifier requires y to be passed, but the target y is None")
        if form_of(X) == "rows":
            rows, labels = validate_data(self, X, y, reset=reset, dtype=np.float64)
            images = self._pictures(rows, reset, X)
        else:
            images = self._images(X, reset)
            check_consistent_length(images, y)
            labels = column_or_1d(y, warn=True)
        labels = plain_labels(np.asarray(labels))
        check_same("y", y, labels)
        check_classification_targets(labels)
        return images, labels

    def _images(self, X, reset):
        """The images in a form that the learner takes."""
        if form_of(X) == "files":
            if wrong := [place for place, name in enumerate(X) if not isinstance(name, (str, os.PathLike))]:
                raise UserError(f"X: row {wrong[0]} is not a file name, unlike row 0; leave it out")
            return [os.fspath(name) for name in X]
        if form_of(X) == "images":
            return in_colour(np.asarray(X))
        rows = validate_data(self, X, reset=reset, dtype=np.float64)
        return self._pictures(rows, reset, X)

    def _pictures(self, rows, reset, X):
        """Rows of pixels, float64 (n, pixels), made from ``X``, as uint8 images (n, side, side, 3)."""
        if reset:
            self.bytes_ = np.asarray(X).dtype == np.uint8
            first = (0, 255) if self.bytes_ else (rows.min(), rows.max())
            self.value_range_ = range_of(first if self.value_range is None else self.value_range)
            self.image_shape_ = shape_of(rows.shape[1], self.image_shape)
        black, white = self.value_range_
        scaled = (rows - black) / (white - black or 1.0)
        pixels = np.round(255 * scaled.clip(0, 1)).astype(np.uint8)
        missing = math.prod(self.image_shape_) - rows.shape[1]
        return in_colour(np.pad(pixels, ((0, 0), (0, missing))).reshape(-1, *self.image_shape_))


FITTED = {"form_", "bytes_", "value_range_", "image_shape_", "n_features_in_", "feature_names_in_"}


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """A context in which a :class:`UserError` is also a ``ValueError``, as scikit-learn expects."""
    try:
        yield
    except UserError as error:
        raise InvalidInput(str(error)) from None


def in_common(labels: np.ndarray, known: np.dtype[Any]) -> np.ndarray:
    """``labels`` of whole numbers in the type of the ``known`` ones, where NumPy's common type of both is not exact.

    Raises a :class:`UserError` for one that it cannot hold.
    """
    if labels.dtype.kind not in "iu" or known.kind not in "iu" or np.result_type(labels, known).kind != "f":
        return labels
    converted = labels.astype(known)
    if wrong := np.flatnonzero(converted != labels).tolist():
        raise UserError(f"y: {labels[wrong[0]]} is too large for the type of the known labels, {known}")
    return converted


def form_of(images: Samples) -> str:
    """``files``, ``images`` or ``rows``."""
    names = images if isinstance(images, (list, tuple, np.ndarray)) else _column(images)
    if len(names) and isinstance(names[0], (str, os.PathLike)):
        return "files"
    return "images" if getattr(images, "ndim", 0) > 2 else "rows"


def _column(images: Samples) -> list[object]:
    """The values of one column, as of a data frame; none of another shape."""
    return list(np.asarray(images, object)) if getattr(images, "ndim", 0) == 1 else []


def in_colour(images: np.ndarray) -> np.ndarray:
    """Greyscale images (n, side, side) with three equal channels; others as they are."""
    return three_channels(images) if images.ndim == 3 else images


def range_of(values: Sequence[float]) -> tuple[float, float]:
    """The values of black and of white."""
    try:
        black, white = (float(value) for value in values)
    except (TypeError, ValueError):
        black = white = math.nan
    if not math.isfinite(black - white):
        raise UserError(f"value_range: {values!r} is not (black, white), two numbers")
    return black, white


def shape_of(pixels: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of an image whose row has this many ``pixels``; ``wanted`` is the argument ``image_shape``."""
    if wanted is None:
        side = math.isqrt(pixels - 1) + 1
        return side, side
    shape = [*wanted] if isinstance(wanted, (list, tuple)) and all(type(size) is int for size in wanted) else []
    if len(shape) not in (2, 3) or shape[0] != shape[1] or shape[2:] not in ([], [3]) or math.prod(shape) != pixels:
        raise UserError(f"image_shape: {wanted} is not (side, side) or (side, side, 3) with {pixels} pixels in all")
    return tuple(shape)


def plain_labels(labels: np.ndarray) -> np.ndarray:
    """Labels as an array of booleans, numbers or strings."""
    if labels.dtype.kind == "O":
        if len({isinstance(label, str) for label in labels.tolist()}) > 1:
            raise UserError("y: some labels are strings, and others are not; give labels of one type")
        labels = np.array(labels.tolist())
    if labels.dtype.kind not in LABELS:
        raise UserError(f"y: labels of the type {labels.dtype}; give whole numbers or strings")
    return labels + 0.0 if labels.dtype.kind == "f" else labels  # -0.0 is 0.0


def check_same(name: str, given: ArrayLike, labels: np.ndarray) -> None:
    """Raise a :class:`UserError` if the array ``labels`` has other ones than those ``given``, of which NumPy made it.

    It makes "1" of 1 beside a string, 1 of True beside a number, and "a" of "a\\0", and rounds large whole numbers.
    """
    pairs = zip(np.asarray(given, object).ravel().tolist(), labels.ravel().tolist(), strict=True)
    for label, made in pairs:
        is_number = label == label  # but not nan, which is refused elsewhere
        is_truth = isinstance(label, (bool, np.bool_))
        if is_number and label != made or is_truth != isinstance(made, bool):
            raise UserError(
                f"{name}: {label!r} would become {made!r} in NumPy's array; give labels of one type, and strings that "
                "do not end in a zero byte"
            )


def spelled_alike(labels: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Strings that are one name in other Unicode forms as the first of them, a known one if any; others as they are."""
    if labels.dtype.kind != "U" or known.dtype.kind != "U" and len(known):
        return labels
    forms: dict[str, str] = {}
    for label in [*known.tolist(), *labels.tolist()]:
        forms.setdefault(normal(str(label)), label)
    return np.array([forms[normal(label)] for label in labels.tolist()])


def check_labels(labels: np.ndarray, known: np.ndarray, allowed: ArrayLike | None) -> None:
    """Raise a :class:`UserError` if the labels are of another type than the known ones, or not among ``allowed``."""
    new, old = LABELS[labels.dtype.kind], LABELS[known.dtype.kind]
    if new != old:
        raise UserError(f"y: the labels are {new}, and earlier ones were {old}; give labels of one type")
    if allowed is None:
        return
    permitted = np.ravel(allowed)
    check_same("classes", allowed, permitted)
    permitted = spelled_alike(permitted, labels)
    if others := sorted(set(labels.tolist()) - set(permitted.tolist())):
        raise UserError(f"classes: {others[0]!r} is in y, but not in classes; add it, or leave out classes")


def name_of(label: object) -> str:
    """The name of the learner's class for a label."""
    return normal(str(label))


def labels_of(names: Sequence[str], dtype: np.dtype) -> np.ndarray:
    """The labels whose names these are, in ascending order: the inverse of :func:`name_of`."""
    if dtype.kind == "U":
        return np.unique(np.array(names))
    if dtype.kind == "b":
        return np.unique([name == "True" for name in names])
    return np.unique(np.array(names).astype(dtype))


def seed_of(random_state: int | np.random.RandomState) -> int:
    """The seed of the configuration for scikit-learn's ``random_state``."""
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
