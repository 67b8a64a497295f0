"""Mammoth's benchmarks in ``exps/mammoth`` have its tasks, and plan without a download where the data are at hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.small_runs import main

FILES = sorted((Path(__file__).parents[2] / "exps/mammoth").glob("*.json"))
DATA = {"cifar10": (10, 32), "cifar100": (100, 32), "tinyimg": (200, 64), "mnist": (10, 28)}
TASKS = {
    "seq-cifar10": "cifar10-b2-inc2: 5 tasks: 2, 2, 2, 2, 2 classes",
    "seq-cifar100": f"cifar100-b10-inc10: 10 tasks: {', '.join(['10'] * 10)} classes",
    "seq-tinyimg": f"npz-data-tinyimg.npz-b20-inc20: 10 tasks: {', '.join(['20'] * 10)} classes",
    "perm-mnist": f"mnist-20domains: 20 tasks: 10, {', '.join(['0'] * 19)} new classes",
    "rot-mnist": f"mnist-20domains: 20 tasks: 10, {', '.join(['0'] * 19)} new classes",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with an image of each class of each data set."""
    folder = tmp_path_factory.mktemp("mammoth")
    (folder / "data").mkdir()
    for name, (classes, side) in DATA.items():
        images = np.zeros((classes, side, side, 3), np.uint8)
        labels = np.arange(classes)
        arrays = {"train_x": images, "train_y": labels, "test_x": images, "test_y": labels}
        np.savez(folder / f"data/{name}.npz", **arrays)
    return folder


def test_there_is_a_file_of_each_benchmark():
    assert [path.stem for path in FILES] == sorted(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_plans_mammoths_tasks(path, data, monkeypatch, capsys):
    monkeypatch.chdir(data)
    assert main(["--config", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == TASKS[path.stem]
    entries = json.loads(path.read_text())["runs"]
    for method in {entry["model_name"] for entry in entries}:
        assert f"/{method}/" in printed
