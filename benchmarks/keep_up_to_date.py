"""A classifier of photographs kept up to date for four months, against full retraining every month.

    python benchmarks/keep_up_to_date.py --data data/tinyimagenet100 \\
        --out results/benchmarks/keep_up_to_date/keep-up-to-date-cpu.json

``--data``: ``{train,val}/<class>/*.JPEG``. January has 8 classes with 60 images each; each later month 4 new classes
with 100; March also has 40 new images of each of January's classes. After each month the learner is tested on the
validation images of all classes so far. Only learning is timed, in CPU seconds, which other work on the machine hardly
affects.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from record import origin, write

from pycil_wsc import Learner

KEYS = {"convnet_type": "resnet8", "image_size": 32, "batch_size": 16, "lrate": 0.05, "scheduler": "cosine"}
KEYS |= {"num_workers": 0, "threads": 1, "device": "cpu", "quiet": True}
WSC = {"average_lr": 0.05, "average_every": 1}
WAYS = {
    "retraining on everything": {"name": "joint", "memory_per_class": "all"},
    "WSC, all images kept": {"name": "wsc", "memory_per_class": "all", "wsc": WSC},
    "Replay, all images kept": {"name": "replay", "memory_per_class": "all"},
    "WSC, 20 images per class": {"name": "wsc", "memory_per_class": 20, "wsc": WSC},
}
MONTHS = {  # (classes by number, slice of their images)
    "january": [(range(8), slice(60))],
    "february": [(range(8, 12), slice(None))],
    "march": [(range(12, 16), slice(None)), (range(8), slice(60, None))],
    "april": [(range(16, 20), slice(None))],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument(
        "--epochs", nargs=2, type=int, default=[10, 3], help="of January and of full retraining; of later months"
    )
    parser.add_argument("--seed", type=int, default=1993)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ways = {}
    with tempfile.TemporaryDirectory() as folder:
        counts = lay_out(args.data, Path(folder))
        for way in args.ways:
            ways[way] = measured(Path(folder), WAYS[way], args.epochs, args.seed)
            print(way, json.dumps(ways[way]), flush=True)
    record = {"ways": ways, "months": counts, "keys": KEYS, "settings": WAYS, "epochs": args.epochs, "seed": args.seed}
    write(record | origin(torch.device("cpu")), args.out)


def lay_out(data: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Link the images into ``folder/<month>/<class>`` and ``folder/test``; returns the counts of each month."""
    classes, counts = sorted(os.listdir(data / "train"))[:20], {}
    for month, parts in MONTHS.items():
        for numbers, some in parts:
            for name in (classes[number] for number in numbers):
                link(sorted((data / "train" / name).iterdir())[some], folder / month / name)
        images = list((folder / month).glob("*/*"))
        counts[month] = {"images": len(images), "classes": len({image.parent for image in images})}
    for name in classes:
        link(sorted((data / "val" / name).iterdir()), folder / "test" / name)
    return counts


def link(images: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for image in images:
        (folder / image.name).symlink_to(image.resolve())


def measured(folder: Path, way: dict, epochs: list[int], seed: int) -> dict:
    """Accuracy after each month, and the cost of each month."""
    first, later = epochs
    keys: dict = {name: value for name, value in way.items() if name != "name"} | {"init_epoch": first, "seed": seed}
    learner = Learner(way["name"], epochs=first if way["name"] == "joint" else later, **KEYS, **keys)
    found = {"accuracy": [], "seconds": [], "images": []}
    for month in MONTHS:
        start = time.process_time()
        line = learner.learn(f"folder:{folder / month}")
        found["seconds"].append(time.process_time() - start)
        found["images"].append(line["images_trained"] - sum(found["images"]))
        found["accuracy"].append(learner.evaluate(f"folder:{folder / 'test'}")["accuracy"])
    return found | {"exemplars": line["exemplars"]}


if __name__ == "__main__":
    main()
