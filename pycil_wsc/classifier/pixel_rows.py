"""Samples as scikit-learn has them, such as rows of pixels, as images that a learner takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from pycil_wsc.errors import UserError

Samples = ArrayLike | Sequence[str | os.PathLike[str]]


def form_of(samples: Samples) -> str:
    """``files``, ``images`` or ``rows``."""
    dimensions = getattr(samples, "ndim", 0)
    names = samples if isinstance(samples, (list, tuple, np.ndarray)) else []
    if dimensions == 1:  # also a column of a data frame
        names = np.asarray(samples, object)
    if len(names) and isinstance(names[0], (str, os.PathLike)):
        return "files"
    return "images" if dimensions > 2 else "rows"


def check_form(form: str, fitted: str) -> None:
    """Raise a :class:`UserError` if rows of pixels, which are scaled, meet images, which are not."""
    if "rows" in {form, fitted} and form != fitted:
        raise UserError(f"X: {form}, but the classifier was fitted on {fitted}; give {fitted}, or fit it again")


def check_bytes(given: np.dtype, fitted_on_bytes: bool) -> None:
    """Raise a :class:`UserError` if black and white come from uint8, and rows have other numbers, or vice versa."""
    if (given == np.uint8) != fitted_on_bytes:
        before = "uint8" if fitted_on_bytes else "other numbers"
        raise UserError(
            f"X: rows of {given}, but the classifier was fitted on rows of {before}; give the same type, or "
            "value_range=(black, white) when you make the classifier"
        )


def file_names(samples: Samples) -> list[str]:
    """The names of image files; raises a :class:`UserError` if there is something else among them."""
    names = []
    for place, name in enumerate(np.asarray(samples, object)):
        if not isinstance(name, (str, os.PathLike)):
            raise UserError(f"X: row {place} is not a file name, unlike row 0; leave it out")
        names.append(os.fspath(name))
    return names


def value_range_of(rows: np.ndarray, are_bytes: bool, wanted: tuple[float, float] | None) -> tuple[float, float]:
    """The values of black and of white.

    ``wanted``: those that are asked for; None: 0 and 255 if the rows ``are_bytes``, else their least and greatest.
    Raises a :class:`UserError` if they are not two numbers.
    """
    if wanted is None:
        wanted = (0, 255) if are_bytes else (rows.min(), rows.max())
    try:
        black, white = (float(value) for value in wanted)
    except (TypeError, ValueError):
        black = white = math.nan
    if not math.isfinite(black - white):
        raise UserError(f"value_range: {wanted!r} is not (black, white), two numbers")
    return black, white


def image_shape_of(pixels: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of an image whose row has this many ``pixels``.

    ``wanted``: the one that is asked for; None: the smallest greyscale square that holds them. Raises a
    :class:`UserError` if it is not a square of so many pixels.
    """
    if wanted is None:
        side = math.isqrt(pixels - 1) + 1
        return side, side
    shape = [*wanted] if isinstance(wanted, (list, tuple)) and all(type(size) is int for size in wanted) else []
    if len(shape) not in (2, 3) or shape[0] != shape[1] or shape[2:] not in ([], [3]) or math.prod(shape) != pixels:
        raise UserError(f"image_shape: {wanted} is not (side, side) or (side, side, 3) with {pixels} pixels in all")
    return tuple(shape)


def pictures(rows: np.ndarray, value_range: tuple[float, float], shape: tuple[int, ...]) -> np.ndarray:
    """Rows of numbers (n, pixels) -> uint8 images (n, *shape); what a row has too few of is black.

    ``value_range``: the values of black and of white.
    """
    black, white = value_range
    scaled = (rows - black) / (white - black or 1.0)
    pixels = np.round(255 * scaled.clip(0, 1)).astype(np.uint8)
    missing = math.prod(shape) - rows.shape[1]
    return np.pad(pixels, ((0, 0), (0, missing))).reshape(-1, *shape)
