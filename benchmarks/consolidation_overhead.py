"""Time and memory of a training step with the consolidation, relative to the same loop without it, in one process.

    python benchmarks/consolidation_overhead.py \\
        --out results/benchmarks/consolidation_overhead/consolidation-overhead-cpu.json

For each optimiser, two copies of a network train on the same batch, one with the consolidation and one without, in
alternating steps. The optimiser's step, which contains all of the consolidation, is timed separately. The forward and
backward passes are the same in both loops; their median over both is used. On the CPU, times are process CPU seconds,
which other work on the machine hardly affects. Memory is the peak over a task, counted by storage on the CPU and by
the allocator on a GPU. The peak above that of the loop without the consolidation is given in copies of the weights.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peak_bytes import PeakBytes
from record import origin, write
from torch.nn.functional import cross_entropy

from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation, moment_score
from pycil_wsc.devices import memory_in_use, peak_memory, reset_peak_memory, resolved_device, synchronize
from pycil_wsc.networks.nets import IncrementalNet, make_backbone

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
WAYS = {
    "sgd, own moments": ("sgd", "own"),
    "adamw, own moments": ("adamw", "own"),
    "adamw, its moments": ("adamw", "optimizer"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet32")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of a task; a quarter is warm-up, ten samples are averaged"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.steps < 12:
        parser.error("--steps: at least 12 are needed to time steps before and after the reset")
    device = resolved_device(args.device)
    batch = (
        torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device),
        torch.arange(args.batch_size, device=device) % 100,
    )
    weights = sum(p.nbytes for p in network(args, device).parameters())
    record = {"ways": {}}
    for name, (optimizer, moments) in WAYS.items():
        result = timed(args, device, batch, optimizer, moments)
        without, with_it = (peak(args, device, batch, optimizer, each) for each in (None, moments))
        record["ways"][name] = result | {
            "peak_bytes": with_it,
            "peak_over_without": with_it / without,
            "extra_copies": (with_it - without) / weights,
        }
        print(name, json.dumps(record["ways"][name]))
    record |= {name: getattr(args, name) for name in ("backbone", "batch_size", "image_size", "steps", "repeats")}
    record |= {"weight_bytes": weights} | origin(device)
    write(record, args.out)


def network(args, device):
    torch.manual_seed(0)
    net = IncrementalNet(make_backbone(args.backbone))
    net.grow(100)
    return net.to(device)


class Task:
    """The loop of one task; without the consolidation if ``moments`` is None."""

    def __init__(self, args, device, batch, optimizer, moments):
        self.net, self.batch = network(args, device), batch
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.wsc = None
        if moments:
            warmup = args.steps // 4
            average = Average(every=max(1, (args.steps - warmup) // 10))
            self.wsc = WeightSpaceConsolidation(
                self.net.named_parameters(),
                warmup_steps=warmup,
                importance=moment_score(source=moments),
                reset=Blend(),
                average=average,
            ).attach(self.optimizer)

    def step(self):
        """One step; returns the seconds of the forward and backward pass and those of the optimiser's step."""
        images, targets = self.batch
        start = now(images.device)
        cross_entropy(self.net(images), targets).backward()
        between = now(images.device)
        self.optimizer.step()
        end = now(images.device)
        self.optimizer.zero_grad(set_to_none=True)
        return between - start, end - between

    def finish(self):
        if self.wsc:
            self.wsc.finish()
            self.wsc.detach()  # optimiser and consolidation hold each other, and the weights


def timed(args, device, batch, optimizer, moments):
    """Ratios of step times with and without the consolidation: in the warm-up, after it, and over the whole task."""
    passes, plain_steps, warmup, reset, later, finish = [], [], [], [], [], []
    for repeat in range(args.repeats + 1):  # the first warms up
        plain, task = Task(args, device, batch, optimizer, None), Task(args, device, batch, optimizer, moments)
        times = [(*plain.step(), *task.step()) for _ in range(args.steps)]
        start = now(device)
        task.finish()
        end = now(device)
        if repeat == 0:
            continue
        at = args.steps // 4 - 1
        passes += [seconds for first, _, second, _ in times for seconds in (first, second)]
        plain_steps += [seconds for _, seconds, _, _ in times[1:]]
        steps = [seconds for *_, seconds in times]
        warmup, later = warmup + steps[1:at], later + steps[at + 1 :]
        reset.append(steps[at])
        finish.append(end - start)
    base = statistics.median(passes) + statistics.median(plain_steps)

    def ratio(seconds):
        return (statistics.median(passes) + seconds) / base

    in_warmup, after = ratio(statistics.median(warmup)), ratio(statistics.mean(later))
    extra, share = statistics.median(reset) - statistics.median(plain_steps), args.steps // 4 / args.steps
    once = (extra + statistics.median(finish)) / base / args.steps
    return {
        "warmup_step_ratio": in_warmup,
        "later_step_ratio": after,
        "task_ratio": share * in_warmup + (1 - share) * after + once,
        "step_seconds": base,
        "reset_seconds": extra,
        "finish_seconds": statistics.median(finish),
    }


def now(device):
    if device.type == "cpu":
        return time.process_time()
    synchronize(device)
    return time.perf_counter()


def peak(args, device, batch, optimizer, moments):
    """Peak bytes of all tensors in a task of eight steps, without the batch."""
    args = argparse.Namespace(**vars(args) | {"steps": 8})
    if device.type != "cpu":
        synchronize(device)
        reset_peak_memory(device)
        before = memory_in_use(device)
        whole_task(args, device, batch, optimizer, moments)
        return peak_memory(device) - before
    with PeakBytes() as counted:
        whole_task(args, device, batch, optimizer, moments)
    return counted.peak


def whole_task(args, device, batch, optimizer, moments):
    task = Task(args, device, batch, optimizer, moments)
    for _ in range(args.steps):
        task.step()
    task.finish()


if __name__ == "__main__":
    main()
