"""Images per second of one run in several processes (gloo, one thread each), and in one process with several threads.

    python benchmarks/scaling.py --out results/benchmarks/scaling/scaling-cpu.json
    python benchmarks/scaling.py --shapes cifar --processes 1 2 --threads 2 --steps 2

Each process trains Replay's first task on its part of one fixed batch of random images. *alone* is the same step
without the other processes: no gradients are summed and batch norm sees the part. The rest of a step is communication,
and waiting for the slowest. *Over perfect* is the speed over that of one process times their number, which more
processes than cores cannot reach. Also counted is what a process sends in a step.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from record import origin, write
from roofline import now
from torch import distributed, multiprocessing

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split
from pycil_wsc.data.tasks.tasks import DataManager
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.processes import SINGLE_PROCESS, Processes
from pycil_wsc.training.step import backward

SHAPES = {"cifar": ("resnet32", 32), "imagenet": ("resnet18", 224)}
SIZES = {"cifar": {"batch_size": 128, "steps": 12}, "imagenet": {"batch_size": 32, "steps": 3}}
CLASSES, WARM_UP = 10, 2
CPU = torch.device("cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="beside one")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4], help="of one process, beside one")
    parser.add_argument("--batch-size", type=int, help="of all processes together, for each shape")
    parser.add_argument("--steps", type=int, help="that are timed, for each shape")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    given = {name: value for name in ("batch_size", "steps") if (value := getattr(args, name))}
    record: dict[str, Any] = {
        "shapes": {},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    for shape in args.shapes:
        sizes = SIZES[shape] | given
        job = argparse.Namespace(shape=shape, precision=args.precision, **sizes)
        one = in_processes(1, 1, job)
        measured = {"processes": {count: in_processes(count, 1, job) for count in args.processes}}
        measured["threads"] = {threads: in_processes(1, threads, job) for threads in args.threads}
        for kind in measured.values():
            for count, result in kind.items():
                result["over_perfect"] = result["images_per_second"] / (count * one["images_per_second"])
        record["shapes"][shape] = sizes | {"one": one} | measured
        print(shape, json.dumps(record["shapes"][shape], indent=2), flush=True)
    write(record | origin(CPU), args.out)


def in_processes(count, threads, args):
    """What ``count`` processes of ``threads`` threads measure."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # a fork need not import torch again
        start_method = "fork" if sys.platform == "linux" else "spawn"
        multiprocessing.start_processes(work, (count, threads, port, folder, args), count, start_method=start_method)
        results = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    step, alone = (max(result[name] for result in results) for name in ("step", "alone"))
    counted = {name: results[0][name] for name in ("gradient_bytes", "messages", "message_bytes", "precision")}
    return {
        "images_per_second": args.batch_size / step,
        "step_seconds": step,
        "alone_seconds": alone,
        "communication": max(0.0, 1 - alone / step),
    } | counted


def work(rank, count, threads, port, folder, args):
    """One process: the median seconds of a step, together and alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "scaling"}
    torch.set_num_threads(threads)
    processes = Processes() if count > 1 else SINGLE_PROCESS
    learner, phase, batch = prepared(*SHAPES[args.shape], args.batch_size, processes, precision=args.precision)
    passes, counts = backward.passes(learner, phase, phase.loss), {"messages": 0, "message_bytes": 0}

    def counted(tensor, *arguments, **keys):
        counts["messages"] += 1
        counts["message_bytes"] += tensor.nbytes
        return all_reduce(tensor, *arguments, **keys)

    all_reduce = distributed.all_reduce
    together = seconds(passes, phase, batch, args.steps)
    with patch.object(distributed, "all_reduce", counted):
        passes(batch)
    learner.processes = SINGLE_PROCESS
    alone = seconds(backward.passes(learner, phase, phase.loss), phase, batch, args.steps) if count > 1 else together
    gradients = sum(
        p.grad.nbytes for group in phase.optimizer.param_groups for p in group["params"] if p.grad is not None
    )
    result = {
        "step": together,
        "alone": alone,
        "gradient_bytes": gradients,
        "precision": learner.precision.name,
    } | counts
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def prepared(backbone, side, batch_size, processes: Any = SINGLE_PROCESS, device=CPU, **keys):
    """A learner before its first task, the phase, and this process's part of a batch."""
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 256, (batch_size, side, side, 3), np.uint8), np.arange(batch_size) % CLASSES)
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    names = tuple(map(str, range(CLASSES)))
    info = DatasetInfo("random", names, side, mean, std, crop="pad", padding=4, flip=True, brightness=0.0)
    manager = DataManager(Dataset(info, split, split), False, 0, CLASSES, CLASSES)
    keys |= {"model_name": "replay", "convnet_type": backbone, "batch_size": batch_size, "device": str(device)}
    config = resolve(keys)
    source = open_source(info, split, device, 0)
    learner = configured_learner(config)(config, manager, source, device, processes)
    task = manager.tasks[0]
    grow_for(learner, task)
    learner.begin_task(task)
    phase = next(iter(learner.phases(task)))
    learner.eval()
    phase.network.train()
    return learner, phase, next(iter(learner.batches.of(phase, 0, 0, 0)))


def seconds(passes, phase, batch, steps, device=CPU):
    """Median seconds of a step."""
    times = []
    for _ in range(WARM_UP + steps):
        start = now(device)
        passes(batch)
        phase.optimizer.step()
        times.append(now(device) - start)
        if len(times) < WARM_UP + steps:
            passes.clear()
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
