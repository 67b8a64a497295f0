"""What keeping a classifier up to date costs, and how often its calibration, its gate and its test of shift err.

    python benchmarks/upkeep.py --data npz:data/cifar100.npz --out results/benchmarks/upkeep/upkeep-cpu.json
    python benchmarks/upkeep.py --method ranpac --backbone timm:efficientnet_lite0 --pool 200 \\
        --keys '{"pretrained": "data/models/efficientnet_lite0.safetensors", "image_size": 96, "projection": 2000}'

``--data``: a data set by its name. The first ``--classes`` are learned in two updates from ``--images`` images each,
of which a fifth is held out; the classes' other images, and those of the test, are a pool that no model was trained on;
``--pool``: at most so many of each class.
A draw takes two disjoint sets of images of each class from the pool: 20 that stand for the held-out images, and 40
others. Times are those of one thread.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from record import origin, spread, write

from pycil_wsc import Accept, Learner
from pycil_wsc.classifier.check.shift import compared
from pycil_wsc.classifier.predict.calibration import calibration_error, fitted_temperature
from pycil_wsc.classifier.update.gate import decided
from pycil_wsc.data.images.datasets import load_dataset

KEYS = {"memory_per_class": 100, "batch_size": 32, "lrate": 0.05, "scheduler": "cosine", "threads": 1}
KEYS |= {"device": "cpu", "precision": "fp32", "quiet": True, "num_workers": 0}
KNOWN, OTHERS = 20, 40  # images of each class in a draw


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="npz:data/cifar100.npz")
    parser.add_argument("--classes", nargs=2, type=int, default=[6, 4], help="of the first update and of the second")
    parser.add_argument("--images", type=int, default=200, help="of each class")
    parser.add_argument("--epochs", nargs=2, type=int, default=[10, 3])
    parser.add_argument("--pool", type=int, help="images of each class in it (default: all)")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9, help="of the predictions that are timed")
    parser.add_argument("--method", default="replay")
    parser.add_argument("--backbone", default="resnet20")
    parser.add_argument("--keys", type=json.loads, default={}, help="further keys of the learner, as JSON")
    parser.add_argument("--seed", type=int, default=1993)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    updates, pool = parts_of(args)
    keys = KEYS | {"convnet_type": args.backbone, "init_epoch": args.epochs[0], "epochs": args.epochs[1]} | args.keys
    learner = Learner(args.method, held_out=args.images // 5, seed=args.seed, **keys)
    with tempfile.TemporaryDirectory() as folder:
        record = learned(learner, updates, pool, Path(folder))
    record |= {"prediction": timed(learner, pool[0], args.repeats), "draws": args.draws, "per_class": [KNOWN, OTHERS]}
    rng = np.random.default_rng(args.seed)
    record["calibration"] = calibrated(learner, pool, args.draws, rng)
    record["shift"] = shifted(learner, pool, args.draws, rng)
    print(json.dumps({name: record[name] for name in ("calibration", "shift")}), flush=True)
    write(record | {"arguments": vars(args) | {"out": None}, "keys": keys} | origin(torch.device("cpu")), args.out)


def parts_of(args):
    """(images, names) of each update, and (images, labels) of the pool."""
    data = load_dataset(args.data, "data")
    images = np.concatenate([data.train.images, data.test.images])
    targets = np.concatenate([data.train.targets, data.test.targets])
    first, total = args.classes[0], sum(args.classes)
    rows = [np.flatnonzero(targets == label) for label in range(total)]
    used = [own[: args.images] for own in rows]
    rest = np.concatenate([own[args.images :][: args.pool] for own in rows])
    names = np.array(data.info.classes)
    updates = []
    for labels in (range(first), range(first, total)):
        chosen = np.concatenate([used[label] for label in labels])
        updates.append((images[chosen], names[targets[chosen]]))
    order = [name for _, some in updates for name in sorted(set(some))]  # in which the learner learns them
    labels = np.array([order.index(name) for name in names[targets[rest]]])
    return updates, (images[rest], labels)


# ---- updates, and what they leave on the disk ------------------------------------------------------------------------


def learned(learner, updates, pool, folder):
    """Learn the updates, a bad one between them; the gate's decisions on draws, sizes and seconds."""
    images, labels = pool
    first, second = updates
    start = time.process_time()
    learner.learn(first)
    seconds = [time.process_time() - start]
    learner.save(folder)
    old = np.isin(labels, range(len(learner.classes)))
    before = right(learner, pool)
    bad = Learner.load(folder, quiet=True)
    bad.learn((first[0], bad_labels(first[1])))
    decision = Learner.load(folder, quiet=True).learn((first[0], bad_labels(first[1])), accept=Accept())
    start = time.process_time()
    learner.learn(second)
    seconds.append(time.process_time() - start)
    sizes = {"learner.safetensors": learner.versions(folder)[-1]["bytes"]}  # and its parts
    learner.save(folder)
    start = time.process_time()
    learner.save(folder)
    sizes["three versions"] = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    found = {"update": {"cpu_seconds": seconds, "save": time.process_time() - start}, "bytes": sizes}
    rng = np.random.default_rng(0)
    gate = {"reason": decision["reason"]}
    for name, model in (("good", learner), ("bad", bad)):
        learnt = labels < len(model.classes)
        after = right(model, pool)
        gate[name] = gated(before[learnt], after[learnt], old[learnt], labels[learnt], rng, len(model.classes))
    print(json.dumps(found | {"gate": gate}), flush=True)
    return found | {"gate": gate}


def bad_labels(names):
    """Each class's images have the label of another one."""
    return np.roll(names, len(names) // len(set(names)))


def right(learner, pool):
    """Whether each image of the pool is classified correctly."""
    return learner.answers.classifier.predict(pool[0]) == pool[1]


def gated(before, after, old, labels, rng, classes, draws=100):
    """How often the gate rejects an update by 20 images of each class, and its true drop on the whole pool."""
    rejected = {}
    for strict in (False, True):
        decisions = []
        for _ in range(draws):
            rows, _ = drawn(labels, rng)
            known, new = rows[old[rows]], rows[~old[rows]]
            decisions.append(decided(Accept(strict=strict), (before[known], after[known]), after[new], classes))
        rejected["strict" if strict else "default"] = sum(not each["accepted"] for each in decisions)
    drop = 100 * float(before[old].mean() - after[old].mean())
    new = 100 * float(after[~old].mean()) if not old.all() else None
    return {"drop": drop, "new": new, "rejected": rejected, "draws": draws}


def drawn(labels, rng):
    """Rows of the pool: 20 images of each class, and 40 others."""
    known, others = [], []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        known.append(rows[:KNOWN])
        others.append(rows[KNOWN : KNOWN + OTHERS])
    return np.concatenate(known), np.concatenate(others)


# ---- predictions -----------------------------------------------------------------------------------------------------


def timed(learner, images, repeats, count=512):
    """Microseconds per image of ``predict`` and of the bare network on images that are normalised already."""
    images = images[:count]
    size = learner.config.batch_size
    model = learner.model
    ready = torch.stack([learner.transform(image) for image in images])
    seconds = {"predict": [], "model": []}
    for _ in range(repeats + 1):
        start = time.process_time()
        learner.predict(images)
        middle = time.process_time()
        with torch.inference_mode():
            for batch in ready.split(size):
                model(batch).argmax(1)
        seconds["predict"].append(1e6 * (middle - start) / len(images))
        seconds["model"].append(1e6 * (time.process_time() - middle) / len(images))
    found = {f"{name}_microseconds": spread(values[1:]) for name, values in seconds.items()}
    ratios = [ours / bare for ours, bare in zip(seconds["predict"], seconds["model"])]
    return found | {"ratio": statistics.median(ratios[1:]), "batch": size, "images": len(images)}


# ---- how often they err ----------------------------------------------------------------------------------------------


def calibrated(learner, pool, draws, rng):
    """The calibration error on 40 images of each class, with temperatures fitted on 20 others, over the draws."""
    images, labels = pool
    answers = learner.answers
    logits = answers.logits(images)
    plain = logits.double().softmax(1).numpy()
    before, after, temperatures = [], [], []
    for _ in range(draws):
        known, others = drawn(labels, rng)
        temperatures.append(fitted_temperature(logits[known].numpy(), labels[known]))
        scaled = (logits[others].double() / temperatures[-1]).softmax(1).numpy()
        before.append(error_of(plain[others], labels[others]))
        after.append(error_of(scaled, labels[others]))
    learners = error_of(answers.probabilities(logits).numpy(), labels)
    improved = sum(b > a for a, b in zip(after, before))
    found = {"before": spread(before), "after": spread(after), "temperature": spread(temperatures)}
    whole = {"before": error_of(plain, labels), "after": learners, "temperature": answers.temperature}
    return found | {
        "improved": improved,
        "draws": draws,
        "learner": whole,
        "accuracy": 100 * right(learner, pool).mean(),
    }


def error_of(probabilities, labels):
    return calibration_error(probabilities.max(1), probabilities.argmax(1) == labels)


SHIFTS = {
    "none": lambda images: images,
    "brightness x 0.8": lambda images: (0.8 * images).astype(np.uint8),
    "brightness x 0.5": lambda images: (0.5 * images).astype(np.uint8),
    "noise of 15 of 255": lambda images: (
        (images + np.random.default_rng(0).normal(0, 15, images.shape)).clip(0, 255).astype(np.uint8)
    ),
}


def shifted(learner, pool, draws, rng):
    """The alarms among the draws, for each shift of the other images."""
    images, labels = pool
    classifier = learner.answers.classifier
    known_features = classifier.features(images)
    found = {}
    for name, change in SHIFTS.items():
        features = classifier.features(change(images))
        values = []
        for _ in range(draws):
            known, others = drawn(labels, rng)
            sides = (features[others], labels[others]), (known_features[known], labels[known])
            shift = compared(*sides, 0.01, rng)
            assert shift is not None  # the drawn sides are large enough for a test
            values.append(shift.p)
        alarms = {f"p <= {level}": int((np.array(values) <= level).sum()) for level in (0.01, 0.05)}
        found[name] = alarms | {"draws": draws}
    return found


if __name__ == "__main__":
    main()
