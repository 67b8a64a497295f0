"""Images per second of the engine, of the bare training step and of a plain PyCIL-like loop, in one process.

    python benchmarks/throughput.py --out results/benchmarks/throughput/throughput-cpu.json
    python benchmarks/throughput.py --methods replay der foster memo --tasks 6
    python benchmarks/throughput.py --shape small --width 8 --batch-size 16
    python benchmarks/throughput.py --shape imagenet --images 512 --cache-images
    python benchmarks/throughput.py --compile reduce-overhead --side-by-side 8 --images 50000 --epochs 5

* engine: the learner's own ``fit``, with gathering, augmentation and meters; with ``--compile``, an epoch more, which
  compiles, is not counted;
* bare: forward, backward and step with the same losses and precision on one fixed batch, never compiled;
* plain: fp32, contiguous layout, PIL transforms in DataLoader workers that restart each epoch, losses read back each
  step;
* decode (ImageNet shape): the engine's batches without training;
* in turn (ImageNet shape): bare and decode one after the other, the upper bound where the same cores do both;
* side by side: several processes that train with the engine on one device at the same time, in total.

The floor is the time the step's operators need at the rates of a large matrix product and a large copy, also measured
here (``roofline.py``). For each method an epoch of every phase of its last task is timed. The images are random; pixel
values do not affect the speed. The record has medians and ranges over the repeats, and ratios of the medians. On the
CPU, freed memory is kept, as in a run; this speeds up all variants, including the plain loop.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from record import origin, spread, write
from roofline import Roofline, machine_rates, now
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms

from pycil_wsc import registry
from pycil_wsc.allocator import keep_freed_memory, return_freed_memory
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split, load_dataset
from pycil_wsc.data.images.map import decoded
from pycil_wsc.data.tasks.tasks import DataManager
from pycil_wsc.devices import peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.training import budget, loop
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.phase import Monitor, PhaseRun

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
CLASSES = 10  # per task
SIDES = {"cifar": 32, "small": 16}
OTHERS = {"fetril", "gdumb", "il2a", "pass", "ssre", "tagfex"}  # whose batches are more than images
OTHERS |= {"gem", "redo", "sam", "si"}  # whose steps are more than a loss and its gradient
METHODS = sorted({*registry.learners} - OTHERS)
BACKBONES = {"cifar": "resnet32", "small": "resnet8", "imagenet": "resnet18"}
COMPILE = {"false": False, "true": True, "reduce-overhead": "reduce-overhead"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["replay"], choices=METHODS)
    parser.add_argument("--tasks", type=int, default=1, help="number of tasks of ten classes; the last is timed")
    parser.add_argument("--side-by-side", type=int, metavar="N", help="also measure N processes training at once")
    add_options(parser)
    args = parser.parse_args()
    if args.tasks < 2 and "wsc" in args.methods:
        parser.error("--methods wsc: WSC begins with the second task; give --tasks 2")
    device = resolved_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        dataset = random_dataset(args, Path(folder))
        records = {}
        for name in args.methods:  # each is printed as soon as it is measured
            records[name] = compared(name, dataset, device, args)
            print(name, json.dumps(records[name]), flush=True)
        if args.side_by_side:
            for name in args.methods:
                total = records[name]["images_per_second"]["side_by_side"] = side_by_side(name, dataset, args)
                print(name, args.side_by_side, "side by side", json.dumps(total), flush=True)
    record = {"methods": records, "tasks": args.tasks, "side_by_side": args.side_by_side} | given(args) | origin(device)
    print(json.dumps(record, indent=2))
    write(record, args.out)


def add_options(parser):
    """Options shared with engine_ablation.py: data, device, duration."""
    parser.add_argument(
        "--shape",
        default="cifar",
        choices=("cifar", "small", "imagenet"),
        help="32x32 in memory and ResNet-32, 16x16 in memory and ResNet-8, or JPEG files and ResNet-18",
    )
    parser.add_argument("--images", type=int, default=2560, help="images in an epoch")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=16, help="channels of a CIFAR ResNet's first stage")
    parser.add_argument(
        "--cache-images", action="store_true", help="ImageNet shape: the engine crops images decoded before"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=1,
        help="engine epochs per measurement",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="false", choices=tuple(COMPILE), help="the engine's key of this name")
    parser.add_argument("--workers", type=int, default=4, help="decoding processes (4 in PyCIL's Replay)")
    parser.add_argument("--out", type=Path)


def given(args):
    """The options that are part of a record."""
    return {
        name: getattr(args, name)
        for name in ("shape", "images", "batch_size", "width", "cache_images", "epochs", "workers", "compile")
    }


def compared(name, dataset, device, args):
    """Measure all variants of one method, alternating; returns its record."""
    ours, plain = (last_task(name, dataset, args, precision) for precision in (args.precision, "fp32"))
    variants = {
        "engine": Engine(*ours, args.epochs),
        "plain": Plain(*plain, dataset.train, args.workers),
        "bare": Bare(*ours),
    }
    variants |= {"decode": Decode(*ours)} if args.shape == "imagenet" else {}
    speeds, peaks = {variant: [] for variant in variants}, {}
    for repeat in range(args.repeats + 1):
        for variant, timed in variants.items():
            if not repeat:  # the first round is warm-up, and measures memory
                reset_peak_memory(device)
            start = now(device)
            images = timed.epoch()
            seconds = now(device) - start - timed.uncounted
            if repeat:
                speeds[variant].append(images / seconds)
            else:
                peaks[variant] = peak_memory(device)
    medians = {variant: statistics.median(values) for variant, values in speeds.items()}
    record = {"images_per_second": {variant: spread(values) for variant, values in speeds.items()}}
    if "decode" in variants:
        medians["in_turn"] = 1 / (1 / medians["bare"] + 1 / medians["decode"])
    record |= {f"engine_over_{name}": medians["engine"] / each for name, each in medians.items() if name != "engine"}
    floor = Floor(*ours).record()
    record |= {"floor": floor, "engine_over_floor": medians["engine"] / floor["images_per_second"]}
    return record | {
        "peak_memory_bytes": peaks,
        "batch_size": ours[0].config.batch_size,
        "precision": ours[0].precision.name,
    }


def side_by_side(name, dataset, args):
    """Total images per second of several processes; they start each repeat together, and the slowest ends it."""
    context, number = multiprocessing.get_context("spawn"), args.side_by_side
    start, spans = context.Barrier(number), context.SimpleQueue()
    spawn(one_of_several, (name, dataset, args, max(1, os.cpu_count() // number), start, spans), number)
    received = [spans.get() for _ in range(number * args.repeats)]
    rounds = [[span for at, *span in received if at == repeat] for repeat in range(args.repeats)]
    speeds = [
        sum(images for _, _, images in spans) / (max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans))
        for spans in rounds
    ]
    return spread(speeds)


def one_of_several(_, name, dataset, args, threads, start, spans):
    torch.set_num_threads(threads)
    learner, task = last_task(name, dataset, args, args.precision)
    engine = Engine(learner, task, args.epochs)
    engine.epoch()  # warm-up
    for repeat in range(args.repeats):
        start.wait()
        begin, images = now(learner.device), engine.epoch()
        spans.put((repeat, begin + engine.uncounted, now(learner.device), images))


def last_task(name, dataset, args, precision):
    """A learner trained for one epoch on each task but the last and grown for the last one, and that task."""
    keys = {
        "model_name": name,
        "convnet_type": BACKBONES[args.shape],
        "precision": precision,
        "device": args.device,
        "batch_size": args.batch_size,
        "init_epoch": 1,
        "epochs": 1,
    }
    keys |= {"compile": COMPILE[args.compile]}
    keys |= {} if args.shape == "imagenet" else {"convnet_options.width": args.width}
    keys |= dict.fromkeys(registry.learners[name].Plan.epoch_keys, 1)
    config = resolve(
        keys | {"memory_per_class": args.images // (2 * CLASSES * max(1, args.tasks - 1)), "exemplars": "random"}
    )
    manager, device = DataManager(dataset, False, 0, CLASSES, CLASSES), resolved_device(args.device)
    keep_freed_memory(device)
    source = open_source(dataset.info, dataset.train, device, args.workers)
    learner = configured_learner(config)(config, manager, source, device)
    *before, task = manager.tasks
    for earlier in before:
        learner.learn(earlier, Monitor())
    grow_for(learner, task)
    learner.begin_task(task)
    return learner, task


def random_dataset(args, folder):
    """Random images of the shape ``args.shape``; JPEG files are written below ``folder``."""
    if args.shape == "imagenet":
        return random_files(args, folder)
    return random_images(args.tasks, per_class(args), side=SIDES[args.shape])


def random_images(tasks, train, test=1, side=32):
    """Images with CIFAR's augmentation, ``train`` and ``test`` of each class."""
    rng, splits = np.random.default_rng(0), []
    for count in (train, test):
        targets = np.repeat(np.arange(tasks * CLASSES), count)
        splits.append(Split(rng.integers(0, 256, (len(targets), side, side, 3), dtype=np.uint8), targets))
    classes = tuple(map(str, range(tasks * CLASSES)))
    return Dataset(
        DatasetInfo("random", classes, side, MEAN, STD, crop="pad", padding=side // 8, flip=True, brightness=63 / 255),
        *splits,
    )


def random_files(args, folder):
    """JPEG files of ImageNet's mean size, smooth so that they compress like photographs."""
    rng = np.random.default_rng(0)
    for part, count in (("train", per_class(args)), ("val", 1)):
        for label in range(args.tasks * CLASSES):
            (folder / part / f"{label:03}").mkdir(parents=True)
            for number in range(count):
                noise = Image.fromarray(rng.integers(0, 256, (94, 125, 3), dtype=np.uint8))
                noise.resize((500, 375), Image.Resampling.BICUBIC).save(
                    folder / part / f"{label:03}" / f"{number}.jpg", quality=90
                )
    dataset = load_dataset(f"folder:{folder}", ".")
    return decoded(dataset, folder, args.workers, on_device=False) if args.cache_images else dataset


def per_class(args):
    """Training images per class, so that the last task with its memory has ``args.images``, half of them new."""
    return args.images // (CLASSES * (2 if args.tasks > 1 else 1))


class Variant:
    """One way to train each phase of the task for an epoch."""

    epochs = 1
    uncounted = 0.0  # seconds of the last call that are no measurement

    def __init__(self, learner, task, *_):
        self.learner, self.task = learner, task

    def train(self, number, phase):
        """Train an epoch of the phase, the task's ``number``-th."""
        raise NotImplementedError

    def epoch(self):
        """Train all phases; returns the number of images."""
        images = 0
        for number, phase in enumerate(self.learner.phases(self.task)):
            self.train(number, phase)
            self.learner.end_phase(self.task, PhaseRun(phase, number, self.learner.config.batch_size, False))
            images += self.epochs * len(phase.indices)
        if not images:
            raise SystemExit(f"{self.learner.config.method}: does not train in this task; measure it with --tasks 1")
        return images


class Engine(Variant):
    """The learner's own loop, for ``epochs`` epochs."""

    def __init__(self, learner, task, epochs=1):
        super().__init__(learner, task)
        self.epochs = epochs

    def epoch(self):
        self.uncounted = 0.0
        return super().epoch()

    def train(self, number, phase):
        compiles = bool(self.learner.config.compile)
        run = budget.planned(self.learner, self.task, number, replace(phase, epochs=compiles + self.epochs))
        self.learner.begin_phase(self.task, run)
        loop.fit(self.learner, self.task, run, Compiling(self) if compiles else Monitor())


class Compiling(Monitor):
    """Does not count the first epoch of a phase, in which its loss is compiled."""

    def __init__(self, engine):
        self.engine, self.device = engine, engine.learner.device

    def phase_started(self, *_):
        self.start = now(self.device)

    def epoch_ended(self, task, run, epoch, *_):
        if epoch == 0:
            self.engine.uncounted += now(self.device) - self.start


class Bare(Variant):
    """Forward, backward, step and nothing else."""

    def train(self, number, phase):
        images, targets = self.batch(phase)
        steps, rest = divmod(len(phase.indices), len(images))
        for size in [len(images)] * steps + [rest] * (rest > 0):
            self.step(phase, images[:size], targets[:size])

    def batch(self, phase):
        learner, batch_size = self.learner, self.learner.config.batch_size
        side = learner.batches.source.info.image_size
        images = torch.randn((batch_size, 3, side, side), device=learner.device).contiguous(
            memory_format=torch.channels_last
        )
        learner.eval()
        phase.network.train()
        return images, torch.from_numpy(np.resize(learner.manager.train_targets[phase.indices], batch_size)).to(
            learner.device
        )

    def step(self, phase, images, targets):
        with self.learner.precision.autocast():
            loss, _ = phase.loss(as_batch(images, targets))
        loss.backward()
        phase.optimizer.step()
        phase.optimizer.zero_grad(set_to_none=True)


class Floor(Bare):
    """Time the bare step's operators need at the machine's rates."""

    def record(self):
        self.rates = machine_rates(self.learner.device, self.learner.precision.name)
        self.seconds = self.operations = self.bytes = 0
        images = self.epoch()
        floor = {
            "images_per_second": images / self.seconds,
            "operations_per_image": self.operations / images,
            "bytes_per_image": self.bytes / images,
        }
        return floor | dict(zip(("operations_per_second", "bytes_per_second"), self.rates))

    def train(self, number, phase):
        images, targets = self.batch(phase)
        self.step(phase, images, targets)  # creates the optimiser's state
        with Roofline(*self.rates) as roofline:
            self.step(phase, images, targets)
        steps = len(phase.indices) / len(images)
        self.seconds += steps * roofline.seconds
        self.operations += steps * roofline.operations
        self.bytes += steps * roofline.bytes


class Plain(Variant):
    """A training loop without optimisations."""

    def __init__(self, learner, task, split, workers):
        super().__init__(learner.to(memory_format=torch.contiguous_format), task)
        self.transform, self.split, self.workers = pil_transform(learner.batches.source.info, split), split, workers

    def train(self, number, phase):
        learner, total, correct = self.learner, 0, 0
        files = PilImages(self.split, phase.indices, learner.manager.train_targets, self.transform)
        loader = DataLoader(files, learner.config.batch_size, shuffle=True, num_workers=self.workers)
        learner.eval()
        phase.network.train()
        return_freed_memory()
        for images, targets in loader:
            images, targets = images.to(learner.device), targets.to(learner.device)
            loss, logits = phase.loss(as_batch(images, targets))
            phase.optimizer.zero_grad()
            loss.backward()
            phase.optimizer.step()
            total += loss.item()
            correct += (logits.argmax(1) == targets).sum().item()


def as_batch(images, targets):
    """A batch of the task's own images."""
    return Batch(images, targets, torch.zeros_like(targets), torch.zeros_like(targets, dtype=torch.bool))


def pil_transform(info, split):
    """PyCIL's training transform for CIFAR or ImageNet."""
    if split.in_memory:
        crop = [
            transforms.RandomCrop(info.image_size, padding=info.padding),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(63 / 255),
        ]
    else:
        crop = [transforms.RandomResizedCrop(info.image_size), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(info.mean, info.std)])


class PilImages(TorchDataset):
    """(transformed image, target) of each of ``indices``."""

    def __init__(self, split, indices, targets, transform):
        self.split, self.indices, self.targets, self.transform = split, indices, targets, transform

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, number):
        index = self.indices[number]
        image = (
            Image.fromarray(self.split.images[index])
            if self.split.in_memory
            else Image.open(self.split.images[index]).convert("RGB")
        )
        return self.transform(image), int(self.targets[index])


class Decode(Variant):
    """The batches without training."""

    def train(self, number, phase):
        for _ in self.learner.batches.of(phase, self.task.index, number, 0):
            pass


if __name__ == "__main__":
    main()
