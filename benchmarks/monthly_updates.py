"""Ten monthly updates of a classifier on a pre-trained backbone, by methods with and without training steps.

    python benchmarks/monthly_updates.py --data data/tinyimagenet100 \\
        --weights data/models/efficientnet_lite0.safetensors \\
        --out results/benchmarks/monthly_updates/monthly-updates-cpu.json

``--data``: ``{train,val}/<class>/*.JPEG``; ``--weights``: EfficientNet-Lite0, under timm's names. Each of ten months
brings ten new classes: the 100 classes of ``--data``, ordered by the seed. After each month the classifier is tested on
the validation images of all classes so far. Retraining starts anew from the pre-trained weights each month. Only
learning is timed, in CPU seconds of one thread. ``peak_bytes``: the process's largest resident memory while it learned
the month; ``resident_bytes``: that before the first, of Python, its packages and the new learner. ``bytes``: the size
of the saved learner, with the images that it keeps. ``resets``: the months in which WSC reset weights.

What ``--out`` has already is not measured again, so that the measurement may be stopped after each line.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from record import origin, write

from pycil_wsc import Learner
from pycil_wsc.devices import peak_memory, reset_peak_memory

KEYS = {"convnet_type": "timm:efficientnet_lite0", "image_size": 96, "batch_size": 16, "optimizer": "adamw"}
KEYS |= {"lrate": 2e-3, "scheduler": "cosine", "schedule_unit": "iteration", "epochs": 3}
KEYS |= {"freeze": ["conv_stem", "bn1", *(f"blocks.{number}" for number in range(6))]}  # the last block learns
KEYS |= {"num_workers": 0, "threads": 1, "device": "cpu", "quiet": True}
WAYS = {
    "SLDA": {"name": "slda"},
    "RanPAC": {"name": "ranpac", "projection": 2000},
    "Replay": {"name": "replay", "memory_per_class": 5},
    "WSC": {"name": "wsc", "memory_per_class": 5},
    "retraining on everything": {"name": "joint", "memory_per_class": "all"},  # starts anew
}
NEW = 10  # classes in each month


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", help="left out: random weights, which learn at the start")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--months", type=int, default=10)
    parser.add_argument("--images", type=int, default=20, help="training images per class")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1993, 1994, 1995])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {"months": args.months, "new": NEW, "images": args.images}
    record = {"ways": {}, "settings": settings, "keys": KEYS, "methods": WAYS} | origin(torch.device("cpu"))
    if args.out and args.out.exists():
        record = begun(args.out, record)
    for seed in args.seeds:
        months = drawn(args.data, seed, args.months)
        for way in args.ways:
            found = record["ways"].setdefault(way, {})
            if str(seed) in found:
                continue
            found[str(seed)] = measured(args, months, WAYS[way], seed)
            print(seed, way, json.dumps(found[str(seed)]), flush=True)
            write(record, args.out)


def begun(path: Path, record: dict) -> dict:
    """The record at ``path``, which must be the same measurement as the new ``record``."""
    earlier = json.loads(path.read_text())
    differ = [name for name in record if name != "ways" and record[name] != earlier[name]]
    if differ:
        sys.exit(f"{path}: was measured with other {' and '.join(differ)}; give another --out")
    return earlier


def drawn(data: Path, seed: int, months: int) -> list[list[str]]:
    """The new classes of each month."""
    classes = np.random.default_rng(seed).permutation(sorted(os.listdir(data / "train"))).tolist()
    return [classes[NEW * month : NEW * (month + 1)] for month in range(months)]


def measured(args: argparse.Namespace, months: list[list[str]], keys: dict, seed: int) -> dict:
    """Accuracy and cost of each month, and the size of the saved learner in bytes."""
    device = torch.device("cpu")
    learner = new_learner(args, keys, seed)
    reset_peak_memory(device)
    resident = peak_memory(device)
    found: dict[str, list] = {"accuracy": [], "seconds": [], "images": [], "peak_bytes": []}
    for month in range(1, len(months) + 1):
        known = [name for classes in months[:month] for name in classes]
        new = known[-NEW:]
        if keys["name"] == "joint":
            learner, new = new_learner(args, keys, seed), known
        before = learner.history[-1]["images_trained"] if learner.history else 0
        images = files(args.data / "train", new, args.images)
        reset_peak_memory(device)
        start = time.process_time()
        line = learner.learn(images)
        found["seconds"].append(time.process_time() - start)
        found["peak_bytes"].append(peak_memory(device))
        found["images"].append(line["images_trained"] - before)
        found["accuracy"].append(learner.evaluate(files(args.data / "val", known))["accuracy"])
    ranked = [line.get("importance_seconds", 0) for line in learner.history]  # up to each month: before a reset
    resets = sum(later > earlier for earlier, later in zip(ranked, ranked[1:]))
    with tempfile.TemporaryDirectory() as folder:
        learner.save(folder, copy_images=True)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return found | {"resets": resets, "exemplars": line["exemplars"], "resident_bytes": resident, "bytes": size}


def new_learner(args: argparse.Namespace, keys: dict, seed: int) -> Learner:
    options = {name: value for name, value in keys.items() if name != "name"}
    return Learner(keys["name"], pretrained=args.weights or False, seed=seed, **KEYS, **options)


def files(folder: Path, classes: list[str], number: int | None = None) -> tuple[list[str], list[str]]:
    """(the first ``number`` image files of each class, by name; their labels)."""
    found = [(str(path), name) for name in classes for path in sorted((folder / name).iterdir())[:number]]
    return [path for path, _ in found], [name for _, name in found]


if __name__ == "__main__":
    main()
