"""Reads the images of one task from a folder, arrays, file names, or a data set of torch's or Hugging Face's."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data import Dataset as TorchDataset

from pycil_wsc.data.images.datasets import load_dataset, path_of
from pycil_wsc.data.images.fingerprint import fingerprint
from pycil_wsc.data.images.image_files import in_colour, info_of_files, read_task_folder
from pycil_wsc.data.images.npz import check_names, info_of_arrays, three_channels
from pycil_wsc.data.types import Dataset, Split, normal
from pycil_wsc.errors import UserError, first_line


@runtime_checkable
class Columns(Protocol):
    """A data set of Hugging Face's package ``datasets``, which is not imported."""

    @property
    def features(self) -> Mapping[str, Any]: ...

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...


ImageSource = str | tuple[object, object] | TorchDataset | Columns
FORMS = "give 'folder:PATH', 'npz:PATH', (images, labels), a torch Dataset or a Hugging Face data set"
UNSTREAMED = "it is streamed and has no length; load the data set without streaming"
IMAGES = "give uint8 (N, side, side, 3) or a list of file names"


def read_source(source: ImageSource, data_root: str | Path = "data") -> Dataset:
    """Read the images and class names of one task.

    Args:
        source: ``"folder:PATH"`` (:func:`pycil_wsc.data.images.image_files.read_task_folder`), another name accepted by
            :func:`~.datasets.load_dataset`, ``(images, labels)``, a map-style torch ``Dataset`` of (image, label), or a
            data set of Hugging Face's ``datasets`` with a column of ``Image`` and one of ``ClassLabel`` (or one called
            label). Images are uint8 (N, side, side, 3) or (N, side, side), as a tensor also (N, 3, side, side), or file
            names. A class is named by the label as text, in a torch ``Dataset`` with ``classes`` by ``classes[label]``,
            and by the names of a ``ClassLabel``.
        data_root: folder of the registered data sets.

    Raises:
        UserError: if the data are invalid.
    """
    part = read_listed(source, data_root)
    if part.fingerprint is None:
        part = replace(part, fingerprint=fingerprint(part.train, part.test))
    return part


def read_listed(source: ImageSource, data_root: str | Path = "data") -> Dataset:
    """:func:`read_source` without a fingerprint, for which each file is looked at: some may not be there."""
    if isinstance(source, str):
        kind, _, path = source.partition(":")
        if kind != "folder" or not path:
            return load_dataset(source, data_root)
        return read_task_folder(source, path_of("folder", path))
    if isinstance(source, tuple) and len(source) == 2:
        return _of_pair(*source)
    if isinstance(source, TorchDataset) and not _is_streamed(source):
        return _of_torch(source)
    if isinstance(source, Columns) and not isinstance(source, dict):
        return _of_columns(source)
    raise UserError(f"cannot learn from a {type(source).__name__}; {_remedy(source)}")


def _remedy(source: object) -> str:
    """What to give in place of a ``source`` of no known form."""
    splits = {name: part for name, part in source.items() if _has_columns(part)} if isinstance(source, dict) else {}
    if splits and not any(map(_is_streamed, splits.values())):
        return f"give one of its splits, such as [{next(iter(splits))!r}]"
    return UNSTREAMED if splits or _is_streamed(source) else FORMS


def _has_columns(source: object) -> bool:
    """Whether this is a data set of Hugging Face's, of whatever kind."""
    return hasattr(source, "features") and hasattr(source, "column_names")


def _is_streamed(source: object) -> bool:
    return _has_columns(source) and not hasattr(source, "__len__")


def _of_pair(images: object, labels: object) -> Dataset:
    names = _listed(labels)
    if not isinstance(images, (np.ndarray, torch.Tensor)):
        images = _list("images", images, IMAGES)
    elif not images.ndim:
        raise UserError(f"images: {images} is not a list; {IMAGES}")
    if len(images) != len(names) or not names:
        raise UserError(f"(images, labels): {len(images)} images and {len(names)} labels; give one label per image")
    distinct = sorted(set(names), key=lambda label: (isinstance(label, str), label))
    classes = tuple(map(str, distinct))
    check_names("labels", classes)
    number = {label: index for index, label in enumerate(distinct)}
    targets = np.array([number[label] for label in names])
    files = [isinstance(image, (str, Path)) for image in images] if not torch.is_tensor(images) else []
    if any(files):
        if not all(files):
            raise UserError(f"images: item {files.index(False) + 1} is not a file name, as others are; {IMAGES}")
        info = info_of_files("(files, labels)", classes)
        split = Split(np.array([str(path) for path in images]), targets)
    else:
        split = Split(_pixels(_array(images)), targets)
        info = info_of_arrays("(images, labels)", classes, split.images)
    return Dataset(info, split, Split(split.images[:0], targets[:0]))


def _listed(labels: Any) -> list[int | str]:
    """``labels`` as a list of integers or strings."""
    if isinstance(labels, torch.Tensor):
        labels = as_array(labels)
    labels = _list("labels", labels.tolist() if hasattr(labels, "tolist") else labels, "give one label per image")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, (str, int, np.integer)):
            raise UserError(f"labels: {label!r} is neither a string nor a whole number")
    return [normal(str(label)) if isinstance(label, str) else int(label) for label in labels]


def _list(what, values, remedy):
    try:
        if not isinstance(values, str):
            return list(values)
    except TypeError:
        pass
    raise UserError(f"{what}: {values!r} is not a list; {remedy}")


def _array(images: torch.Tensor | np.ndarray | Sequence[object]) -> np.ndarray:
    """A tensor, or a list of images of one shape, as an array (N, ...)."""
    if isinstance(images, (torch.Tensor, np.ndarray)):
        return np.ascontiguousarray(image_array(images))
    arrays = []
    for number, image in enumerate(images, 1):
        if isinstance(image, torch.Tensor):
            arrays.append(image_array(image[None])[0])
        elif isinstance(image, Image.Image):
            arrays.append(np.asarray(in_colour(image, f"images: item {number}")))
        else:
            arrays.append(as_array(image))
    _check_one_shape("images: shapes", arrays)
    return np.stack(arrays)


def image_array(images: torch.Tensor | np.ndarray) -> np.ndarray:
    """:func:`as_array` of images, where those of a tensor (N, 3, H, W) become (N, H, W, 3)."""
    if isinstance(images, torch.Tensor) and images.ndim == 4 and images.shape[1] == 3 != images.shape[3]:
        images = images.permute(0, 2, 3, 1)
    return as_array(images)


def as_array(images: object) -> np.ndarray:
    """Images as an array. Raises :class:`UserError` for lists of different lengths and tensors that are not dense."""
    try:
        return images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    except ValueError:  # nested lists of different lengths
        raise UserError(f"images: an item is not an array; {IMAGES}") from None
    except (TypeError, RuntimeError) as error:  # a sparse tensor, or one without memory
        raise UserError(f"images: are not an array ({first_line(error)}); {IMAGES}") from None


def _check_one_shape(what, arrays, remedy="resize them to one size"):
    if len(shapes := sorted({array.shape for array in arrays})) > 1:
        raise UserError(f"{what} {shapes[0]} and {shapes[1]}; {remedy}")


def _pixels(images: np.ndarray) -> np.ndarray:
    """Check colour or greyscale images and return them as uint8 (N, side, side, 3)."""
    images = three_channels(images) if images.ndim == 3 and images.dtype == np.uint8 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] != 3:
        raise UserError(
            f"images: {images.dtype} of shape {images.shape}; give uint8 (N, side, side, 3), or names of image files"
        )
    return images


def _of_torch(source: Any) -> Dataset:
    """Read a map-style data set into memory."""
    if not hasattr(source, "__len__") or isinstance(source, IterableDataset):
        raise UserError(f"{type(source).__name__}: has no length; give a map-style Dataset, with __len__")
    name = type(source).__name__
    samples = [_sample(source, index) for index in range(len(source))]
    images = [_image(image, f"{name}: item {index}") for index, (image, _) in enumerate(samples)]
    owners = [_owner(source, index) for index in range(len(samples))]
    roots = {str(getattr(owner, "root", "")) for owner in owners}
    stacked = _stacked(name, images, roots.pop() if len(roots) == 1 else "")
    return _of_pair(stacked, _names([_plain(label) for _, label in samples], owners))


def _stacked(name: str, images: Sequence[np.ndarray], root: str = "") -> np.ndarray:
    """Images of one shape as an array; ``root``: the folder of their files, if it is known."""
    folder = f"'folder:{root}'" if root else "'folder:ROOT', with their files in ROOT/<class>,"
    remedy = f"give {folder} to have images resized as they are read, or resize them to one size"
    _check_one_shape(f"{name}: images of shapes", images, remedy)
    return np.stack(images) if images else np.empty((0, 1, 1, 3), np.uint8)


def _owner(source: Any, index: int) -> Any:
    """The data set with an item of a ``Subset`` or ``ConcatDataset``, or of one of another: the first with classes."""
    while not hasattr(source, "classes"):
        if isinstance(source, Subset):
            index = int(source.indices[index])
            source = source.dataset
        elif isinstance(source, ConcatDataset):
            index %= len(source)  # a Subset may count from the end
            number = bisect.bisect_right(source.cumulative_sizes, index)
            index -= source.cumulative_sizes[number - 1] if number else 0
            source = source.datasets[number]
        else:
            break
    return source


def _names(labels: Sequence[object], owners: Sequence[Any]) -> list[object]:
    """The labels by the names that their data sets give them; those of data sets without ``classes`` as they are."""
    rows_of: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        rows_of.setdefault(id(owner), []).append(row)
    parts = [(owners[rows[0]], rows) for rows in rows_of.values()]
    have_names = any(hasattr(owner, "classes") for owner, _ in parts)
    named = list(labels)
    for owner, rows in parts:
        if hasattr(owner, "classes"):
            names = _checked_names(owner.classes, [labels[row] for row in rows], type(owner).__name__)
            for row in rows:
                label = labels[row]
                named[row] = names[label] if isinstance(label, int) else label
        elif have_names and any(isinstance(labels[row], int) for row in rows):
            raise UserError(
                f"{type(owner).__name__}: has no 'classes', as the data sets have that it is joined with; give it the "
                "names of its labels"
            )
    return named


def _checked_names(names: Any, labels: Iterable[object], of: str) -> Sequence[str]:
    """``names``, if they are names of all these labels, and different ones."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(item, str) for item in names):
        raise UserError(f"{of}: its 'classes' are {names!r}, not a list of names; correct them")
    used = sorted({label for label in labels if isinstance(label, int)})
    if wrong := [label for label in used if not 0 <= label < len(names)]:
        raise UserError(f"{of}: label {wrong[0]} has no name in its {len(names)} classes")
    check_names(of, [names[label] for label in used])
    return names


def _plain(label: object) -> object:
    """A number in a tensor or array of one element as a Python number, an int if it is whole; the rest unchanged."""
    if isinstance(label, (torch.Tensor, np.ndarray)):
        if math.prod(label.shape) != 1:
            raise UserError(f"labels: an array of shape {tuple(label.shape)}; give a whole number or a name per image")
        label = label.item()
        label = int(label) if isinstance(label, bool) or isinstance(label, float) and label.is_integer() else label
    return int(label) if isinstance(label, np.integer) else label


def _of_columns(source: Columns) -> Dataset:
    """Read a data set of Hugging Face's ``datasets`` into memory: a column of images and one of classes."""
    image = _column(source, "Image", ())
    label = _column(source, "ClassLabel", ("label", "labels"))
    images, labels = [], []
    for index in range(len(source)):
        row = source[index]
        images.append(_image(row[image], f"column '{image}': item {index}"))
        labels.append(_plain(row[label]))
    names = getattr(source.features[label], "names", None)
    if names is not None:
        named = _checked_names(names, labels, f"column '{label}'")
        labels = [named[value] if isinstance(value, int) else value for value in labels]
    return _of_pair(_stacked(f"column '{image}'", images), labels)


def _column(source: Columns, kind: str, otherwise: Sequence[str]) -> str:
    """The column of this kind of feature, or one that has one of the names ``otherwise``."""
    candidates = [name for name, feature in source.features.items() if type(feature).__name__ == kind]
    candidates = candidates or [name for name in otherwise if name in source.features]
    if len(candidates) == 1:
        return candidates[0]
    columns = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in source.features.items())
    if not candidates:
        makes = "class_encode_column" if kind == "ClassLabel" else "cast_column"
        raise UserError(f"the Hugging Face data set has no column of {kind}, only {columns}; add one with {makes}")
    more = ", ".join(repr(name) for name in candidates[1:])
    raise UserError(
        f"the Hugging Face data set has {len(candidates)} columns of {kind}, {', '.join(candidates)}; "
        "keep the one to learn: "
        f"remove_columns([{more}])"
    )


def _sample(source: Any, index: int) -> tuple[object, object]:
    """The pair (image, label) with this index."""
    sample = source[index]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        parts = f"{len(sample)} values" if isinstance(sample, (tuple, list)) else f"a {type(sample).__name__}"
        raise UserError(f"{type(source).__name__}: item {index} is {parts}; return (image, label)")
    image, label = sample
    return image, label


def _image(image: object, name: str) -> np.ndarray:
    """Convert a PIL image, a uint8 tensor (3, H, W) or a uint8 array (H, W, 3) to uint8 (H, W, 3)."""
    if isinstance(image, Image.Image):
        return np.asarray(in_colour(image, name))
    if isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.ndim == 3 and len(image) in (1, 3):
        return image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        return image
    kind = f"{image.dtype} tensor {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
    raise UserError(
        f"{name}: is a {kind}, not a PIL image or a uint8 tensor (3, side, side); remove ToTensor and Normalize, which "
        "the learner applies itself"
    )
