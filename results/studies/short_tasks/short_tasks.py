"""Accuracy of WSC against Replay in a custom training loop, for tasks of few and of many epochs.

    OMP_NUM_THREADS=1 python results/studies/short_tasks/short_tasks.py \\
        --out results/studies/which_average/digits_validation.csv

scikit-learn's digits in five tasks of two classes, with a small multilayer perceptron that is trained further on each
task's images and five exemplars of each old class. All seeds of all methods train side by side as one stack of
networks; each has its own :class:`WeightSpaceConsolidation`. The test images are the same for every seed. The other
images are split by the seed into training and held-out images; defaults are chosen on the latter (``--tested-on
validation``). A row has the accuracies of all seeds: means over the tasks, of all classes seen so far.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation

CLASSES, TASKS, TRAIN, HELD_OUT, TEST = 10, 5, 100, 35, 39  # the last three: images of each class
EPOCHS = (2, 4, 8, 20, 50, 100)


@dataclass(frozen=True)
class Loop:
    """The settings of a training loop."""

    hidden: tuple[int, ...] = (128,)
    batch: int = 32
    rate: float = 0.1
    adam: bool = False
    cosine: bool = False
    memory: int = 5  # exemplars of each class

    def optimizer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(params, lr=self.rate, foreach=True)
        return torch.optim.SGD(params, lr=self.rate, momentum=0.9, foreach=True)

    def factor(self, done: float) -> float:
        """The factor of the learning rate after a share ``done`` of the task's steps."""
        return (1 + np.cos(np.pi * done)) / 2 if self.cosine else 1.0


LOOPS = {
    "sgd": Loop(),
    "narrow": Loop(hidden=(64,), batch=16),
    "deep": Loop(hidden=(64, 64)),
    "slow": Loop(hidden=(64,), batch=16, rate=0.01),
    "cosine": Loop(hidden=(64,), batch=16, cosine=True),
    "adam": Loop(hidden=(64,), batch=16, rate=1e-3, adam=True),
    "memory 20": Loop(memory=20),
}
Options = Any  # of a consolidation; None: plain Replay


def wsc(**options: object) -> Callable[[int, int], Options]:
    """Options for tasks of ``epochs`` epochs of ``length`` steps: a quarter is warm-up."""
    return lambda epochs, length: {"warmup_steps": max(1, epochs * length // 4), "reset": Blend()} | options


def by_epochs(every: int, **options: object) -> Callable[[int, int], Options]:
    """:func:`wsc` with a sample of the average every ``every`` epochs."""
    return lambda epochs, length: wsc(average=Average(every=every * length, **options))(epochs, length)  # type: ignore


def reset_from(steps: int, **options: object) -> Callable[[int, int], Options]:
    """:func:`wsc` without a reset if the warm-up has fewer than ``steps`` steps."""

    def chosen(epochs, length):
        given = wsc(**options)(epochs, length)
        return given if given["warmup_steps"] >= steps else given | {"reset": None}

    return chosen


def late(power: float, every: float = 0.04) -> Average:
    return Average(count="late", power=power, every=every)


METHODS: dict[str, Callable[[int, int], Options]] = {
    "replay": lambda epochs, length: None,
    "before": by_epochs(1, count="since_reset"),
    "letter": by_epochs(5, count="absolute", last=False),
    "before, no reset": lambda epochs, length: by_epochs(1, count="since_reset")(epochs, length) | {"reset": None},
    "no average": wsc(average=None),
    "mean": wsc(average=Average(count="since_reset", every=0.04)),
    "late 1": wsc(average=late(1)),
    "late 3": wsc(average=late(3)),
    "late 8": wsc(average=late(8)),
    "late 16": wsc(average=late(16)),
    "late 32": wsc(average=late(32)),
    "late 32, each step": wsc(average=late(32, every=1)),
    "late 32, no reset": wsc(average=late(32), reset=None),
    "late 32, reset from 32 steps": reset_from(32, average=late(32)),
    "default": lambda epochs, length: {"warmup_steps": max(1, epochs * length // 4)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if m != "default"])
    parser.add_argument("--epochs", nargs="+", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--tested-on", choices=("validation", "test"), default="validation")
    parser.add_argument("--out", type=Path, required=True, help="CSV file; rows are appended")
    args = parser.parse_args()
    torch.set_num_threads(1)
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(["loop", "tested on", "epochs", "method", *range(args.seeds)])
        for name in args.loops:
            for epochs in args.epochs:
                began = time.process_time()
                found = learn(LOOPS[name], args.methods, epochs, args.seeds, args.tested_on)
                for method, accuracies in zip(args.methods, found.tolist()):
                    table.writerow([name, args.tested_on, epochs, method, *(f"{value:.2f}" for value in accuracies)])
                file.flush()
                gains = ", ".join(f"{m} {g:+.1f}" for m, g in zip(args.methods, (found - found[0]).mean(1).tolist()))
                print(f"{name}, {epochs} epochs ({time.process_time() - began:.0f} s): {gains}", flush=True)


def learn(loop: Loop, methods: list[str], epochs: int, seeds: int, tested_on: str) -> Tensor:
    """[method, seed] accuracies: each the mean over the tasks."""
    digits: Any = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    training, held_out = (torch.stack(part) for part in zip(*(split(digits.target, seed) for seed in range(seeds))))
    rngs = [np.random.default_rng([seed, 1]) for seed in range(seeds)]
    exemplars = torch.stack(
        [torch.from_numpy(np.stack([rng.permutation(TRAIN)[: loop.memory] for _ in range(CLASSES)])) for rng in rngs]
    )
    tested = (held_out if tested_on == "validation" else test_images(digits.target).expand(seeds, -1, -1)).long()
    if tested_on == "test":  # in each seed's order of the classes
        orders = torch.stack([torch.from_numpy(class_order(seed)) for seed in range(seeds)])
        tested = torch.gather(tested, 1, orders[:, :, None].expand(-1, -1, TEST))
    networks, accuracies = Networks(loop, len(methods), seeds), []
    for task in range(TASKS):
        seen, chosen = 2 * (task + 1), [(training[:, label], label) for label in (2 * task, 2 * task + 1)]
        chosen += [(torch.gather(training[:, c], 1, exemplars[:, c]), c) for c in range(2 * task)]
        indices = torch.cat([index for index, _ in chosen], 1)
        labels = torch.cat([torch.full((index.shape[1],), label) for index, label in chosen])
        networks.train(
            images, indices, labels, [METHODS[m] if task else METHODS["replay"] for m in methods], epochs, rngs
        )
        now = tested[:, :seen]
        truth = torch.arange(seen).repeat_interleave(now.shape[2])
        with torch.no_grad():
            right = networks(images[now.flatten(1)]).argmax(-1) == truth
        accuracies.append(100 * right.float().mean(-1))
    return torch.stack(accuracies).mean(0)


class Networks:
    """A stack of networks, [method, seed, ...]; with the same seed, all methods start from the same weights."""

    def __init__(self, loop: Loop, methods: int, seeds: int):
        self.loop, self.shape = loop, (methods, seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        sizes = [64, *loop.hidden, CLASSES]
        self.layers: list[Tensor] = []
        for fan_in, fan_out in zip(sizes, sizes[1:]):
            for shape in ((fan_in, fan_out), (1, fan_out)):  # weight, bias, with torch's usual bound
                start = [(torch.rand(shape, generator=g) * 2 - 1) * fan_in**-0.5 for g in generators]
                self.layers.append(torch.stack(start).repeat(methods, 1, 1, 1).requires_grad_())

    def __call__(self, inputs: Tensor) -> Tensor:
        """[seed, batch, 64] -> logits [method, seed, batch, class]"""
        x = inputs[None]
        for number in range(0, len(self.layers), 2):
            x = torch.matmul(x.relu() if number else x, self.layers[number]) + self.layers[number + 1]
        return x

    def train(self, images, indices, labels, methods, epochs, rngs):
        batch, count = self.loop.batch, len(labels)
        length = -(-count // batch)
        optimizer = Stacked(self.layers, self.loop.optimizer(self.layers))
        consolidations = [
            WeightSpaceConsolidation(optimizer.of(number, seed), **options).attach(optimizer)
            for number, method in enumerate(methods)
            if (options := method(epochs, length))
            for seed in range(self.shape[1])
        ]
        for epoch in range(epochs):
            order = torch.stack([torch.from_numpy(rng.permutation(count)) for rng in rngs])
            for step in range(length):
                optimizer.inner.param_groups[0]["lr"] = self.loop.rate * self.loop.factor(
                    (epoch * length + step) / (epochs * length)
                )
                now = order[:, step * batch : (step + 1) * batch]
                logits = self(images[torch.gather(indices, 1, now)])
                targets = labels[now].expand(*self.shape, -1)
                loss = cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="sum") / now.shape[1]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for consolidation in consolidations:
            consolidation.finish()
            consolidation.detach()


class Stacked(torch.optim.Optimizer):
    """Steps all networks at once; each network's own part is a parameter with a gradient of its own."""

    def __init__(self, layers: list[Tensor], inner: torch.optim.Optimizer):
        self.inner, self.layers = inner, layers
        for layer in layers:
            layer.grad = torch.zeros_like(layer)
        methods, seeds = layers[0].shape[:2]
        self.parts = {(m, s): [part(layer, m, s) for layer in layers] for m in range(methods) for s in range(seeds)}
        super().__init__([p for each in self.parts.values() for p in each], {})

    def of(self, method: int, seed: int) -> list[tuple[str, Tensor]]:
        return [(str(number), p) for number, p in enumerate(self.parts[method, seed])]

    def zero_grad(self, set_to_none: bool = False) -> None:
        for layer in self.layers:
            assert layer.grad is not None
            layer.grad.zero_()  # in place: the gradients of the parts are views of it

    def step(self, closure=None):
        self.inner.step()


def part(layer: Tensor, method: int, seed: int) -> torch.nn.Parameter:
    view = torch.nn.Parameter(layer.data[method, seed])
    view.grad = layer.grad[method, seed]  # type: ignore[index]
    return view


def class_order(seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 0]).permutation(CLASSES)


def test_images(targets: np.ndarray) -> Tensor:
    """[class, image]: the last images of each class, the same for all seeds."""
    return torch.from_numpy(np.stack([np.flatnonzero(targets == c)[-TEST:] for c in range(CLASSES)]))


def split(targets: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """[class, image] to train on and held out; classes in the order in which they are learned."""
    rng, rows = np.random.default_rng([seed, 2]), []
    for label in class_order(seed):
        rows.append(rng.permutation(np.flatnonzero(targets == label)[:-TEST])[: TRAIN + HELD_OUT])
    both = torch.from_numpy(np.stack(rows))
    return both[:, :TRAIN], both[:, TRAIN:]


if __name__ == "__main__":
    main()
