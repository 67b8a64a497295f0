"""How often the gate keeps good updates and rejects bad ones, over draws of the photographs that it compares on.

    python benchmarks/gate.py --data data/tinyimagenet100 \\
        --weights data/models/efficientnet_lite0.safetensors --out results/benchmarks/gate/gate-cpu.json

``--data``: ``{train,val}/<class>/*.JPEG``; ``--weights``: EfficientNet-Lite0, under timm's names. SLDA knows ten of the
classes, drawn by the seed, from five photographs each. Each update begins from this learner:

- "more photographs": 45 others of each known class, and 50 of a new class;
- "new class only": 50 photographs of the new class;
- "wrong labels": 45 others of each known class, under the name of the next one.

A draw takes 20 of 60 further photographs of each class, on which no learner was trained. ``drop`` is that on all 60.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from record import origin, write

from pycil_wsc import Accept, Learner
from pycil_wsc.classifier.update.gate import decided

KEYS = {"convnet_type": "timm:efficientnet_lite0", "image_size": 96, "batch_size": 16}
KEYS |= {"num_workers": 0, "threads": 1, "device": "cpu", "quiet": True}
KNOWN, NEW = 10, 1  # classes
COMPARED = 20  # photographs of a class in a draw
UPDATES = ("more photographs", "new class only", "wrong labels")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", help="left out: random weights, trained for an epoch, to try the script")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1993, 1994, 1995])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument(
        "--photographs", nargs=2, type=int, default=[5, 50], help="of a class: learned at first, and by the end"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    updates = {name: {} for name in UPDATES}
    for seed in args.seeds:
        for name, found in measured(args, seed).items():
            updates[name][str(seed)] = found
            print(seed, name, json.dumps(found), flush=True)
    first, later = args.photographs
    settings = {"known": KNOWN, "new": NEW, "first": first, "later": later, "compared": COMPARED, "draws": args.draws}
    write({"updates": updates, "settings": settings, "keys": KEYS} | origin(torch.device("cpu")), args.out)


def measured(args: argparse.Namespace, seed: int) -> dict:
    """For each update, the drop, the accuracy on new classes, and how often it was rejected."""
    rng = np.random.default_rng(seed)
    first, later = args.photographs
    names = rng.permutation(sorted(path.name for path in (args.data / "train").iterdir()))[: KNOWN + NEW].tolist()
    known, new = names[:KNOWN], names[KNOWN:]
    backbone = {"pretrained": args.weights} if args.weights else {"pretrained": False, "init_epoch": 1}
    learner = Learner("slda", seed=seed, **KEYS, **backbone)
    learner.learn(photographs(args.data, known, 0, first))
    further = photographs(args.data, known, first, later)
    arriving = photographs(args.data, new, 0, later)
    turned = [known[(known.index(name) + 1) % KNOWN] for name in further[1]]
    sources = (further[0] + arriving[0], further[1] + arriving[1]), arriving, (further[0], turned)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        learner.save(folder)
        for update, source in zip(UPDATES, sources, strict=True):
            after = Learner.load(folder, quiet=True)
            after.learn(source)
            found[update] = judged(args, learner, after, rng)
    return found


def photographs(data: Path, names: list[str], start: int, end: int) -> tuple[list[str], list[str]]:
    """(the photographs ``start`` to ``end`` of each class, by name; their labels)."""
    found = [(str(path), name) for name in names for path in sorted((data / "train" / name).iterdir())[start:end]]
    return [path for path, _ in found], [name for _, name in found]


def judged(args: argparse.Namespace, learner: Learner, after: Learner, rng: np.random.Generator) -> dict:
    """What the gate decides on draws of photographs that neither learner was trained on."""
    files = []
    labels = []
    for name in after.classes:
        rest = sorted((args.data / "train" / name).iterdir())[args.photographs[1] :]
        rest += sorted((args.data / "val" / name).iterdir())
        files += rest[: 3 * COMPARED]
        labels += [name] * len(rest[: 3 * COMPARED])
    labels = np.array(labels)
    old = np.isin(labels, learner.classes)
    before = learner.predict(files) == labels
    now = after.predict(files) == labels
    rejected = {"default": 0, "strict": 0}
    for _ in range(args.draws):
        rows = np.concatenate([rng.permutation(np.flatnonzero(labels == name))[:COMPARED] for name in after.classes])
        known, new = rows[old[rows]], rows[~old[rows]]
        for name in rejected:
            accept = Accept(strict=name == "strict")
            decision = decided(accept, (before[known], now[known]), now[new], len(after.classes))
            rejected[name] += not decision["accepted"]
    drop = 100 * float(before[old].mean() - now[old].mean())
    return {
        "before": 100 * float(before[old].mean()),
        "drop": drop,
        "new": 100 * float(now[~old].mean()) if not old.all() else None,
        "rejected": rejected,
    }


if __name__ == "__main__":
    main()
