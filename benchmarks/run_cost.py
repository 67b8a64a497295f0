"""Breakdown of a task's time: training, end of training, exemplar selection, tests, checkpoints; methods compared.

    python benchmarks/run_cost.py --methods replay wsc --out results/benchmarks/run_cost/run-cost-cpu.json
    python benchmarks/run_cost.py --shape small --width 8 --batch-size 16 --increment 5 --tasks 10 --images 25

Whole runs on random CIFAR-shaped images (100 test images per class). The methods alternate, ``--repeats`` times. Each
part is the time spent in its functions in the tasks after the first; "overhead" is everything but training.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import spread, write
from roofline import now
from throughput import BACKBONES, CLASSES, SIDES, random_images

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.reproducibility import commit
from pycil_wsc.runs.run import Run
from pycil_wsc.training import loop

TEST = 100  # test images per class


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["replay", "wsc"], choices=sorted(registry.learners))
    parser.add_argument("--shape", default="cifar", choices=("cifar", "small"), help="as in throughput.py")
    parser.add_argument("--width", type=int, default=16, help="channels of the ResNet's first stage")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--increment", type=int, default=10, help="classes per task")
    parser.add_argument("--epochs", type=int, default=8, help="of each task after the first, which has one")
    parser.add_argument("--images", type=int, default=500, help="training images per class")
    parser.add_argument("--memory", type=int, default=20, help="exemplars per class")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tens = -(-args.tasks * args.increment // CLASSES)
    dataset = random_images(tens, args.images, TEST, SIDES[args.shape])
    timings = {name: [] for name in args.methods}
    for _ in range(args.repeats):
        for name in args.methods:
            result, *measured = timed_run(name, dataset, args)
            timings[name].append(measured)
    methods = {name: summary(*zip(*measured)) for name, measured in timings.items()}
    first = methods[args.methods[0]]["seconds"]["task"]["median"]
    for record in methods.values():
        record[f"over_{args.methods[0]}"] = record["seconds"]["task"]["median"] / first
    record = {
        "methods": methods,
        "shape": args.shape,
        "width": args.width,
        "batch_size": args.batch_size,
        "tasks": args.tasks,
        "increment": args.increment,
        "epochs": args.epochs,
        "images_per_class": args.images,
        "memory_per_class": args.memory,
    }
    record |= {
        "device": result["device"],
        "precision": result["precision"],
        "torch": result["torch"],
        "commit": commit(),
    }
    print(json.dumps(record, indent=2))
    write(record, args.out)


def timed_run(name, dataset, args):
    """Result of a whole run, the seconds of each part per task, and the images per second of training and of it all."""
    keys = {
        "model_name": name,
        "device": args.device,
        "precision": args.precision,
        "memory_per_class": args.memory,
        "convnet_type": BACKBONES[args.shape],
        "convnet_options.width": args.width,
        "batch_size": args.batch_size,
        "init_cls": args.increment,
        "increment": args.increment,
        "max_tasks": args.tasks,
        "init_epoch": 1,
        "epochs": args.epochs,
        "wsc.average_every": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            resolve(keys | {"out": folder, "cache_first_task": False}), dataset, on_progress=lambda progress: None
        )
        seconds = defaultdict(float)
        learner, whole = run.learner, run.learner.learn
        for part, owner, function in (
            ("end of training", learner, "end_task"),
            ("exemplars", learner.memory, "update"),
            ("test", run.evaluator, "test"),
            ("checkpoints", run, "_checkpoint"),
        ):
            setattr(owner, function, clocked(getattr(owner, function), seconds, part, learner.device))

        def learn(task, *arguments, **named):
            if task.index == 1:  # the first task is not measured
                seconds.clear()
                seconds["start"] = now(learner.device)
            return whole(task, *arguments, **named)

        fit = clocked(loop.fit, seconds, "training", learner.device)

        def without_checkpoints(*arguments, **named):
            before = seconds["checkpoints"]
            try:
                return fit(*arguments, **named)
            finally:
                seconds["training"] -= seconds["checkpoints"] - before

        learner.learn = learn
        with patch.object(loop, "fit", without_checkpoints):
            result = run.execute()
        seconds["task"] = now(learner.device) - seconds.pop("start")
        images = result["images_trained"] - run.journal.history[0]["images_trained"]
    seconds["overhead"] = seconds["task"] - seconds["training"]
    parts = {part: value / (args.tasks - 1) for part, value in seconds.items()}
    speed = {"training": images / seconds["training"], "task": images / seconds["task"]}
    return result, parts, speed


def clocked(function, seconds, part, device):
    def timed(*arguments, **named):
        start = now(device)
        try:
            return function(*arguments, **named)
        finally:
            seconds[part] += now(device) - start

    return timed


def summary(parts, speeds):
    """Medians and ranges of the seconds per task, of the overhead's share, and of the images per second."""
    seconds = {part: [each[part] for each in parts] for part in parts[0]}
    shares = [each["overhead"] / each["task"] for each in parts]
    record = {part: spread(values) for part, values in seconds.items()}
    speed = {part: spread([each[part] for each in speeds]) for part in speeds[0]}
    return {"seconds": record, "overhead_share": spread(shares), "images_per_second": speed}


if __name__ == "__main__":
    main()
