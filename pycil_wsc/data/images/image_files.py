"""Data sets of image files: ``PATH/{train,val}/<class>/*.jpg``."""

import contextlib
import functools
import importlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin

from pycil_wsc.data.images.npz import check_names, check_targets, reason
from pycil_wsc.data.images.paths import compact
from pycil_wsc.data.types import Dataset, DatasetInfo, Split, normal
from pycil_wsc.errors import UserError, first_line

DECODED = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "PPM", "TIFF", "HEIF")  # formats, whatever a file's name is
DECODING = (
    2  # how files become pixels; what was computed with another number may have other ones (1: no alpha, no EXIF)
)
OPENERS = {"pillow_heif": "register_heif_opener"}  # module -> what adds its formats to Pillow
PLUGINS = {"pillow-heif": (".heic", ".heif", ".hif")}  # package -> suffixes of files that it reads
NEVER_8_BITS = (".pfm",)
UNREAD_PICTURES = {".avif", ".jxl", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".raw"}
FILES_OF_SYSTEMS = ("thumbs.db", "desktop.ini")
SUFFIXES_NAMED = 6  # at most, in a message
GROUND = (255, 255, 255, 255)  # white: what transparent images are put on
TURNS = {  # EXIF's orientation -> what makes an image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LONGEST = 50  # times its shorter side: to this an image is cut when it is decoded
LARGEST = 500_000_000  # pixels of a JPEG that is decoded at reduced size: a progressive one is held whole, 1.5 GB
SMALLER = f"make it smaller, or save it as JPEG: one of up to {LARGEST // 10**6} megapixels is read at reduced size"
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
    left_out: Counter[str] = Counter()
    splits = [_split(part, classes, left_out) for part in parts]
    for part, split in zip(parts, splits):
        check_targets(str(part), split.targets, list(classes), _why_empty(part, classes, split.targets))
    train, test = splits
    return Dataset(info_of_files(name, classes), train, test, left_out=left_out)


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
    left_out: Counter[str] = Counter()
    train, *others = [_split(part, classes, left_out, compact) for part in parts]
    if not len(train):
        raise UserError(f"{parts[0]}: no {_image_files(left_out)} in its class folders; add some")
    test = others[0] if others else Split(train.images[:0], train.targets[:0])
    return Dataset(info_of_files(name, classes), train, test, left_out=left_out)


def _why_empty(part: Path, classes: Mapping[str, Sequence[str]], targets: np.ndarray) -> str:
    """What is wrong with the first class that has no image in ``part``; "" if all have some."""
    empty = np.flatnonzero(np.bincount(targets, minlength=len(classes)) == 0)
    if not len(empty):
        return ""
    name = list(classes)[empty[0]]
    left_out: Counter[str] = Counter()
    _split(part, {name: classes[name]}, left_out)
    return f"has no {_image_files(left_out)}; add some, or remove the class's folder from both parts"


def _image_files(left_out: Mapping[str, int]) -> str:
    """ "image files", with the suffixes that they may have and those of the files that are there instead."""
    there = f", only {counted(left_out)}" if left_out else ""
    return f"image files ({' '.join(sorted(suffixes()))}){there}"


def line_of(left_out: Mapping[str, int]) -> str:
    """One line about the files that were left out; "" if there are none. ``left_out``: suffix -> number of files."""
    if not left_out:
        return ""
    number = sum(left_out.values())
    files = "1 file is left out that is not read as an image"
    if number > 1:
        files = f"{number:,} files are left out that are not read as images"
    return f"{files}: {counted(left_out)}"


def are_pictures(left_out: Mapping[str, int]) -> bool:
    """Whether some of these files are pictures by their suffix, although they cannot be read here."""
    _decoders()  # which registers what there is
    pictures = Image.registered_extensions().keys() | {suffix for names in PLUGINS.values() for suffix in names}
    return not (pictures | UNREAD_PICTURES).isdisjoint(left_out)


def counted(left_out: Mapping[str, int]) -> str:
    """The numbers of files by suffix, the largest first, and what would read some of them."""
    by_number = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{number:,} {suffix or 'without a suffix'}" for suffix, number in by_number[:SUFFIXES_NAMED]]
    if rest := by_number[SUFFIXES_NAMED:]:
        named.append(f"{sum(number for _, number in rest):,} of {len(rest)} other suffixes")
    return ", ".join(named) + _remedy(left_out)


def _remedy(left_out):
    for package, names in PLUGINS.items():
        if known := sorted(set(names) & left_out.keys()):
            return f" ({known[0]}: pip install {package})"
    return ""


def _refuse_unknown_parts(path):
    """A folder ``train`` of folders is not a class, but a part; the other part has another name, or is missing."""
    for part in sorted(path.iterdir()) if path.is_dir() else ():
        if part.name.lower() == "train" and part.is_dir():
            entries = list(part.iterdir())
            if any(entry.is_dir() for entry in entries) and not any(_is_image(entry.name) for entry in entries):
                raise UserError(
                    f"{path}: has a folder {part.name} of folders, but not train and val (or test); name them so, or "
                    f"give folder:{part}"
                )


def image_files(folder: Path, elsewhere: set[tuple[int, int]], left_out: Counter[str]) -> list[str]:
    """The image files below ``folder``, sorted by folder and name. Links are followed; each real file is listed once.

    ``elsewhere``: folders (device and inode) that are not entered: a link to one of them would be a loop, or would
    give the images of another class. ``left_out``: other files are counted here, by suffix.
    """
    path_of: dict[str, str] = {}  # real path -> path
    real_folders: dict[str, str] = {}
    for entry in _images_below(folder, elsewhere, left_out):
        directory = os.path.dirname(entry.path)
        if directory not in real_folders:
            real_folders[directory] = os.path.realpath(directory)
        real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real_folders[directory], entry.name)
        path_of[real] = min(entry.path, path_of.get(real, entry.path), key=os.path.split)
    return sorted(path_of.values(), key=os.path.split)


def walked(folder: str) -> Iterator[str]:
    """The image files below ``folder``, each folder's before those of the folders in it, by name.

    Files and folders count as in :func:`image_files`, and each folder is listed when its turn comes. A file to which
    several names lead is there under each. Files that are not images are logged at the end.
    """
    left_out: Counter[str] = Counter()
    for entry in _images_below(folder, (), left_out):
        yield entry.path
    if line := line_of(left_out):
        logging.getLogger("pycil_wsc").warning("%s: %s", folder, line)


def _images_below(
    folder: str | Path, elsewhere: Collection[tuple[int, int]], left_out: Counter[str]
) -> Iterator[os.DirEntry[str]]:
    """The image files, where links lead to them, too; each folder but those ``elsewhere`` is entered once.

    ``left_out``: counts the other files by suffix.
    """
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
            elif not entry.name.startswith(".") and entry.name.lower() not in FILES_OF_SYSTEMS:
                left_out[os.path.splitext(entry.name)[1].lower()] += 1
        pending += reversed(inner)


def _is_image(name: str) -> bool:
    """Whether a file has the name of an image; macOS's own files, which begin with ``._``, are not images."""
    return os.path.splitext(name)[1].lower() in suffixes() and not name.startswith("._")


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


def _array(paths: Iterable[str]) -> np.ndarray:
    return np.array(list(paths), dtype=str)


def _split(
    part: Path,
    classes: Mapping[str, Sequence[str]],
    left_out: Counter[str],
    array: Callable[[Iterable[str]], np.ndarray] = _array,
) -> Split:
    """The image files below ``part``, where each of ``classes`` has these folders; counts what is ``left_out``.

    ``array``: makes an array of their names.
    """
    above = {_inode(folder) for folder in (part, *part.resolve().parents)}
    roots: dict[tuple[int, int], str] = {}
    for folder in (folder for folders in classes.values() for folder in folders):
        if not os.path.isdir(part / folder):
            continue
        inode = _inode(part / folder)
        if inode in roots:
            raise UserError(f"{part}: '{roots[inode]}' and '{folder}' are the same folder; remove one of the links")
        roots[inode] = folder
    sizes = np.zeros(len(classes), np.int64)

    def files() -> Iterator[str]:
        for number, folders in enumerate(classes.values()):
            for folder in folders:
                if folder in roots.values() and _inode(part / folder) not in above:
                    images = image_files(part / folder, above | roots.keys(), left_out)
                    sizes[number] += len(images)
                    yield from images

    images = array(files())
    return Split(images, np.repeat(np.arange(len(classes)), sizes))


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


# ---- decoding --------------------------------------------------------------------------------------------------------


@functools.cache
def _decoders() -> list[str]:
    """Those of ``DECODED`` that this Pillow has, with those that plugins add."""
    for module, function in OPENERS.items():
        with contextlib.suppress(ImportError):
            getattr(importlib.import_module(module), function)()
    Image.init()
    return [name for name in DECODED if name in Image.OPEN]


@functools.cache
def suffixes() -> frozenset[str]:
    """The suffixes, in lower case, of the files that can be decoded here."""
    formats = {*_decoders(), "MPO"}  # a JPEG file with further images, of which the first is read
    return frozenset(
        suffix
        for suffix, name in Image.registered_extensions().items()
        if name in formats and suffix not in NEVER_8_BITS
    )


def open_image(source: str | IO[bytes]) -> Image.Image:
    """Pillow's image of a file, which is decoded later. Refuses all but a few formats, as some start other programs."""
    return Image.open(source, formats=_decoders())


def open_file(path: str) -> Image.Image:
    """:func:`open_image` of a file on this machine, also of a JPEG that has more pixels than Pillow decodes.

    That is decoded at a half, a quarter or an eighth of its size, the first that Pillow decodes without a warning. Of
    data that others send, a few bytes may claim any size: give them to :func:`open_image`, which refuses them.
    """
    try:
        return open_image(path)
    except Image.DecompressionBombError as error:
        reduced = _reduced(path, Image.MAX_IMAGE_PIXELS or 0)
        if reduced is None:
            raise UserError(f"too large ({reason(error).split(',')[0]}); {SMALLER}") from None
        return reduced


def _reduced(path: str, most: int) -> Image.Image | None:
    """A JPEG file, to be decoded at reduced size: at most ``most`` pixels. None if that cannot be done.

    Raises :class:`UserError` if it is too large for that.
    """
    try:
        image = JpegImagePlugin.JpegImageFile(path)
    except SyntaxError:  # another format
        return None
    if image.width * image.height > LARGEST:
        image.close()
        raise UserError(f"has more than {LARGEST / 10**6:g} megapixels; make it smaller")
    for scale in (2, 4, 8):
        width, height = (-(-side // scale) for side in image.size)
        if width * height <= most:
            image.draft(None, (image.width // scale, image.height // scale))
            return image
    image.close()
    return None


def decode(path: str, side: int | None = None) -> Image.Image:
    """Decode an image file as :func:`seen`, the :func:`middle` of it if it is very long.

    ``side``: of a JPEG, a smaller version is enough, whose sides are at least this long; it takes much less time.
    """
    image_status(path)
    try:
        # an error would quote a name out of an array as such
        with open_file(str(path)) as image:
            if side:
                image.draft(image.mode, (side, side))
            if not image.mode.startswith(("I", "F")):
                return middle(seen(image))
            problem = f"more than 8 bits per channel (mode {image.mode}); convert it to 8 bits"
    except UserError as error:
        problem = str(error)
    except Exception as error:  # decoders raise what they like about a damaged image
        problem = f"not a readable image ({reason(error)}); replace or remove the file"
    raise UserError(f"{path}: {problem}")


def in_colour(image: Image.Image, name: str = "image") -> Image.Image:
    """A PIL image as :func:`seen`. Its file is read only now, and may be damaged or closed.

    Raises a :class:`UserError` that calls it ``name`` if it cannot be converted.
    """
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{name}: more than 8 bits per channel (mode {image.mode}); convert it to 8 bits")
    if 0 in image.size:
        raise UserError(f"{name}: has {image.width} x {image.height} pixels; leave it out")
    try:
        return seen(image)
    except AssertionError:  # Pillow's, of an image whose file is closed
        problem = "its file is closed"
    except Exception as error:
        problem = first_line(error)
    raise UserError(f"{name}: cannot be decoded ({problem}); open it again, or replace it")


def seen(image: Image.Image) -> Image.Image:
    """An image as a viewer shows it: RGB, on ``GROUND`` where it is transparent, and turned as its EXIF data say.

    The colours of transparent pixels are not seen and may be anything. Every image that is learned or classified comes
    from here, so that one image has one answer. The result has no metadata by which it could be turned again.
    """
    image.load()
    if image.has_transparency_data:
        over = image.convert("RGBA")
        shown = Image.alpha_composite(Image.new("RGBA", over.size, GROUND), over).convert("RGB")
    else:
        shown = image.convert("RGB")
    turn = TURNS.get(_orientation(image))
    if turn is not None:
        shown = shown.transpose(turn)
    shown.info = {}
    return shown


def is_turned(path: str) -> bool:
    """Whether the EXIF data of an image file turn or mirror it; False of one that cannot be opened."""
    try:
        with open_file(path) as image:
            return _orientation(image) in TURNS
    except Exception:  # what Pillow raises about a damaged file, which is reported elsewhere
        return False


def _orientation(image: Image.Image) -> Any:
    """The orientation in the EXIF data of an image; 1, upright, if they are damaged."""
    # not ImageOps.exif_transpose: it also writes the EXIF data anew, which fails on some that cameras write
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # what Pillow raises about damaged metadata; the pixels are fine
        return 1


def middle(image: Image.Image) -> Image.Image:
    """The middle of a very long image, of which crops leave even less. Resized whole, it may take gigabytes."""
    box = middle_box(*image.size)
    return image if box == (0, 0, *image.size) else image.crop(box)


def middle_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of the :func:`middle` of an image of this size."""
    longest = LONGEST * min(width, height)
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return left, top, width - left, height - top
