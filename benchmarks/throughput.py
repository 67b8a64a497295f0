"""Images per second of the engine against the bare step and against a plain PyCIL-like loop, alternating in one process.

    python benchmarks/throughput.py --out results/throughput-cpu.json

* engine: Replay's own ``fit`` on CIFAR-shaped data, everything included that an epoch has: gathering, augmentation, meters;
* bare: forward, backward and step of the same network at the same precision on one batch that is always the same;
* plain: fp32, contiguous layout, PIL transforms in DataLoader workers that start again each epoch, loss read back each step.

The images are random: pixels do not change the speed. Medians and ranges over the repeats, and the ratios of the medians.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms

from pycil_wsc.config import resolve
from pycil_wsc.machine import commit, device_name, resolved_device
from utils import factory
from utils.data import Dataset, DatasetInfo, Split
from utils.data_manager import DataManager
from utils.inc_net import IncrementalNet
from utils.loader import open_source

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2560, help="images in an epoch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--workers", type=int, default=4, help="DataLoader workers of the plain loop (PyCIL's Replay has 4)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    config = resolve({"model_name": "replay", "device": args.device, "precision": args.precision, "init_epoch": 1})
    device = resolved_device(config.device)
    dataset = random_images(args.images)
    ways = {"engine": Engine(config, dataset, device), "plain": Plain(dataset, device, config, args.workers)}
    ways["bare"] = Bare(ways["engine"].learner, config, args.images)
    speeds = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):
        for name, way in ways.items():
            synchronise(device)
            start = time.perf_counter()
            way.epoch()
            synchronise(device)
            if repeat:  # the first round warms up
                speeds[name].append(args.images / (time.perf_counter() - start))
    record = {
        "images_per_second": {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in speeds.items()},
        "engine_over_bare": statistics.median(speeds["engine"]) / statistics.median(speeds["bare"]),
        "engine_over_plain": statistics.median(speeds["engine"]) / statistics.median(speeds["plain"]),
        "batch_size": config.batch_size,
        "precision": ways["engine"].learner.precision,
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
    }
    print(json.dumps(record, indent=2))
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


def random_images(count):
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count) % 10)
    classes = tuple(map(str, range(10)))
    info = DatasetInfo("random", classes, 32, MEAN, STD, crop="pad", padding=4, flip=True, brightness=63 / 255)
    return Dataset(info, split, split)


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Engine:
    """The learner's own loop over the first task."""

    def __init__(self, config, dataset, device):
        manager = DataManager(dataset, False, 0, 10, 10)
        source = open_source(dataset.info, dataset.train, device, 0)
        self.learner = factory.learners["replay"](config, manager, source, device)
        self.task = manager.tasks[0]
        self.learner.grow_for(self.task)
        self.phase = next(iter(self.learner.phases(self.task)))

    def epoch(self):
        self.learner.fit(self.task, 0, self.phase, 0, Silent())


class Silent:
    """A monitor that does nothing."""

    def phase_started(self, *_):
        pass

    step = epoch_ended = phase_started


class Bare:
    """Forward, backward, step and nothing else."""

    def __init__(self, learner, config, images):
        self.learner, self.steps = learner, images // config.batch_size
        self.optimizer = learner.sgd(learner.network.parameters(), config.init_weight_decay)
        shape = (config.batch_size, 3, 32, 32)
        self.images = torch.randn(shape, device=learner.device).contiguous(memory_format=torch.channels_last)
        self.targets = torch.arange(config.batch_size, device=learner.device) % 10

    def epoch(self):
        self.learner.train()
        for _ in range(self.steps):
            with self.learner.autocast():
                loss = cross_entropy(self.learner.network(self.images).float(), self.targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Plain:
    """What a loop looks like that nobody has tuned."""

    def __init__(self, dataset, device, config, workers):
        self.network = IncrementalNet("resnet32")
        self.network.grow(10)
        self.network.to(device)
        self.device = device
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        transform = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ColorJitter(63 / 255)]
        transform = transforms.Compose([*transform, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        self.loader = DataLoader(PilImages(dataset.train, transform), config.batch_size, shuffle=True, num_workers=workers)

    def epoch(self):
        self.network.train()
        total = correct = 0
        for images, targets in self.loader:
            images, targets = images.to(self.device), targets.to(self.device)
            logits = self.network(images)
            loss = cross_entropy(logits, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
            correct += (logits.argmax(1) == targets).sum().item()


class PilImages:
    def __init__(self, split, transform):
        self.split, self.transform = split, transform

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.split.images[index])), int(self.split.targets[index])


if __name__ == "__main__":
    main()
