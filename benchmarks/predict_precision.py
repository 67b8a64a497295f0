"""What fp32 costs when a classifier predicts, on a device that computes bf16 natively.

    OMP_NUM_THREADS=1 python benchmarks/predict_precision.py --out record.json

RanPAC learns ten classes of Tiny-ImageNet in the features of a pre-trained backbone, and predicts their 200 validation
images, decoded beforehand: in fp32, as a learner does unless told otherwise, and in bf16. They alternate, ``--repeats``
times. Beside the seconds: how many answers differ, and by how much at most a probability.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image
from record import origin, spread, write

from pycil_wsc import Learner
from pycil_wsc.devices import resolved_device

BACKBONES = ["efficientnet_lite0:96", "vit_small_patch14_dinov2:98"]
CLASSES = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/tinyimagenet100"))
    parser.add_argument("--weights", type=Path, default=Path("data/models"), help="folder of NAME.safetensors")
    parser.add_argument("--backbones", nargs="+", default=BACKBONES, help="timm's names, each with :SIDE of its images")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    classes = sorted(path.name for path in (args.data / "train").iterdir())[:CLASSES]
    training, labels = pictures(args.data / "train", classes)
    tested, _ = pictures(args.data / "val", classes)
    record = {}
    for backbone in args.backbones:
        name, side = backbone.split(":")
        keys = {"convnet_type": f"timm:{name}", "pretrained": str(args.weights / f"{name}.safetensors")}
        keys |= {"image_size": int(side), "adapt": False, "projection": 2000, "quiet": True, "device": args.device}
        record[name] = compared(keys, training, labels, tested, args.repeats)
        print(name, json.dumps(record[name]), flush=True)
    record = {"backbones": record, "images": len(tested), "repeats": args.repeats}
    write(record | origin(resolved_device(args.device)), args.out)


def pictures(folder: Path, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 64, 64, 3) and their classes' names (N,)."""
    found = [(path, name) for name in classes for path in sorted((folder / name).iterdir())]
    images = [np.asarray(Image.open(path).convert("RGB")) for path, _ in found]
    return np.stack(images), np.array([name for _, name in found])


def compared(keys: dict, training: np.ndarray, labels: np.ndarray, tested: np.ndarray, repeats: int) -> dict:
    """Seconds an image in both precisions, and how far their answers differ."""
    learner = Learner("ranpac", **keys, precision="fp32")
    learner.learn((training, labels))
    times, probabilities = {"fp32": [], "bf16": []}, {}
    for _ in range(repeats + 1):
        for precision, taken in times.items():
            learner.answers.classifier.precision = precision
            start = time.perf_counter()
            probabilities[precision] = learner.predict_proba(tested)
            taken.append((time.perf_counter() - start) / len(tested))
    seconds = {precision: spread(taken[1:]) for precision, taken in times.items()}  # the first warms up
    fp32, bf16 = probabilities["fp32"], probabilities["bf16"]
    differ = {"different_answers": int((fp32.argmax(1) != bf16.argmax(1)).sum())}
    differ |= {"largest_difference_of_a_probability": float(np.abs(fp32 - bf16).max())}
    ratio = seconds["fp32"]["median"] / seconds["bf16"]["median"]
    return {"seconds_per_image": seconds, "fp32_over_bf16": ratio} | differ


if __name__ == "__main__":
    main()
