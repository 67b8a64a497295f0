"""results/studies/which_average/powers.py: several averages of the same training."""

import csv
import importlib
from pathlib import Path

import numpy as np
import pytest
from support.pages import rows_after

from pycil_wsc import registry
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.runs.run import Run

STUDY = Path(__file__).parents[3] / "results" / "studies" / "which_average"
KEYS = {"dataset": "digits", "init_cls": 2, "increment": 2, "max_tasks": 2, "convnet_type": "resnet8", "init_epoch": 1}
KEYS |= {"epochs": 3, "memory_per_class": 5, "nme": False, "precision": "fp32", "device": "cpu", "lrate": 0.02}


@pytest.fixture
def powers(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    yield importlib.import_module("powers")
    registry.learners.data.pop("wsc_powers", None)
    registry.learner_defaults.data.pop("wsc_powers", None)


@pytest.mark.slow
def test_the_default_power_is_the_run_itself_and_the_others_do_not_change_it(powers, digits, tmp_path):
    results = {}
    for name in ("wsc", "wsc_powers"):
        config = resolve(KEYS | {"model_name": name, "wsc.reset": "blend", "out": str(tmp_path)})
        results[name] = Run(config, digits).execute()
    found = results["wsc_powers"]
    assert found["curve"] == results["wsc"]["curve"] == found["power_32_curve"]
    assert found["train_loss"] == results["wsc"]["train_loss"]
    files = load(STUDY / "config.json")
    assert {run.model_name for run in files} == {"wsc_powers"} and len(files) == 30


def test_the_table_of_the_digits_is_the_records():
    """The largest loss over loops and epochs against the best p, and the mean gain over Replay, over 12 seeds."""
    means = {}
    with open(STUDY / "digits_validation.csv", newline="") as file:
        for row in csv.DictReader(file):
            accuracies = [float(row[str(seed)]) for seed in range(12)]
            means.setdefault((row["loop"], row["epochs"]), {})[row["method"]] = np.mean(accuracies)
    assert len(means) == 7 * 5
    methods = ("mean", "late 1", "late 3", "late 8", "late 32")
    losses = [max(max(of[m] for m in methods) - of[method] for of in means.values()) for method in methods]
    gains = [np.mean([of[method] - of["replay"] for of in means.values()]) for method in methods]
    _, rows = rows_after(STUDY / "README.md", "**Seven loops on digits**")
    assert rows[0][1:] == [f"{loss:.2f}" for loss in losses]
    assert rows[1][1:] == [f"{gain:+.2f}" for gain in gains]
