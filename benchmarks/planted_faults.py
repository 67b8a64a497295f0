"""How many planted label errors and near duplicates ``Learner.check`` finds, and how many others it names.

    python benchmarks/planted_faults.py --data data/tinyimagenet100 \\
        --weights data/models/efficientnet_lite0.safetensors \\
        --out results/benchmarks/planted_faults/planted-faults-cpu.json

``--data``: ``train/<class>/*.JPEG``; ``--weights``: EfficientNet-Lite0, under timm's names. A draw takes ten classes:
at random ("random"), or a random one and the nine whose mean features are nearest by cosine ("alike"). 40 photographs
of each are checked, of which 20 have the name of another of these classes, and 20 others are copies, which were saved
again with JPEG's quality 50 or resized to 48 or 128 pixels.

- "new": the learner knows two other classes, and the copies are those of photographs that are checked;
- "known": it has learned 60 other photographs of each class, a fifth of them held out, of which the copies are.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from record import origin, write

from pycil_wsc import Learner

KEYS = {"convnet_type": "timm:efficientnet_lite0", "image_size": 96, "batch_size": 16, "held_out": 12}
KEYS |= {"num_workers": 0, "threads": 1, "device": "cpu", "quiet": True}
CLASSES = 10
CHECKED = 40  # photographs of a class
PLANTED = 20  # of either kind
OTHERS = 2  # classes that the learner of "new" knows
COMPARED = 10  # photographs of a class, by which alike ones are chosen
SIDES = (None, 48, 128)  # of a copy; None: as it is, saved again


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", help="left out: random weights, to try the script")
    parser.add_argument("--draws", type=int, default=8, help="of the classes, of each kind")
    parser.add_argument("--classes", type=int, default=CLASSES, help="of a draw")
    parser.add_argument("--photographs", type=int, default=CHECKED, help="that are checked of a class")
    parser.add_argument("--planted", type=int, default=PLANTED, help="label errors, and as many copies")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = sorted(path.name for path in (args.data / "train").iterdir())
    means = mean_features(args, names)
    found = {}
    for kind in ("random", "alike"):
        for draw in range(args.draws):
            rng = np.random.default_rng(draw)
            chosen = rng.permutation(len(names))
            if kind == "alike":
                order = np.argsort(-means @ means[chosen[0]], kind="stable")
                chosen = np.concatenate([order[: args.classes], order[args.classes :][::-1]])
            classes = [names[number] for number in chosen]
            for setting in ("new", "known"):
                counts = checked(args, classes, setting, rng)
                found.setdefault(kind, {}).setdefault(setting, []).append(counts)
                print(kind, draw, setting, json.dumps(counts), flush=True)
    settings = {"classes": args.classes, "images": args.classes * args.photographs, "planted": args.planted}
    write({"found": found, "settings": settings, "keys": KEYS} | origin(torch.device("cpu")), args.out)


def new_learner(args: argparse.Namespace) -> Learner:
    return Learner("ncm", **KEYS, adapt=False, pretrained=args.weights or False)


def photographs(args: argparse.Namespace, names: list[str], start: int, end: int | None) -> tuple[list, list]:
    """(the photographs ``start`` to ``end`` of each class, by name; their labels)."""
    found = [(str(path), name) for name in names for path in sorted((args.data / "train" / name).iterdir())[start:end]]
    return [path for path, _ in found], [name for _, name in found]


def mean_features(args: argparse.Namespace, names: list[str]) -> np.ndarray:
    """The mean of the centred features of each class, of length 1: (classes, d)."""
    learner = new_learner(args)
    learner.learn(photographs(args, names[:OTHERS], 0, COMPARED))
    files, labels = photographs(args, names, 0, COMPARED)
    features = learner.answers.classifier.features(files)
    means = np.stack([features[np.array(labels) == name].mean(0) for name in names])
    means -= means.mean(0)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def checked(args: argparse.Namespace, classes: list[str], setting: str, rng: np.random.Generator) -> dict:
    """What is found in photographs of the first of these classes; the last ones are others."""
    names = classes[: args.classes]
    learner = new_learner(args)
    known = photographs(args, classes[-OTHERS:], args.photographs, None)
    if setting == "known":
        known = photographs(args, names, args.photographs, None)
    learner.learn(known)
    files, labels = photographs(args, names, 0, args.photographs)
    rows = rng.permutation(len(files))
    wrong, copies, originals = np.split(rows, [args.planted, 2 * args.planted])
    for row in wrong:
        labels[row] = rng.choice([name for name in names if name != labels[row]])
    sources = [files[row] for row in originals[: args.planted]]
    sources_labels = [labels[row] for row in originals[: args.planted]]
    if setting == "known":
        some = rng.permutation(len(known[0]))[: args.planted]
        sources, sources_labels = [known[0][row] for row in some], [known[1][row] for row in some]
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(copies):
            files[row] = saved_again(sources[number], Path(folder), number)
            labels[row] = sources_labels[number]
        findings = learner.check((files, labels))
    doubted = {image for image, *_ in findings.doubtful}
    planted_errors, planted_copies = ({files[row] for row in part} for part in (wrong, copies))
    near = [{image, other} for image, other in findings.near_duplicates]
    true = [pair for pair in near if pair & planted_copies]
    return {
        "label errors": {"found": len(doubted & planted_errors), "false alarms": len(doubted - planted_errors)},
        "near duplicates": {"found": len(true), "false alarms": len(near) - len(true)},
    }


def saved_again(path: str, folder: Path, number: int) -> str:
    """A copy of a photograph: saved again or resized, in turn."""
    side = SIDES[number % len(SIDES)]
    with Image.open(path) as image:
        copy = image.convert("RGB")
    if side is None:
        name = str(folder / f"{number}.jpg")
        copy.save(name, quality=50)
        return name
    name = str(folder / f"{number}.png")
    copy.resize((side, side), Image.Resampling.BICUBIC).save(name)
    return name


if __name__ == "__main__":
    main()
