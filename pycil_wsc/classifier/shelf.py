"""Saves a learner between two tasks in a folder, so that it can be trained further without the data of earlier tasks.

=======================  ==========================================================================================
``learner.json``         the configuration, the class names, the image transforms, and the state without its tensors
``weights.safetensors``  the tensors
``exemplars.json``       class, task and (for image files) name of each exemplar; names within the folder are relative
``exemplars.npy``        the exemplars' pixels if the images are arrays: uint8 (n, side, side, 3)
``exemplars/``           copies of the exemplars' files, if requested
=======================  ==========================================================================================

Nothing in these files is executed. ``learner.json`` has SHA-256 checksums of itself and of the other files except the
copied images.
"""

import dataclasses
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch

from pycil_wsc.classifier.inference import checked_info
from pycil_wsc.data.types import Arrivals, Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.nested import packed, unpacked

VERSION = 1
FILES = ("weights.safetensors", "exemplars.json", "exemplars.npy")  # learner.json has their checksums


class SavedLearner(NamedTuple):
    """The contents of a folder.

    ``config``: the configuration's values; ``held``: the exemplars, as a stream without test images; ``state``: that of
    :meth:`pycil_wsc.runs.run.Run.state`.
    """

    config: dict[str, Any]
    held: Dataset
    state: dict[str, Any]


def write(folder: Path, learner: SavedLearner, copy_images: bool = False, replaced: Path | None = None) -> None:
    """Write the files to ``folder``. ``learner.json`` is written last, so a folder that has it is complete.

    ``copy_images``: copy the exemplars' image files too. Those in ``replaced``, the folder that this one will replace,
    are copied in any case.
    """
    held, tensors = learner.held, {}
    assert held.arrivals is not None
    state = packed(learner.state, tensors)
    content = safetensors.torch.save({name: tensor.cpu() for name, tensor in tensors.items()})
    write_atomically(folder / "weights.safetensors", content)
    exemplars: dict[str, Any] = {"labels": held.train.targets.tolist(), "tasks": held.arrivals.train.tolist()}
    if held.train.in_memory:
        with open(folder / "exemplars.npy", "wb") as file:
            np.save(file, held.train.images)
    else:
        own = os.path.join(os.path.abspath(replaced), "") if replaced else None
        paths = [os.path.abspath(path) for path in held.train.images]
        exemplars["files"] = [
            _copied(path, folder) if copy_images or own and path.startswith(own) else path for path in paths
        ]
    write_json(folder / "exemplars.json", exemplars)
    facts = {"info": dataclasses.asdict(held.info), "seen": list(held.arrivals.seen), "data": held.fingerprint}
    settings = {"version": VERSION, "config": learner.config}
    content = {**settings, **facts, "state": state}
    sums = {name: _sha256((folder / name).read_bytes()) for name in FILES if (folder / name).exists()}
    write_json(folder / "learner.json", {**content, "sha256": sums | {"learner.json": _sha256_of_json(content)}})


def replace_folder(new: Path, folder: Path) -> None:
    """Rename ``new`` to ``folder``, replacing a learner saved there before."""
    if not folder.exists():
        os.rename(new, folder)
        return
    old = _replaced(folder)
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(folder: Path) -> Path:
    """Where a learner is while another one is renamed to ``folder``."""
    return folder.with_name(f".{folder.name}.old")


def read(folder: Path) -> SavedLearner:
    """Read what :func:`write` wrote. Raises a :class:`UserError` if it is missing or damaged."""
    if not folder.exists() and (_replaced(folder) / "learner.json").is_file():
        folder = _replaced(folder)  # a process was killed while it replaced this learner
    if not (folder / "learner.json").is_file():
        raise UserError(f"{folder}: no saved learner there; give a folder written by Learner.save")
    try:
        content = json.loads((folder / "learner.json").read_bytes())
        if content["version"] != VERSION:
            raise UserError(f"{folder}: was saved by another version (format {content['version']}); use that one")
        files = _verified(folder, content)
        exemplars = json.loads(files["exemplars.json"])
        tensors = safetensors.torch.load(files["weights.safetensors"])
        state = unpacked(content["state"], tensors.__getitem__)
        info = dict(content["info"], **{name: tuple(content["info"][name]) for name in ("classes", "mean", "std")})
        pixels = files.get("exemplars.npy")
        held = _exemplars(folder, exemplars, pixels, checked_info(info), tuple(content["seen"]), content["data"])
        return SavedLearner(content["config"], held, state)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror or error}); make it readable") from None
    except Exception as error:  # damaged files and files of other programs raise many kinds of errors
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}: is not a complete saved learner ({reason}); save or copy it again") from None


def missing(held: Dataset) -> list[str]:
    """The exemplars' files that do not exist."""
    return [] if held.train.in_memory else [path for path in held.train.images.tolist() if not os.path.isfile(path)]


def _verified(folder: Path, content: dict[str, Any]) -> dict[str, bytes]:
    """The contents of ``FILES``; raises a ValueError if a checksum does not match."""
    sums = content.pop("sha256")
    files = {name: (folder / name).read_bytes() for name in FILES if name in sums}
    found = {name: _sha256(data) for name, data in files.items()} | {"learner.json": _sha256_of_json(content)}
    if wrong := [name for name in found if found[name] != sums[name]]:
        raise ValueError(f"the checksum of {wrong[0]} is wrong")
    return files


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256_of_json(content: dict[str, Any]) -> str:
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _exemplars(
    folder: Path, kept: dict[str, Any], pixels: bytes | None, info: DatasetInfo, seen: tuple[int, ...], data: Any
) -> Dataset:
    labels, tasks = (np.array(kept[name], np.int64) for name in ("labels", "tasks"))
    if "files" in kept:
        images = np.array([str(folder / path) for path in kept["files"]], dtype=str)
    else:
        images = np.load(io.BytesIO(pixels or b""), allow_pickle=False)
    if not len(images) == len(labels) == len(tasks) or labels.size and labels.max() >= seen[-1]:
        raise ValueError("exemplars and labels do not match")
    test = Split(images[:0], labels[:0])
    return Dataset(info, Split(images, labels), test, 0.0, data, Arrivals(seen, tasks, tasks[:0]))


def _copied(path: str, folder: Path) -> str:
    """Copy the file to ``folder``; returns its name there, which its content decides, so it is kept by later copies."""
    try:
        content = Path(path).read_bytes()
        name = f"exemplars/{_sha256(content)[:32]}{Path(path).suffix}"
        (folder / "exemplars").mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be copied ({error.strerror}); restore the exemplar's file") from None
    return name
