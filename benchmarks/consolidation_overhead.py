"""What a step and the memory cost with the consolidation, against the same loop without it, in one process.

    python benchmarks/consolidation_overhead.py --out results/consolidation-overhead-cpu.json

Per optimiser, the same network on the same batch with and without: every step of the one is timed beside the same step of the other, so
that a load on the machine meets both. Ratios are medians over the steps of all repeats: in the warm-up, and after it; the whole task
has the reset, the averaging and ``finish()`` too. Memory is the most that all tensors take at any time of a task (on the CPU counted by
storage, on a GPU by the allocator), and what is held beside that without, in copies of the trainable weights.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycil_wsc.consolidation import WeightSpaceConsolidation
from pycil_wsc.trainer import commit, device_name, resolved_device
from utils.inc_net import IncrementalNet

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
WAYS = {"sgd, own moments": ("sgd", "own"), "adamw, own moments": ("adamw", "own"), "adamw, its moments": ("adamw", "optimizer")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet32")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40, help="steps of a task; a quarter is warm-up, and ten samples are averaged")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolved_device(args.device)
    batch = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device), torch.arange(args.batch_size, device=device) % 100
    weights = sum(p.nbytes for p in network(args, device).parameters())
    record = {"ways": {}}
    for name, (optimizer, moments) in WAYS.items():
        result = timed(args, device, batch, optimizer, moments)
        without, with_it = (peak(args, device, batch, optimizer, each) for each in (None, moments))
        record["ways"][name] = result | {"peak_bytes": with_it, "peak_over_without": with_it / without, "extra_copies": (with_it - without) / weights}
        print(name, json.dumps(record["ways"][name]))
    record |= {"backbone": args.backbone, "batch_size": args.batch_size, "image_size": args.image_size, "steps": args.steps, "repeats": args.repeats,
               "weight_bytes": weights, "device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


def network(args, device):
    torch.manual_seed(0)
    net = IncrementalNet(args.backbone)
    net.grow(100)
    return net.to(device)


class Task:
    """One task's loop; ``moments`` None: without the consolidation."""

    def __init__(self, args, device, batch, optimizer, moments):
        self.net, self.batch = network(args, device), batch
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        schedule = {"warmup_steps": args.steps // 4, "average_every": max(1, (args.steps - args.steps // 4) // 10)}
        self.wsc = WeightSpaceConsolidation(self.net.named_parameters(), moments=moments, **schedule).attach(self.optimizer) if moments else None

    def step(self):
        images, targets = self.batch
        cross_entropy(self.net(images), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self):
        if self.wsc:
            self.wsc.finish()


def timed(args, device, batch, optimizer, moments):
    """Ratios of step times, and the seconds of the step that resets and of ``finish`` beyond those of a step without."""
    warmup, after, whole, reset, finish = [], [], [], [], []
    for repeat in range(args.repeats + 1):  # the first warms up
        plain, task = Task(args, device, batch, optimizer, None), Task(args, device, batch, optimizer, moments)
        times = [(seconds(plain.step, device), seconds(task.step, device)) for _ in range(args.steps)]
        end = seconds(task.finish, device)
        if repeat == 0:
            continue
        at = args.steps // 4 - 1
        warmup += [b / a for a, b in times[1:at]]
        after += [b / a for a, b in times[at + 1 :]]
        whole.append((sum(b for _, b in times[1:]) + end) / sum(a for a, _ in times[1:]))
        reset.append(times[at][1] - times[at][0])
        finish.append(end)
    return {
        "warmup_step_ratio": statistics.median(warmup),
        "later_step_ratio": statistics.median(after),
        "task_ratio": statistics.median(whole),
        "reset_seconds": statistics.median(reset),
        "finish_seconds": statistics.median(finish),
    }


def seconds(function, device):
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak(args, device, batch, optimizer, moments):
    """The most bytes that tensors take in a task of eight steps, the batch aside."""
    args = argparse.Namespace(**vars(args) | {"steps": 8})
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        whole_task(args, device, batch, optimizer, moments)
        return torch.cuda.max_memory_allocated() - before
    with PeakBytes() as counted:
        whole_task(args, device, batch, optimizer, moments)
    return counted.peak


def whole_task(args, device, batch, optimizer, moments):
    task = Task(args, device, batch, optimizer, moments)
    for _ in range(args.steps):
        task.step()
    task.finish()


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operators return for as long as they live."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


if __name__ == "__main__":
    main()
