"""Decides whether an update is kept: the accuracy on old and new classes, before and after, with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import bdtr, ndtr, ndtri  # scipy.stats takes a second to import

from pycil_wsc.classifier.predict.arguments import from_python, is_number
from pycil_wsc.classifier.store.bookkeeping import Accuracy, Change, Decision, Gate
from pycil_wsc.data.images.sources import ImageSource
from pycil_wsc.errors import UserError

EXEMPLARS = "exemplars"


@dataclass(frozen=True)
class Accept:
    """The condition on which :meth:`~pycil_wsc.Learner.learn` keeps an update.

    An update is rejected if the accuracy on the classes known before has dropped by significantly more than
    ``max_drop``, in a one-sided test at ``confidence``: Tango's (1998) for paired proportions, as both models classify
    the same images; with ``max_drop=0`` it is McNemar's. It is also rejected if the accuracy on the new classes is
    significantly below ``min_new``, or no better than chance and significantly below that of a good model, taken as
    halfway between chance and 100 %.

    Args:
        max_drop: the largest acceptable drop in accuracy, as a fraction: 0.02 is two percentage points.
        on: the images to test on. ``"exemplars"``: those that the learner holds out (``held_out=20``) or, if there are
            none, the exemplars. Both models were trained on these, so they reveal forgetting, but not a slight loss of
            accuracy. Otherwise, images of your own, in any form that ``learn`` accepts.
        min_new: the accuracy that new classes must reach, as a fraction.
        confidence: of the one-sided tests, and of each bound of the intervals, at least 0.5 and below 1.
        strict: keep an update only if the drop is shown to be at most ``max_drop``. With few images, this rejects good
            updates, too.

    Raises:
        UserError: if a value is out of range.
    """

    max_drop: float = 0.02
    on: ImageSource = EXEMPLARS
    min_new: float = 0.0
    confidence: float = 0.95
    strict: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_drop", 0), ("min_new", 0), ("confidence", 0.5)):
            value = getattr(self, name)
            if not is_number(value) or not low <= value < 1:
                raise UserError(f"accept: {name} is {value!r}; give a number from {low} to less than 1")
        if not isinstance(self.strict, bool):
            raise UserError(f"accept: strict is {self.strict!r}, not True or False")

    def settings(self) -> dict[str, object]:
        """The numbers, as JSON values."""
        names = ("max_drop", "min_new", "confidence", "strict")
        return {name: from_python(getattr(self, name)) for name in names}


def decided(
    accept: Accept, old: tuple[np.ndarray, np.ndarray], new: np.ndarray, classes: int, on: str = ""
) -> Decision:
    """Compare the answers of two models.

    Args:
        accept: the condition.
        old: for each image of a class known before, whether the previous model is right, and the new one: bool (n,).
        new: for each image of a new class, whether the new model is right: bool (m,).
        classes: the number of classes after the update.
        on: what the images are.

    Returns:
        The decision, whose intervals end at bounds with ``confidence`` each.
    """
    about_old = _compared(accept, *old) if len(old[0]) else None
    about_new = _measured(accept, new) if len(new) else None
    reason = _too_bad(accept, about_old) or _not_learned(accept, about_new, classes)
    gate = Gate(on=on, old=about_old, new=about_new, classes={})
    return Decision(accepted=not reason, reason=reason or _fine(about_old, about_new), gate=gate)


def _compared(accept: Accept, before: np.ndarray, after: np.ndarray) -> Change:
    """The accuracies on classes known before, and the drop with its interval and p-value."""
    lost = int((before & ~after).sum())
    gained = int((~before & after).sum())
    number = len(before)
    low, high = drop_interval(lost, gained, number, accept.confidence)
    return {
        "images": number,
        "before": 100 * float(before.mean()),
        "after": 100 * float(after.mean()),
        "drop": 100 * (lost - gained) / number,
        "interval": [100 * low, 100 * high],
        "p": float(ndtr(-drop_score(lost, gained, number, accept.max_drop))),
    }


def _measured(accept: Accept, after: np.ndarray) -> Accuracy:
    """The accuracy on new classes with its interval."""
    right = int(after.sum())
    low, high = wilson_interval(right, len(after), accept.confidence)
    return {"images": len(after), "after": 100 * right / len(after), "interval": [100 * low, 100 * high]}


def _too_bad(accept: Accept, old: Change | None) -> str:
    """Why the update is rejected for the classes known before, or ""."""
    if old is None:
        return ""
    low, high = old["interval"]
    allowed = 100 * accept.max_drop
    change = f"accuracy on {_images(old, 'known')}: {old['before']:.1f} before, {old['after']:.1f} after"
    if old["p"] < 1 - accept.confidence:
        return f"{change}; the drop is at least {low:.1f} points, more than {allowed:g}"
    if accept.strict and high > allowed:
        return f"{change}; the drop may be {high:.1f} points, more than {allowed:g}"
    return ""


def _not_learned(accept: Accept, new: Accuracy | None, classes: int) -> str:
    """Why the update is rejected for the new classes, or ""."""
    if new is None:
        return ""
    measured = f"accuracy on {_images(new, 'new')}: {new['after']:.1f}"
    right = round(new["images"] * new["after"] / 100)
    good = (1 + 1 / classes) / 2  # the accuracy of a model halfway between guessing and always right
    chance = float(bdtr(right, new["images"], good))  # that a good model has at most this many right
    if classes > 1 and new["after"] <= 100 / classes and chance < 1 - accept.confidence:
        return f"{measured}, no better than guessing one of {classes}"
    if new["interval"][1] < 100 * accept.min_new:
        return f"{measured}, at most {new['interval'][1]:.1f}, below {100 * accept.min_new:g}"
    return ""


def _fine(old: Change | None, new: Accuracy | None) -> str:
    parts = []
    if old:
        parts.append(f"{old['before']:.1f} before and {old['after']:.1f} after on {_images(old, 'known')}")
    if new:
        parts.append(f"{new['after']:.1f} on {_images(new, 'new')}")
    return "accuracy " + ", ".join(parts) if parts else "no image to compare on"


def _images(accuracy: Accuracy, which: str) -> str:
    return f"{accuracy['images']} images of {which} classes"


# ---- statistics ------------------------------------------------------------------------------------------------------


def drop_score(lost: int, gained: int, number: int, drop: float) -> float:
    """Tango's score statistic of the hypothesis that accuracy dropped by ``drop``; standard normal if it did.

    Both models answered about ``number`` images: ``lost`` of them only the first one classifies correctly, ``gained``
    only the second one. The variance is that of the most likely multinomial with this drop (T. Tango, *Equivalence test
    and confidence interval for the difference in proportions for the paired-sample design*, Statistics in Medicine,
    1998). With ``drop=0`` it is McNemar's statistic, ``(lost - gained) / sqrt(lost + gained)``.
    """
    linear = -lost - gained + (2 * number - lost + gained) * drop
    root = math.sqrt(max(0.0, linear**2 + 8 * number * gained * drop * (1 - drop)))
    only_second = (root - linear) / (4 * number)  # the most likely fraction of images that only the second gets right
    variance = number * (2 * only_second + drop * (1 - drop))
    surplus = lost - gained - number * drop
    if variance <= 0:
        return 0.0 if surplus == 0 else math.copysign(math.inf, surplus)
    return surplus / math.sqrt(variance)


def drop_interval(lost: int, gained: int, number: int, confidence: float) -> tuple[float, float]:
    """The drops that Tango's test does not reject: lower and upper bound, each at ``confidence``, as shares."""
    limit = float(ndtri(confidence))
    observed = (lost - gained) / number

    def bound(sign: int) -> float:
        def excess(drop: float) -> float:
            return sign * drop_score(lost, gained, number, drop) - limit

        outer = float(-sign)
        if excess(outer) <= 0:
            return outer
        if excess(observed) >= 0:  # at a confidence of one half the bound is the observed drop, to rounding
            return observed
        return float(root_scalar(excess, bracket=(outer, observed)).root)

    return bound(1), bound(-1)


def wilson_interval(right: int, number: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a proportion: lower and upper bound, each at ``confidence``."""
    limit = float(ndtri(confidence)) ** 2
    middle = (right + limit / 2) / (number + limit)
    half = math.sqrt(limit * (right * (number - right) / number + limit / 4)) / (number + limit)
    return max(0.0, middle - half), min(1.0, middle + half)
