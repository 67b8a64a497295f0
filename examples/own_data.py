"""Your own images in a sweep: Replay and WSC at two memory sizes, with a report at the end.

python examples/own_data.py

The arrays here are scikit-learn's digits; put yours in their place.
"""

import json
import sys

import numpy as np
from sklearn.datasets import load_digits

from pycil_wsc.launch.command import main

SWEEP = {
    "prefix": "own_data",
    "dataset": "npz:own_data.npz",
    "init_cls": 2,
    "increment": 2,
    "model_name": ["replay", "wsc"],
    "memory_per_class": [10, 100],
    "convnet_type": "resnet8",  # for photographs: resnet18
    "init_epoch": 10,
    "epochs": 10,
    "flip": False,  # mirrored digits are others
    "seed": [1993, 1994, 1995],
}

if __name__ == "__main__":
    digits = load_digits()
    images = (digits.images * 15).astype(np.uint8)  # uint8, (N, side, side) if greyscale, or (N, side, side, 3)
    test = np.arange(len(images)) % 5 == 0
    arrays = {"train_x": images[~test], "train_y": digits.target[~test]}
    arrays |= {"test_x": images[test], "test_y": digits.target[test]}
    np.savez("own_data.npz", **arrays)
    with open("own_data.json", "w") as file:
        json.dump(SWEEP, file)
    sys.exit(main(["--config", "own_data.json", *sys.argv[1:]]))
