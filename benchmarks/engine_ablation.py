"""Ablation of the engine: images per second of the full engine, and with one of its optimisations removed.

    python benchmarks/engine_ablation.py --out results/benchmarks/engine_ablation/engine-ablation-cpu.json
    python benchmarks/engine_ablation.py --shape imagenet --images 512 --parts whole memory

Each variant runs in a process of its own: ``--epochs`` epochs of warm-up, then as many that are timed. The variants
alternate, ``--repeats`` times. The record has medians, ranges, and each median relative to that of the full engine.
"""

import argparse
import dataclasses
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
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from pycil_wsc import registry
from pycil_wsc.devices import resolved_device
from pycil_wsc.training.step import backward


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--method", default="replay", choices=sorted(registry.learners))
    throughput.add_options(parser)
    args = parser.parse_args()
    args.tasks, speeds = 1, {part: [] for part in args.parts}
    with tempfile.TemporaryDirectory() as folder:
        dataset = throughput.random_dataset(args, Path(folder))
        results = multiprocessing.get_context("spawn").SimpleQueue()
        for _ in range(args.repeats):
            for part in args.parts:
                start_method = multiprocessing.get_start_method()
                spawn(measure, (part, dataset, args, start_method, results))
                speeds[part].append(results.get())
    spreads = {part: spread(values) for part, values in speeds.items()}
    whole = spreads["whole"]["median"] if "whole" in spreads else None
    parts = {
        part: {"removed": VARIANTS[part].__doc__, **each, "over_whole": each["median"] / whole if whole else None}
        for part, each in spreads.items()
    }
    record = (
        {"images_per_second": parts, "method": args.method}
        | throughput.given(args)
        | origin(resolved_device(args.device))
    )
    print(json.dumps(record, indent=2))
    write(record, args.out)


def measure(_, part, dataset, args, start_method, results):
    """In a process of its own: put the images per second of one variant into ``results``."""
    multiprocessing.set_start_method(start_method, force=True)  # of data workers, as in the parent process
    variant = VARIANTS[part]()
    variant.before(args)
    learner, task = throughput.last_task(args.method, dataset, args, args.precision)
    variant.after(learner, dataset.train, args)
    engine = throughput.Engine(learner, task, args.epochs)
    engine.epoch()
    start = now(learner.device)
    images = engine.epoch()
    results.put(images / (now(learner.device) - start - engine.uncounted))


class Whole:
    """nothing"""

    def before(self, args):
        """Called before the learner is created."""

    def after(self, learner, split, args):
        """Called when it has learned all tasks but the timed one."""


class Memory(Whole):
    """keeping freed memory: the C library's default"""

    def before(self, args):
        throughput.keep_freed_memory = lambda device: None


class Precision(Whole):
    """bf16: fp32"""

    def before(self, args):
        args.precision = "fp32"


class Layout(Whole):
    """channels-last: contiguous layout"""

    def after(self, learner, split, args):
        batches = learner.batches.of
        learner.to(memory_format=torch.contiguous_format)
        learner.batches.of = lambda *address: (
            dataclasses.replace(batch, images=batch.images.contiguous()) for batch in batches(*address)
        )


class Augmentation(Whole):
    """batched augmentation: PIL transforms, image by image, in workers that restart each epoch"""

    def after(self, learner, split, args):
        transform = throughput.pil_transform(learner.batches.source.info, split)

        def batches(samples, *_):
            files = throughput.PilImages(split, samples.indices, learner.manager.train_targets, transform)
            loader = DataLoader(files, learner.config.batch_size, shuffle=True, num_workers=args.workers)
            for images, targets in loader:
                images = images.to(learner.device, memory_format=torch.channels_last)
                yield throughput.as_batch(images, targets.to(learner.device))

        learner.batches.of = batches


class Optimizer(Whole):
    """fused optimiser: SGD tensor by tensor"""

    def after(self, learner, split, args):
        def sgd(parameters, weight_decay):
            return torch.optim.SGD(
                parameters, lr=0.0, momentum=learner.config.momentum, weight_decay=weight_decay, foreach=False
            )

        learner._optimizer = sgd


class Waiting(Whole):
    """no device synchronisation: loss and count are read back each step"""

    def after(self, learner, split, args):
        whole = backward.passes

        def passes(*arguments):
            inner = whole(*arguments)

            class ReadBack:
                clear = inner.clear

                def __call__(self, batch):
                    return tuple(torch.tensor(value.item()) for value in inner(batch))

            return ReadBack()

        backward.passes = passes


PARTS = (Whole, Memory, Precision, Layout, Augmentation, Optimizer, Waiting)
VARIANTS = {part.__name__.lower(): part for part in PARTS}


if __name__ == "__main__":
    main()
