"""Time of a training step beside stock PILOT's, in the same minute, on the same transformer and as many threads.

    OMP_NUM_THREADS=1 python benchmarks/pilot_speed.py --pilot ../LAMDA-PILOT --out pilot-speed.json

A vision transformer with random weights learns two tasks of two classes by PILOT's JSON file; steps of the second are
timed, or of the first where only that one trains. PILOT's own learner trains, repaired as in ``pilot_stock.py``. Both
sides alternate, ``--repeats`` times.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pilot_stock
import torch
from pilot_stock import EPOCHS, Images
from record import origin, spread, write

from pycil_wsc.devices import resolved_device
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
from pycil_wsc.training.phase import Monitor

TRAIN_ONCE = ("aper_adapter", "aper_finetune", "aper_ssf", "aper_vpt_deep", "aper_vpt_shallow", "ranpac")
TRAIN_EACH = (
    "coda_prompt",
    "der",
    "dgr",
    "dualprompt",
    "duct",
    "ease",
    "finetune",
    "icarl",
    "l2p",
    "lae",
    "memo",
    "mos",
)
TRAIN_EACH += ("slca", "slca_cofima")
METHODS = sorted(TRAIN_ONCE + TRAIN_EACH)
SHORT = dict.fromkeys(EPOCHS, 1) | dict.fromkeys(("milestones", "init_milestones"), [])
SHORT |= {"ca_epochs": 0, "init_cls": 2, "increment": 2, "num_workers": 0, "num_freeze_epochs": 0}
SHORT |= {"memory_size": 4, "ca_storage_efficient_method": "variance", "M": 100}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", type=Path, required=True, help="the folder of PILOT's repository")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--embed-dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--num-heads", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in pilot_stock.SIZES.values()}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        pilot_stock.repaired(args.pilot, Path(folder), sizes)
        for name in args.methods:
            found[name] = measured(name, args, sizes)
    record = {"methods": found, "threads": torch.get_num_threads()} | sizes
    record |= {key: getattr(args, key) for key in ("batch_size", "steps", "repeats")}
    record |= origin(resolved_device("cpu"))
    print(json.dumps(record, indent=2))
    write(record, args.out)


def measured(name, args, sizes):
    """The times of a step of both sides."""
    seconds = {"ours": [], "pilot": []}
    changes = SHORT | {"batch_size": args.batch_size}
    if name == "coda_prompt":  # its cosine is not defined for one epoch
        changes |= {"scheduler": "constant"}
    file = pilot_stock.settings(args.pilot, name, changes)
    for _ in range(args.repeats):
        seconds["ours"] += ours(name, file, args, sizes)
        seconds["pilot"] += stock(name, file, args, sizes)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    spreads = {f"{side}_seconds": spread(times) for side, times in seconds.items()}
    return spreads | {"ours_over_pilot": medians["ours"] / medians["pilot"]}


class Clock(Monitor):
    """When steps ended."""

    def __init__(self):
        self.ends = []

    def step(self, images):
        self.ends.append(time.perf_counter())


def ours(name, file, args, sizes):
    """Seconds of each timed step."""
    with tempfile.TemporaryDirectory() as folder:
        count = (args.steps + 1) * args.batch_size  # the operations of the first step are counted
        targets = np.repeat(np.arange(4), count // 2)
        shape = (len(targets), args.image_size, args.image_size, 3)
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        data = f"{folder}/data.npz"
        np.savez(data, train_x=images, train_y=targets, test_x=images[:: count // 2], test_y=targets[:: count // 2])
        config = pilot_stock.our_configuration(file, Path(folder), sizes, dataset=f"npz:{data}")
        run = Run(config, Datasets().of(config))
        clocks = [Clock(), Clock()]
        for task, clock in zip(run.manager.tasks, clocks, strict=True):
            run.learner.learn(task, clock)
    return np.diff(clocks[0 if name in TRAIN_ONCE else 1].ends[: args.steps + 1]).tolist()


def stock(name, file, args, sizes):
    """Seconds of each timed step of PILOT's."""
    starts = []
    backward = torch.Tensor.backward

    def timed(loss, *arguments, **keys):
        backward(loss, *arguments, **keys)
        starts[-1].append(time.perf_counter())

    quiet = contextlib.redirect_stdout(io.StringIO())
    with pilot_stock.small({}, sizes), patch.object(torch.Tensor, "backward", timed), quiet:
        learner = pilot_stock.learner_of(file, tasks=2, classes=4)
        for _ in range(2):
            starts.append([])
            learner.incremental_train(Tasks(args))
            learner.after_task()
    return np.diff(starts[0 if name in TRAIN_ONCE else 1][: args.steps + 1]).tolist()


class Tasks:
    """In place of PILOT's data manager: random images of two classes, as one batch several times in training."""

    dataset_name = "cifar224"

    def __init__(self, args):
        self.args = args

    def get_task_size(self, task):
        return 2

    def get_dataset(self, classes, source, mode, appendent=None, ret_data=False):
        labels = np.repeat(np.asarray(classes, dtype=np.int64)[-2:], self.args.batch_size // 2)
        images = torch.randn(len(labels), 3, self.args.image_size, self.args.image_size)
        steps = [(images, torch.from_numpy(labels))] * (self.args.steps + 1)
        training = source == "train" and mode == "train" and len(classes) > 1
        dataset = Images(images.numpy(), labels, [steps] if training else None)
        return (images.numpy(), labels, dataset) if ret_data else dataset


if __name__ == "__main__":
    main()
