"""What each part of the engine is worth: images per second of the whole, and of the whole with one part undone.

    python benchmarks/undone.py --out results/undone-cpu.json
    python benchmarks/undone.py --shape imagenet --images 512 --parts whole memory --out results/undone-imagenet-cpu.json

Each way is a process of its own that trains an epoch (or as many as asked for) to warm up and again for the clock; the ways take turns, as often as asked for. Medians
and ranges, and the medians over that of the whole.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import throughput
import torch
from record import origin, spread, write
from roofline import now
from torch import multiprocessing
from torch.utils.data import DataLoader

from pycil_wsc import registry
from pycil_wsc.engine.environment import resolved_device


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--method", default="replay", choices=sorted(registry.learners))
    throughput.add_options(parser)
    args = parser.parse_args()
    args.tasks, speeds = 1, {part: [] for part in args.parts}
    with tempfile.TemporaryDirectory() as folder:
        dataset = throughput.random_dataset(args, Path(folder))
        told = multiprocessing.get_context("spawn").SimpleQueue()
        for _ in range(args.repeats):
            for part in args.parts:
                multiprocessing.spawn(in_its_process, (part, dataset, args, multiprocessing.get_start_method(), told))
                speeds[part].append(told.get())
    parts = {part: {"undone": WAYS[part].__doc__} | spread(values) for part, values in speeds.items()}
    for record in parts.values():
        record["over_whole"] = record["median"] / parts["whole"]["median"] if "whole" in parts else None
    record = (
        {"images_per_second": parts, "method": args.method}
        | throughput.given(args)
        | origin(resolved_device(args.device))
    )
    print(json.dumps(record, indent=2))
    write(record, args.out)


def in_its_process(_, part, dataset, args, start_method, told):
    multiprocessing.set_start_method(
        start_method, force=True
    )  # of workers that load images, as in the process that started this one
    way = WAYS[part]()
    way.before(args)
    learner, task = throughput.last_task(args.method, dataset, args, args.precision)
    way.after(learner, dataset.train, args)
    engine = throughput.Engine(learner, task, args.epochs)
    engine.epoch()
    start = now(learner.device)
    images = engine.epoch()
    told.put(images / (now(learner.device) - start))


class Whole:
    """nothing"""

    def before(self, args):
        """Before the learner is made."""

    def after(self, learner, split, args):
        """When it has learned all tasks but the one that is timed."""


class Memory(Whole):
    """keeping freed memory: the C library does what it does by itself"""

    def before(self, args):
        throughput.keep_freed_memory = lambda device: None


class Precision(Whole):
    """bf16: fp32"""

    def before(self, args):
        args.precision = "fp32"


class Layout(Whole):
    """channels-last: channels before rows and columns"""

    def after(self, learner, split, args):
        batches = learner.training_batches
        learner.to(memory_format=torch.contiguous_format)
        learner.training_batches = lambda *address: (
            (images.contiguous(), targets) for images, targets in batches(*address)
        )


class Augmentation(Whole):
    """batched augmentation: PIL's, image by image, in workers that start again each epoch"""

    def after(self, learner, split, args):
        transform = throughput.pil_transform(learner.train_source.info, split)

        def batches(indices, *_):
            images = throughput.PilImages(split, indices, learner.manager.train_targets, transform)
            for images, targets in DataLoader(
                images, learner.config.batch_size, shuffle=True, num_workers=args.workers
            ):
                yield images.to(learner.device, memory_format=torch.channels_last), targets.to(learner.device)

        learner.training_batches = batches


class Optimizer(Whole):
    """the fused optimiser: SGD tensor by tensor"""

    def after(self, learner, split, args):
        def sgd(parameters, weight_decay):
            return torch.optim.SGD(
                parameters, lr=0.0, momentum=learner.config.momentum, weight_decay=weight_decay, foreach=False
            )

        learner.sgd = sgd


class Waiting(Whole):
    """never waiting for the device: loss and count are read back each step"""

    def after(self, learner, split, args):
        whole = learner.passes

        def passes(phase):
            inner = whole(phase)

            class ReadBack:
                clear = inner.clear

                def __call__(self, images, targets):
                    return tuple(torch.tensor(value.item()) for value in inner(images, targets))

            return ReadBack()

        learner.passes = passes


WAYS = {way.__name__.lower(): way for way in (Whole, Memory, Precision, Layout, Augmentation, Optimizer, Waiting)}


if __name__ == "__main__":
    main()
