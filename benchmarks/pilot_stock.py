"""Stock PILOT on a small transformer, on images that are given: what the benchmarks beside PILOT share.

PILOT's own learners run, from a copy of its folder in which its sizes of ViT-B are those of the small transformer, and
in which what timm, torch and Python of today no longer accept is repaired. ``REPAIRS`` lists all changes.
"""

import importlib
import json
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from pycil_wsc.config.loading import load

SEED = 1993
SIZES = {  # of ViT-B in PILOT's code -> the names of ours
    r"\b768\b": "embed_dim",
    r"(?<=img_size=)224": "image_size",
    r"(?<=patch_size=)16": "patch_size",
    r"(?<=depth=)12": "depth",
    r"(?<=num_heads=)12": "num_heads",
}
REPAIRS = [  # file, what stands there, what is put there, and why
    ("*", "timm.models.layers", "timm.layers", "timm has moved its layers"),
    ("*", "timm.models.helpers", "timm.models", "timm has moved its helpers"),
    ("*", "timm.models.registry", "timm.models", "timm has moved its registry"),
    ("*", "timm.layers.helpers", "timm.layers", "timm has moved its helpers of layers"),
    ("*", "timm.layers.weight_init", "timm.layers", "timm has moved its initialisations"),
    (
        "utils/inc_net.py",
        "from easydict import EasyDict",
        "from types import SimpleNamespace as EasyDict",
        "easydict may be missing",
    ),
    ("models/dgr.py", ".cuda()", "", "DGR stops without CUDA"),
    ("backbone/vit_coda_promtpt.py", "(1,), requires_grad=True", "(1,)", "CODA-Prompt stops without CUDA"),
    (
        "models/base.py",
        "        def _compute_class_mean(",
        "    def _compute_class_mean(",
        "a method is indented too far, so that DUCT stops",
    ),
    ("models/base.py", "self._class_covs[class_idx, ...] = class_cov", "pass", "DUCT stops at a name not defined"),
]
REPLACED = (
    "timm.create_model: makes PILOT's own class, with our weights",
    "POT: its iterations of Sinkhorn's algorithm",
    "torch's loader and PILOT's data manager: our batches and images",
    "PILOT's accuracies for its log: not computed, as they draw batches",
    "widths and depths of ViT-B in PILOT's code: those of the small transformer",
)
OTHER_NAMES = {"aper_adapter": "aper_aperpter", "slca_cofima": "cofima"}  # of methods -> of PILOT's files
EPOCHS = ("tuned_epoch", "init_epoch", "init_epochs", "later_epochs", "epochs", "epc_re", "ca_epochs", "crct_epochs")
EPOCHS += ("boosting_epochs", "compression_epochs")
OURS = {  # keys of ours that suit arrays, and random weights
    "coda_prompt": {"crop_scale": None, "test_interpolation": None},
    "aper_finetune": {"adapt": False},
}
LATER = r"_(l2p|dualprompt|coda_prompt|lae|ssf|memo)$"  # PILOT's transformers that it makes by timm.create_model
MODULES = {"coda_prompt": "vit_coda_promtpt"}


def repaired(pilot: Path, folder: Path, sizes: dict[str, int], replaced: dict[str, str] | None = None) -> None:
    """Write PILOT's code to ``folder``, repaired and with other ``sizes``, and let it be imported from there.

    ``replaced``: texts that stand in PILOT's code, and what is put there.
    """
    for path in [*pilot.glob("backbone/*.py"), *pilot.glob("models/*.py"), *pilot.glob("utils/*.py")]:
        place = path.relative_to(pilot)
        text = path.read_text()
        for pattern, name in SIZES.items():
            text = re.sub(pattern, str(sizes[name]), text)
        for where, old, new, _ in REPAIRS:
            if where in ("*", str(place)):
                text = text.replace(old, new)
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        if place.name == "base.py":
            text = dedented(text)
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
    for name in [each for each in sys.modules if each.partition(".")[0] in ("utils", "models", "backbone")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    sys.modules["ot"] = types.SimpleNamespace(sinkhorn=sinkhorn)  # pyright: ignore[reportArgumentType]
    warnings.simplefilter("ignore")


def dedented(text: str) -> str:
    """The last method of PILOT's base class, whose first line has been repaired, with its body."""
    head, name, body = text.partition("    def _compute_class_mean(")
    return head + name + body.replace("\n    ", "\n")


def sinkhorn(source, target, costs, strength, most=1000, stop=1e-9):
    """The optimal transport of the package POT, by its iterations."""
    kernel = torch.exp(-costs / strength)
    left, right = torch.ones_like(source.double()) / len(source), torch.ones_like(target.double()) / len(target)
    for number in range(most):
        right = target / (kernel.T @ left)
        left = source / (kernel @ right)
        if number % 10 == 0 and torch.linalg.norm(right * (kernel.T @ left) - target) < stop:
            break
    return left[:, None] * kernel * right


def settings(pilot: Path, method: str, changes: dict) -> dict:
    """PILOT's JSON file of a method of ours with those ``changes`` whose keys it has; keys with ``+`` are added.

    A file without memory stays without.
    """
    file = json.loads((pilot / f"exps/{OTHER_NAMES.get(method, method)}.json").read_text())
    if not file["memory_size"]:
        changes = {key: value for key, value in changes.items() if key != "memory_size"}
    added = {key.removeprefix("+"): value for key, value in changes.items() if key in file or key.startswith("+")}
    return {key: value for key, value in file.items() if key not in ("prefix", "device", "seed", "dataset")} | added


def our_configuration(file: dict, folder: Path, sizes: dict[str, int], **keys) -> Any:
    """The configuration of the same file here."""
    path = folder / "file.json"
    path.write_text(json.dumps(file))
    options = {f"convnet_options.{name}": sizes[name] for name in ("patch_size", "embed_dim", "depth", "num_heads")}
    ours = {"convnet_type": "timm:vit_tiny_patch16_224", "pretrained": False, "image_size": sizes["image_size"]}
    ours |= {"device": "cpu", "precision": "fp32", "out": str(folder), "seed": SEED}
    ours |= OURS.get(file["model_name"], {})
    (config,) = load(path, ours | options | keys)
    return config


def made_by_timm(weights, sizes):
    """In place of ``timm.create_model`` in PILOT's code: its own or timm's transformer, with our ``weights``."""

    own: dict[str, Any] = {key: sizes[key] for key in ("patch_size", "embed_dim", "depth", "num_heads")}

    def create_model(name, pretrained=False, drop_block_rate=None, **options):
        kind = re.search(LATER, name)
        if kind is None:
            plain = VisionTransformer(img_size=sizes["image_size"], **options, **own)
            return with_weights(plain, weights)
        module = importlib.import_module(f"backbone.{MODULES.get(kind[1], f'vit_{kind[1]}')}")
        if kind[1] == "memo":
            both = module.Generalized_Vit(), module.Specialized_Vit()
            return [with_weights(part, weights) for part in both]
        return with_weights(module.VisionTransformer(**options), weights)

    return create_model


def with_weights(model: nn.Module, weights) -> nn.Module:
    """``model`` with what ``weights`` has of it; prompts of L2P share the position of the class token."""
    given = dict(weights)
    own = model.state_dict()
    if "pos_embed" in given and own["pos_embed"].shape != given["pos_embed"].shape:
        position = given["pos_embed"]
        more = own["pos_embed"].shape[1] - position.shape[1]
        given["pos_embed"] = torch.cat([position[:, :1], position[:, :1].expand(-1, more, -1), position[:, 1:]], 1)
    model.load_state_dict({name: value for name, value in given.items() if name in own}, strict=False)
    return model


class Images:
    """In place of a data set of PILOT's: images (n, 3, H, W) and their classes, or ``epochs``, lists of batches."""

    def __init__(self, images, labels, epochs=None):
        self.data = images
        self.labels = np.asarray(labels)
        self.epochs = epochs


class Loader:
    """In place of torch's loader: the next of the data set's epochs, or all of its images."""

    def __init__(self, dataset: Images, batch_size=1, **more):
        self.dataset = dataset
        self.batch_size = batch_size

    def __len__(self):
        if self.dataset.epochs is not None:
            return len(self.dataset.epochs[0])
        return -(-len(self.dataset.labels) // self.batch_size)

    def __iter__(self):
        if self.dataset.epochs is not None:
            epochs = self.dataset.epochs
            batches = epochs.pop(0) if len(epochs) > 1 else epochs[0]
            return iter([(None, *batch) for batch in batches])
        images = torch.as_tensor(self.dataset.data).split(self.batch_size)
        labels = torch.from_numpy(self.dataset.labels).split(self.batch_size)
        return iter([(None, *batch) for batch in zip(images, labels, strict=True)])


class Bar(list):
    """In place of a progress bar."""

    def set_description(self, text):
        pass


def learner_of(file: dict, tasks: int, classes: int):
    """PILOT's learner of a file, inside :func:`small`, for ``tasks`` of ``classes`` in all."""
    file = file | {"device": [torch.device("cpu")], "nb_classes": classes, "nb_tasks": tasks, "seed": SEED}
    file |= {"prefix": "", "dataset": "cifar224", "pretrained": True}
    module = importlib.import_module(f"models.{file['model_name']}")
    base = importlib.import_module("models.base")
    for each in (module, base):
        vars(each).update(DataLoader=Loader, tqdm=Bar)
    made = module.Learner(file)
    made._compute_accuracy = lambda *_: 0.0  # of its log alone, as what follows
    made._evaluate = lambda *_: dict.fromkeys(("top1", "top5"), 0.0)
    made.save_checkpoint = lambda *_: None
    made.topk = 1
    return made


def small(weights, sizes):
    """The context in which PILOT's code makes and uses its transformers."""
    return patch.object(timm, "create_model", made_by_timm(weights, sizes))
