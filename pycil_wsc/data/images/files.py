"""Data sets of image files: ``PATH/{train,val}/<class>/*.jpg``."""

import functools
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from pycil_wsc.data.images.npz import check_names, check_targets, reason
from pycil_wsc.data.types import Dataset, DatasetInfo, Split, normal
from pycil_wsc.errors import UserError, first_line

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def info_of_files(name: str, classes: Iterable[str]) -> DatasetInfo:
    """The :class:`DatasetInfo` of image files: they are transformed as those of ImageNet."""
    return DatasetInfo(
        name,
        tuple(classes),
        224,
        IMAGENET["mean"],
        IMAGENET["std"],
        crop="resized",
        padding=0,
        flip=True,
        brightness=0.0,
    )


def read_folder(name: str, path: Path) -> Dataset:
    """Read ``train`` and ``val`` (or ``test`` if there is no ``val``), each with one folder per class.

    The layout is that of torchvision's ``ImageFolder``. A class is named after its folder; bytes that are not UTF-8
    are replaced by U+FFFD. Links are followed, but each real file is read once in a class: see :func:`image_files`.
    """
    parts = _parts(path)
    classes = _classes(path, parts, f"{path}/{{train,val}}/<class>/*.jpg")
    splits = [_split(part, classes) for part in parts]
    problem = f"has no image files ({' '.join(IMG_EXTENSIONS)}); add some, or remove the class's folder from both parts"
    for part, split in zip(parts, splits):
        check_targets(str(part), split.targets, list(classes), problem)
    train, test = splits
    return Dataset(info_of_files(name, classes), train, test)


def common_folder(paths: Iterable[str]) -> str:
    """``os.path.commonpath``, quickly for many files in few folders; absolute if any of the paths is."""
    paths = set(paths)
    folders = set(map(os.path.dirname, paths)) if len(paths) > 1 else paths
    if len(set(map(os.path.isabs, folders))) > 1:
        folders = set(map(os.path.abspath, folders))
    return os.path.commonpath(folders)


def read_task_folder(name: str, path: Path) -> Dataset:
    """Read one task's images: ``path/<class>/*.jpg``, or training and test parts as in :func:`read_folder`.

    Without parts, the test split is empty. A class without images is left out.
    """
    parts = _parts(path)
    if not all(map(os.path.isdir, parts)):
        parts = (path,)
        _refuse_unknown_parts(path)
    classes = _classes(path, parts, f"{path}/<class>/*.jpg")
    train, *others = (_split(part, classes) for part in parts)
    if not len(train):
        raise UserError(f"{parts[0]}: no image files ({' '.join(IMG_EXTENSIONS)}) in its class folders; add some")
    test = others[0] if others else Split(train.images[:0], train.targets[:0])
    return Dataset(info_of_files(name, classes), train, test)


def _refuse_unknown_parts(path):
    """A folder ``train`` of folders is not a class, but a part; the other part has another name, or is missing."""
    for part in sorted(path.iterdir()) if path.is_dir() else ():
        if part.name.lower() == "train" and part.is_dir():
            entries = list(part.iterdir())
            if any(entry.is_dir() for entry in entries) and not any(
                entry.name.lower().endswith(IMG_EXTENSIONS) for entry in entries
            ):
                raise UserError(
                    f"{path}: has a folder {part.name} of folders, but not train and val (or test); name them so, or "
                    f"give folder:{part}"
                )


def image_files(folder: Path, elsewhere: set[tuple[int, int]]) -> list[str]:
    """The image files below ``folder``, sorted by folder and name. Links are followed; each real file is listed once.

    ``elsewhere``: folders (device and inode) that are not entered: a link to one of them would be a loop, or would
    give the images of another class.
    """
    found: dict[str, str] = {}  # real path -> path
    real_folders: dict[str, str] = {}
    for entry in _images_below(folder, elsewhere):
        directory = os.path.dirname(entry.path)
        if directory not in real_folders:
            real_folders[directory] = os.path.realpath(directory)
        real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real_folders[directory], entry.name)
        found[real] = min(entry.path, found.get(real, entry.path), key=os.path.split)
    return sorted(found.values(), key=os.path.split)


def walked(folder: str) -> Iterator[str]:
    """The image files below ``folder``, each folder's before those of the folders in it, by name.

    Files and folders count as in :func:`image_files`, and each folder is listed when its turn comes. A file to which
    several names lead is there under each.
    """
    return (entry.path for entry in _images_below(folder))


def _images_below(folder: str | Path, elsewhere: Collection[tuple[int, int]] = ()) -> Iterator[os.DirEntry[str]]:
    """The image files, where links lead to them, too; each folder but those ``elsewhere`` is entered once."""
    entered = {_inode(folder)}
    pending = [str(folder)]
    while pending:
        inner = []
        for entry in _entries(pending.pop()):
            if os.path.isdir(entry.path):  # False for a link to itself
                if _of_a_system(entry.name):
                    continue
                try:
                    inode = _inode(entry.path)
                except OSError:
                    continue  # it has just been removed
                if inode not in entered and inode not in elsewhere:
                    entered.add(inode)
                    inner.append(entry.path)
            elif _is_image(entry.name):
                yield entry
        pending += reversed(inner)


def _is_image(name: str) -> bool:
    """Whether a file has the name of an image; macOS's own files, which begin with ``._``, are not images."""
    return name.lower().endswith(IMG_EXTENSIONS) and not name.startswith("._")


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    """What is in ``directory``, by name."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{directory}: cannot be read ({reason(error)}); make it readable, or remove it") from None


def _of_a_system(folder: str) -> bool:
    """Whether a folder has this name because a program keeps its own files there: Jupyter, Synology, macOS, ..."""
    return folder.startswith(".") or folder in ("@eaDir", "__MACOSX")


def _inode(path: str | Path) -> tuple[int, int]:
    """What identifies a folder, whatever links lead to it."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _parts(path: Path) -> tuple[Path, ...]:
    return path / "train", path / (
        "test" if os.path.isdir(path / "test") and not os.path.isdir(path / "val") else "val"
    )


def _classes(path: Path, parts: Sequence[Path], layout: str) -> dict[str, list[str]]:
    """Class name -> its folders' names in ``parts``, in the order of the classes.

    Folders whose names differ in their Unicode form alone (as after a copy from macOS) are one class. Other folders may
    have the same name after bytes that are not UTF-8 were replaced; they are refused.
    """
    folders: dict[str, list[str]] = {}
    for folder in sorted(set().union(*(_class_folders(part, layout) for part in parts))):
        folders.setdefault(normal(folder), []).append(folder)
    names = [os.fsencode(name).decode(errors="replace") for name in folders]
    check_names(str(path), names)
    return dict(zip(names, folders.values()))


def _split(part: Path, classes: Mapping[str, Sequence[str]]) -> Split:
    """The image files below ``part``, where each of ``classes`` has these folders."""
    above = {_inode(folder) for folder in (part, *part.resolve().parents)}
    roots: dict[tuple[int, int], str] = {}
    for folder in (folder for folders in classes.values() for folder in folders):
        if not os.path.isdir(part / folder):
            continue
        inode = _inode(part / folder)
        if inode in roots:
            raise UserError(f"{part}: '{roots[inode]}' and '{folder}' are the same folder; remove one of the links")
        roots[inode] = folder
    files, targets = [], []
    for number, folders in enumerate(classes.values()):
        for folder in folders:
            if folder in roots.values() and _inode(part / folder) not in above:
                found = image_files(part / folder, above | roots.keys())
                files += found
                targets += len(found) * [number]
    return Split(np.array(files, dtype=str), np.array(targets, dtype=np.int64))


def _class_folders(directory: Path, layout: str) -> set[str]:
    try:
        names = {entry.name for entry in os.scandir(directory) if entry.is_dir() and not _of_a_system(entry.name)}
        if not names:
            raise FileNotFoundError("contains no class folders")
    except OSError as error:
        raise UserError(f"{directory}: {reason(error)}; arrange the images as {layout}") from None
    return names


def image_status(path: str) -> os.stat_result:
    """``os.stat`` of an image file. Raises a :class:`UserError` that names it if it is not an existing file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(f"{path}: {reason(error)}; replace the image, or remove it") from None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise UserError(f"{path}: is not a file but a folder, a pipe or a device; remove it")
    return status


LONGEST = 50  # times its shorter side: to this an image is cut when it is decoded
DECODED = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "PPM", "TIFF")  # formats, whatever a file's name is


@functools.cache
def _decoders() -> list[str]:
    """Those of ``DECODED`` that this Pillow has."""
    Image.init()
    return [name for name in DECODED if name in Image.OPEN]


def open_image(source: str | IO[bytes]) -> Image.Image:
    """Pillow's image of a file, which is decoded later. Refuses all but a few formats, as some start other programs."""
    return Image.open(source, formats=_decoders())


def decode(path: str) -> Image.Image:
    """Decode an image file as RGB, the :func:`middle` of it if it is very long."""
    image_status(path)
    try:
        # an error would quote a name out of an array as such
        with open_image(str(path)) as image:
            if not image.mode.startswith(("I", "F")):
                return middle(image.convert("RGB"))
            problem = f"more than 8 bits per channel (mode {image.mode}); convert it to 8 bits"
    except Exception as error:  # decoders raise what they like about a damaged image
        problem = f"not a readable image ({reason(error)}); replace or remove the file"
    raise UserError(f"{path}: {problem}")


def in_colour(image: Image.Image, name: str = "image") -> Image.Image:
    """A PIL image in RGB. Its file is read only now, and may be damaged or closed.

    Raises a :class:`UserError` that calls it ``name`` if it cannot be converted.
    """
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{name}: more than 8 bits per channel (mode {image.mode}); convert it to 8 bits")
    if 0 in image.size:
        raise UserError(f"{name}: has {image.width} x {image.height} pixels; leave it out")
    try:
        return image.convert("RGB")
    except AssertionError:  # Pillow's, of an image whose file is closed
        problem = "its file is closed"
    except Exception as error:
        problem = first_line(error)
    raise UserError(f"{name}: cannot be decoded ({problem}); open it again, or replace it")


def middle(image: Image.Image) -> Image.Image:
    """The middle of a very long image, of which crops leave even less. Resized whole, it may take gigabytes."""
    box = middle_box(*image.size)
    return image if box == (0, 0, *image.size) else image.crop(box)


def middle_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of the :func:`middle` of an image of this size."""
    longest = LONGEST * min(width, height)
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return left, top, width - left, height - top
