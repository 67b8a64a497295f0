"""A backbone's training step under each setting that costs time or memory: images per second, and peak memory.

    python benchmarks/backbone_settings.py --out results/benchmarks/backbone_settings/backbone-settings-cpu.json
    python benchmarks/backbone_settings.py --backbone timm:resnet18 --image-size 224 --batch-size 64

Replay's step on one batch of random images, from random weights. *Default* is channels-last in fp32 without gradient
checkpointing; each of the others changes one of these. They alternate, ``--repeats`` times. The peak is of what is
allocated in a step besides the weights: activations and gradients.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peak_bytes import PeakBytes
from record import origin, spread, write
from scaling import prepared, seconds

from pycil_wsc.devices import memory_in_use, peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.training.step import backward

SETTINGS = {
    "default": {},
    "contiguous": {"channels_last": False},
    "grad_checkpointing": {"grad_checkpointing": True},
    "bf16": {"precision": "bf16"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="timm:efficientnet_lite0", help="of timm, which can checkpoint gradients")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolved_device(args.device)
    ready = {name: Step(args, device, keys) for name, keys in SETTINGS.items()}
    speeds = {name: [] for name in ready}
    for _ in range(args.repeats):
        for name, step in ready.items():
            speeds[name].append(args.batch_size / step.seconds(args.steps))
    usual, usual_peak = statistics.median(speeds["default"]), ready["default"].peak()
    settings = {}
    for name, step in ready.items():
        peak, speed = step.peak(), spread(speeds[name])
        over = {"speed_over_default": speed["median"] / usual, "peak_over_default": peak / usual_peak}
        settings[name] = {"images_per_second": speed, "peak_bytes": peak, **over}
    sizes = {name: getattr(args, name) for name in ("backbone", "image_size", "batch_size", "steps", "repeats")}
    record = {"settings": settings} | sizes | origin(device)
    print(json.dumps(record, indent=2))
    write(record, args.out)


class Step:
    """A learner's training step with some keys."""

    def __init__(self, args, device, keys):
        keys = {"device": device, "precision": "fp32"} | keys
        learner, self.phase, self.batch = prepared(args.backbone, args.image_size, args.batch_size, **keys)
        self.passes, self.device = backward.passes(learner, self.phase, self.phase.loss), device

    def seconds(self, steps):
        """Median seconds of a step."""
        return seconds(self.passes, self.phase, self.batch, steps, self.device)

    def peak(self):
        """Peak bytes of one more step."""
        self.passes.clear()
        if self.device.type != "cpu":
            before = memory_in_use(self.device)
            reset_peak_memory(self.device)
            self.seconds(1)
            return peak_memory(self.device) - before
        with PeakBytes() as counter:
            self.seconds(1)
        return counter.peak


if __name__ == "__main__":
    main()
