"""What several tests share: see ``test_task_lists.py``."""

import numpy as np
import pytest
from PIL import Image
from support.small_runs import (
    SETTINGS,
)

from pycil_wsc.state import load_state

TEMPLATES = np.random.default_rng(0).integers(0, 200, (6, 8, 8, 3))


NAMES = ["ant", "bee", "cat", "dog", "elk", "fox"]


MONTHS = [["cat", "ant"], ["bee", "cat"], ["dog", "ant"]]  # cat and ant recur


def month(path, names, seed, per_class=10):
    """Noisy class templates, as an npz file whose labels have names."""
    rng, arrays = np.random.default_rng(seed), {"classes": np.array(names)}
    for part in ("train", "test"):
        labels = np.repeat(np.arange(len(names)), per_class)
        base = np.array([TEMPLATES[NAMES.index(name)] for name in names])[labels]
        arrays |= {f"{part}_x": (base + rng.integers(0, 56, base.shape)).astype(np.uint8), f"{part}_y": labels}
    np.savez(path, **arrays)
    return f"npz:{path}"


def listed(tmp_path, tasks, **keys):
    settings = SETTINGS | {"out": str(tmp_path / "runs"), "tasks": tasks} | keys
    return {name: value for name, value in settings.items() if name not in ("init_cls", "increment")}


def weights(folder):
    return load_state(folder / "checkpoint.pt")["learner"]


def photos(folder, names, seed, count=4):
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = TEMPLATES[NAMES.index(name)].repeat(4, 0).repeat(4, 1) + rng.integers(0, 56, (32, 32, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return f"folder:{folder}"


@pytest.fixture
def months(tmp_path):
    return [month(tmp_path / f"{number}.npz", names, number) for number, names in enumerate(MONTHS)]
