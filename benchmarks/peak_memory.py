"""Peak memory of a training step besides the weights, by method and task.

    python benchmarks/peak_memory.py --out results/benchmarks/peak_memory/peak-memory-cpu.json

Each phase of each task is replaced by four steps on a batch of random CIFAR-shaped images. The peak includes the batch,
activations, gradients, the optimiser's state and, for WSC, the previous weights, the moments and the average. On the
CPU, the tensors that operators return are counted while they are alive; on a GPU, it is torch's peak minus the memory
allocated before training. The methods have PyCIL's hyperparameters; tasks have ten classes.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peak_bytes import PeakBytes
from record import origin, write
from throughput import CLASSES, Bare, random_images

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.tasks.tasks import DataManager
from pycil_wsc.devices import memory_in_use, peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.training.phase import Monitor
from pycil_wsc.training.precision import resolved_precision

STEPS = 4
METHODS = ["finetune", "replay", "icarl", "bic", "wa", "der", "foster", "memo", "wsc"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=sorted(registry.learners))
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, dataset = resolved_device(args.device), random_images(args.tasks, 2)
    peaks = {name: measured(name, dataset, device, args) for name in args.methods}
    record = {
        "peak_bytes": peaks,
        "batch_size": args.batch_size,
        "precision": resolved_precision(args.precision, device),
    }
    record |= origin(device)
    print("MiB by task".ljust(12) + "".join(f"{task:>7}" for task in range(1, args.tasks + 1)))
    for name, peak in peaks.items():
        print(name.ljust(12) + "".join(f"{value / 2**20:7.0f}" for value in peak))
    write(record, args.out)


def measured(name, dataset, device, args):
    """Peak bytes of each task, over its phases."""
    keys = {
        "model_name": name,
        "precision": args.precision,
        "device": args.device,
        "batch_size": args.batch_size,
        "memory_per_class": 1,
    }
    keys |= {"init_epoch": STEPS, "epochs": STEPS, "wsc.warmup": 0.5}  # an epoch is one batch
    config, manager = resolve(keys), DataManager(dataset, False, 0, CLASSES, CLASSES)
    learner, peaks = (
        configured_learner(config)(config, manager, open_source(dataset.info, dataset.train, device, 0), device),
        [],
    )
    for task in manager.tasks:
        steps = Steps(learner, task)
        learner.learn(task, steps)
        peaks.append(max(steps.peaks))
    return peaks


class Steps(Monitor):
    """Replaces each phase's epochs by a few steps; from the second on, the optimiser's state is allocated."""

    def __init__(self, learner, task):
        self.bare, self.device, self.peaks = Bare(learner, task), learner.device, []

    def task_started(self, task):
        """Counting starts here, since some methods keep the previous weights."""
        if self.device.type != "cpu":
            one = torch.ones(1, 1, device=self.device, requires_grad=True)
            torch.mm(one, one).backward()  # the first product of each thread allocates the library's workspace
            del one
            self.before = memory_in_use(self.device)
            reset_peak_memory(self.device)
        else:
            self.counter = PeakBytes()
            self.counter.__enter__()

    def phase_started(self, task, run):
        phase = run.phase
        batch = self.bare.batch(phase)
        for _ in range(STEPS):
            self.bare.step(phase, *batch)
        self.peaks.append(peak_memory(self.device) - self.before if self.device.type != "cpu" else self.counter.peak)
        run.end_after(0)

    def task_trained(self, task):
        if self.device.type == "cpu":
            self.counter.__exit__(None, None, None)


if __name__ == "__main__":
    main()
