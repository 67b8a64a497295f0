"""A folder with what a learner predicts with, which the Hugging Face Hub and MLflow take as it is.

=====================  =============================================================================================
``model.safetensors``  the weights of ``Learner.model``
``config.json``        what rebuilds the network: settings, classes, and what is done to an image before
``README.md``          the model card; a licence that its owner has chosen stays
``MLmodel``            what MLflow reads: its flavour ``python_function``
=====================  =============================================================================================

It contains no image, no path and no training state, except for the per-class sums of NCM and FeCAM. No code in it is
executed when it is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from pycil_wsc.classifier.export.card import Told, accuracy_matrix, card
from pycil_wsc.classifier.export.program import check_logits, portable
from pycil_wsc.classifier.predict.answers import UNKNOWN, Answers, Tested
from pycil_wsc.classifier.predict.arguments import folder_of, refusing
from pycil_wsc.classifier.predict.classifier import Classifier, precision_of_answers
from pycil_wsc.classifier.predict.familiarity import Familiarity
from pycil_wsc.classifier.predict.images import opened
from pycil_wsc.classifier.predict.predictor import Model, for_prediction
from pycil_wsc.classifier.predict.rebuild import Reached, checked_info, grown, with_weights_elsewhere
from pycil_wsc.classifier.store.settings import OF_EXPERIMENTS, configured
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file, readable_json, write_together
from pycil_wsc.state import State, packed, unpacked
from pycil_wsc.version import __version__

WEIGHTS, CONFIG, CARD, MLMODEL = "model.safetensors", "config.json", "README.md", "MLmodel"
FORMAT = 2
FAMILIARITY = "familiarity"  # of its tensors, and of its sizes in config.json
OF_THIS_MACHINE = {"data_root", "device", "threads", "num_workers", "pretrained", "cache_images", "compile"}
MLFLOW = """flavors:
  python_function:
    loader_module: pycil_wsc.classifier.bundle
    python_version: {python}
    config:
      file_names: false
signature:
  params: '{params}'
"""
PARAMS = [  # the arguments of predict, which MLflow drops if they are not declared
    {"name": "threshold", "type": "double", "default": None, "shape": None},
    {"name": "unknown", "type": "double", "default": None, "shape": None},
    {"name": "otherwise", "type": "string", "default": UNKNOWN, "shape": None},
]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    answers: Answers,
    held: Dataset,
    config: Config,
    seconds: float,
    evaluations: Sequence[Tested | None] | None = None,
) -> None:
    """Write the files of the folder, once a network rebuilt from them has given the logits of the learner.

    Args:
        folder: where they go; other files in it stay.
        answers: what the learner predicts with.
        held: its exemplars, whose numbers the card tells.
        config: its configuration.
        seconds: that its tasks took.
        evaluations: what ``Learner.evaluate`` returned after each task, None for a task that was not tested.

    Raises:
        UserError: if the evaluations do not fit, the method keeps what it predicts with elsewhere, or the files cannot
            be written or would replace those of others. What was there before is then intact.
    """
    assert held.arrivals is not None
    _refuse_files_of_others(folder)
    seen = held.arrivals.seen
    matrix = None if evaluations is None else accuracy_matrix(evaluations, answers.classes, seen)
    model = portable(Model(answers.classifier.learner, answers.classes))
    told = Told(config.method, config.convnet_type, __version__, seconds)
    text = card(folder / CARD, held, told, matrix)
    weights, extra = tensors_of(model)
    known = answers.known_if_any
    if known is not None:
        weights |= {f"{FAMILIARITY}.{name}": tensor.cpu() for name, tensor in known.state_dict().items()}
    content = safetensors.torch.save(weights, {"format": "pt"})
    described = description(answers, held, config) | {"extra": extra, "sha256": _sha256(content)}
    if known is not None:
        described[FAMILIARITY] = {"classes": len(known.means), "held_out": len(known.scores)}
    rebuilt = _answers(json.loads(json.dumps(described)), content, "cpu")
    side = answers.classifier.info.image_size
    check_logits(f"the folder {folder.name}", model, side, Model(rebuilt.classifier.learner, answers.classes))
    files = {
        CONFIG: readable_json(described),  # first: it tells whose weights these are, and has their checksum
        WEIGHTS: content,
        MLMODEL: MLFLOW.format(python=platform.python_version(), params=json.dumps(PARAMS)),
        CARD: text,
    }
    write_together({folder / name: content for name, content in files.items()})


def _refuse_files_of_others(folder: Path) -> None:
    """Raise a :class:`UserError` if a file that would be replaced is not of an export."""
    signs = {
        CONFIG: '"library": "pycil_wsc"',
        CARD: "library_name: pycil_wsc",
        MLMODEL: "loader_module: pycil_wsc.classifier.bundle",
    }
    remedy = "move it, or choose another folder"
    for name, sign in signs.items():
        path = folder / name
        with refusing(path, "text", remedy):
            if path.is_file() and sign not in read_file(path).decode(errors="replace"):
                raise UserError(f"{path}: was not written by an export; {remedy}")
    if (folder / WEIGHTS).is_file() and not (folder / CONFIG).is_file():
        raise UserError(f"{folder / WEIGHTS}: was not written by an export; {remedy}")


def tensors_of(model: Model) -> tuple[dict[str, Tensor], State]:
    """The model's tensors by name, and whatever else its state has as JSON, whose tensors are among them."""
    state: State = model.state_dict()
    tensors = {name: value.contiguous().clone() for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if name not in tensors}
    tensors_within: dict[str, Tensor] = {}  # filled by ``packed``
    extra = packed(rest, tensors_within)
    return tensors | {name: value.clone() for name, value in tensors_within.items()}, extra


def description(answers: Answers, held: Dataset, config: Config) -> State:
    """The content of ``config.json`` but for what describes the weights."""
    assert held.arrivals is not None
    omitted = (OF_EXPERIMENTS - {"model_name"}) | OF_THIS_MACHINE
    values = with_weights_elsewhere(config.to_dict())
    info = dataclasses.asdict(held.info)
    return {
        "library": "pycil_wsc",
        "version": __version__,
        "format": FORMAT,
        "method": config.method,
        "classes": answers.classes,
        "classes_after_task": list(held.arrivals.seen),
        "temperature": answers.temperature,
        "images": {name: value for name, value in info.items() if name not in ("name", "classes")},
        "config": {name: value for name, value in values.items() if name not in omitted},
    }


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_exported(folder: str | Path, device: str = "cpu") -> Answers:
    """Load what ``Learner.export`` wrote to ``folder``: an object that predicts, without a learner.

    Args:
        folder: the folder. Nothing in it is executed.
        device: as in the configuration.

    Raises:
        UserError: if it is not a complete export.
    """
    folder = folder_of("folder", folder)
    remedy = "name a folder that Learner.export wrote, or export the learner again"
    with refusing(folder, "a complete export", remedy, named=True):
        described, content = _read(folder)
        if _sha256(content) != described["sha256"]:
            described, content = _read(folder)  # it was replaced while it was read
        return _answers(described, content, device)


def _read(folder: Path) -> tuple[State, bytes]:
    return json.loads(read_file(folder / CONFIG)), read_file(folder / WEIGHTS)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _answers(described: State, content: bytes, device: str) -> Answers:
    if described["library"] != "pycil_wsc" or described["format"] != FORMAT:
        raise UserError(f"was exported by another version (format {described['format']}); use that one")
    if _sha256(content) != described["sha256"]:
        raise UserError(f"{WEIGHTS} is not the file that {CONFIG} describes; export the learner again")
    classes, seen = described["classes"], described["classes_after_task"]
    temperature = float(described["temperature"])
    if not seen or seen[-1] != len(classes) or not 0 < temperature < math.inf:
        raise ValueError("its parts do not fit together")
    kept = {name: value for name, value in described["config"].items() if name not in OF_THIS_MACHINE}
    values = without_dropped(kept) | {"device": str(device), "pretrained": False}
    lists = {name: tuple(described["images"][name]) for name in ("mean", "std")}
    info = checked_info(described["images"] | lists | {"name": "exported", "classes": tuple(classes)})
    config = configured(values, tuple(f"task {number + 1}" for number in range(len(seen))))
    reached = Reached.of_stream(seen)
    learner = grown(config, info, reached)
    sums = Model(learner, classes).state_dict().keys()
    model = Model(for_prediction(learner), classes)
    sums -= model.state_dict().keys()
    tensors = safetensors.torch.load(content)
    known = _familiarity_of(described, tensors)
    extra = unpacked(described["extra"], tensors.pop)
    model.load_state_dict({name: value for name, value in (tensors | extra).items() if name not in sums})
    classifier = Classifier(learner, info, reached.classes, precision=precision_of_answers(learner))
    return Answers(classifier, classes, temperature, known=known)


def _familiarity_of(described: State, tensors: dict[str, Tensor]) -> Familiarity | None:
    """The measure of familiarity, whose ``tensors`` are taken out; None of an export that has none."""
    sizes = described.get(FAMILIARITY)
    if sizes is None:
        return None
    prefix = f"{FAMILIARITY}."
    state = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    known = Familiarity(sizes["classes"], len(state["centre"]), sizes["held_out"])
    known.load_state_dict(state)
    return known


# ---- MLflow ----------------------------------------------------------------------------------------------------------


class PyFunc:
    """The folder in MLflow: images -> names of classes.

    ``file_names``: read the files that are named. A server must not, since its clients would choose them.
    """

    def __init__(self, answers: Answers, file_names: bool) -> None:
        self.answers = answers
        self.file_names = file_names

    def predict(self, images: Any, params: Mapping[str, Any] | None = None) -> np.ndarray:
        """The most likely class of each image: names, (B,).

        ``images``: what :meth:`Answers.predict` takes; arrays of whole numbers from 0 to 255 of any type, as JSON
        gives them; or a pandas data frame whose first column has the bytes of image files or, with ``file_names``,
        their names. ``params``: ``unknown``, ``threshold`` and ``otherwise``.
        """
        if hasattr(images, "iloc"):
            images = (images.iloc[:, 0] if images.ndim == 2 else images).tolist()
        if isinstance(images, np.ndarray) and images.dtype.kind in "iu":
            images = _as_bytes(images)
        if isinstance(images, (str, os.PathLike)):
            images = self._image(images)
        elif isinstance(images, Iterable) and not _is_array(images) and not isinstance(images, (bytes, dict)):
            images = map(self._image, images)
        return self.answers.predict(images, **(params or {}))

    def _image(self, image: Any) -> Any:
        """An item of what is handed to ``predict``, as :meth:`Answers.predict` takes it."""
        if isinstance(image, (str, os.PathLike)) and not self.file_names:
            raise UserError(
                "images: names of files, which a server does not read; give their bytes, or load the model with "
                'model_config={"file_names": True}'
            )
        return opened(image) if isinstance(image, bytes) else image


def _is_array(images: Any) -> bool:
    """Whether these are one array of numbers; one of names or of objects is a list of them."""
    return (
        isinstance(images, Tensor)
        or isinstance(images, np.ndarray)
        and (images.dtype.kind not in "UO" or not images.ndim)
    )


def _as_bytes(images: np.ndarray) -> np.ndarray:
    if images.size and not 0 <= images.min() <= images.max() <= 255:
        raise UserError(f"images: values from {images.min()} to {images.max()}; give pixels from 0 to 255")
    return images.astype(np.uint8)


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyFunc:
    """MLflow calls this with the folder."""
    return PyFunc(load_exported(path), bool((model_config or {}).get("file_names")))
