"""A step of ER beside Mammoth's own: the same network, images, batch sizes and threads, in turns.

    OMP_NUM_THREADS=1 python benchmarks/mammoth_speed.py PATH_OF_MAMMOTH --out er-cpu.json

Mammoth's step is ``Er.observe`` on a batch from a loader with its transforms for CIFAR-100; ``observe`` alone is given
beside it. Its requirements must be installed; modules that a step does not use may be missing. Ours is the step of the
loop, with the same augmentation. Both train our network in fp32.
"""

import argparse
import copy
import importlib.abc
import importlib.machinery
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from record import origin, spread, write
from throughput import random_images
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.runs.run import Run
from pycil_wsc.training import loop
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.phase import Monitor, PhaseRun

UNUSED = ("open_clip", "clip", "wandb", "pytorchcv", "datasets_hf", "ftfy", "deeplake", "gdown")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mammoth", type=Path, help="a clone of aimagelab/mammoth")
    parser.add_argument("--backbone", default="resnet32")
    parser.add_argument("--batch-size", type=int, default=32, help="of the stream, and of the replay")
    parser.add_argument("--memory", type=int, default=500)
    parser.add_argument("--steps", type=int, default=30, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out and args.out.resolve()  # Mammoth changes the folder
    torch.set_num_threads(args.threads)
    dataset = random_images(10, 200, 1, 32)
    ours = Ours(dataset, args)
    theirs = Mammoth(args.mammoth, dataset, copy.deepcopy(ours.network), args)
    for step in (ours, theirs):
        step.turn(args.memory // args.batch_size + 3)  # the memory is full
    seconds = {"ours": [], "mammoth": [], "mammoth_observe": []}
    for _ in range(args.turns):
        seconds["ours"].append(ours.turn(args.steps))
        whole, observed = theirs.turn(args.steps)
        seconds["mammoth"].append(whole)
        seconds["mammoth_observe"].append(observed)
    medians = {name: spread(values)["median"] for name, values in seconds.items()}
    record = {
        **origin(torch.device("cpu")),
        "backbone": args.backbone,
        "batch_size": args.batch_size,
        "memory": args.memory,
        "threads": args.threads,
        "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
        "mammoth_over_ours": medians["mammoth"] / medians["ours"],
        "mammoth_observe_over_ours": medians["mammoth_observe"] / medians["ours"],
    }
    write(record, out)
    print({name: round(value, 4) for name, value in medians.items()})
    print(f"Mammoth's step takes {record['mammoth_over_ours']:.2f} times as long as ours")


class Ours(Monitor):
    """Steps of the loop: a turn is an epoch of as many batches."""

    def __init__(self, dataset, args):
        keys = {"model_name": "er", "convnet_type": args.backbone, "memory_size": args.memory, "precision": "fp32"}
        keys |= {"batch_size": args.batch_size, "device": "cpu", "threads": args.threads, "init_cls": 100}
        self.run = Run(resolve(keys | {"init_epoch": 1, "init_milestones": [], "brightness": 0.0}), dataset)
        self.task = self.run.manager.tasks[0]
        grow_for(self.run.learner, self.task)
        memory = self.run.learner.memory
        assert isinstance(memory, StreamMemory)
        memory.limit(100)
        self.batch = args.batch_size
        self.network = self.run.learner.network

    def turn(self, steps):
        """Seconds per step."""
        learner = self.run.learner
        (phase,) = learner.phases(self.task)
        rows = np.random.default_rng(steps).permutation(self.task.train_indices)[: steps * self.batch]
        run = PhaseRun(replace(phase, indices=rows), 0, self.batch, by_step=False)
        start = time.perf_counter()
        loop.fit(learner, self.task, run, self)
        return (time.perf_counter() - start) / steps


class Mammoth:
    """Mammoth's ``Er`` on our network, fed by a loader with its transforms."""

    def __init__(self, path, dataset, network, args):
        sys.meta_path.append(Unused())
        sys.path.insert(0, str(path))
        from datasets.seq_cifar100 import SequentialCIFAR100
        from models.er import Er

        self.images = Images(dataset.train, SequentialCIFAR100.TRANSFORM)
        settings = {"optimizer": "sgd", "lr": 0.1, "optim_wd": 5e-4, "optim_mom": 0.9, "optim_nesterov": 0}
        settings |= {"buffer_size": args.memory, "minibatch_size": args.batch_size, "label_perc": 1, "device": "cpu"}
        whole = SimpleNamespace(
            N_CLASSES=100,
            N_TASKS=1,
            SETTING="class-il",
            N_CLASSES_PER_TASK=100,
            get_normalization_transform=SequentialCIFAR100.get_normalization_transform,
        )
        transform = transforms.Compose([transforms.ToPILImage(), SequentialCIFAR100.TRANSFORM])
        self.model = Er(network.train(), nn.CrossEntropyLoss(), Namespace(**settings), transform, whole)
        self.model.device = torch.device("cpu")
        self.batch = args.batch_size

    def turn(self, steps):
        """Seconds per step with the loader, and of ``observe`` alone."""
        loader = DataLoader(self.images, self.batch, shuffle=True, num_workers=0)
        observed = 0.0
        start = time.perf_counter()
        for _, (images, labels, not_augmented) in zip(range(steps), loader):
            began = time.perf_counter()
            self.model.observe(images, labels, not_augmented)
            observed += time.perf_counter() - began
        return (time.perf_counter() - start) / steps, observed / steps


class Images(torch.utils.data.Dataset):
    """(augmented image, label, image as it is), as Mammoth's data sets give them."""

    def __init__(self, split, transform):
        self.split = split
        self.transform = transform
        self.as_it_is = transforms.ToTensor()

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        image = Image.fromarray(self.split.images[index], mode="RGB")
        return self.transform(image), int(self.split.targets[index]), self.as_it_is(image)


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Missing modules that Mammoth imports, but a step of ER does not use, are empty."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in UNUSED else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


if __name__ == "__main__":
    main()
