"""results/studies/which_average/powers.py: several averages of the same training."""

import importlib
from pathlib import Path

import pytest

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
    assert found["curve"] == results["wsc"]["curve"] == found["power_3_curve"]
    assert found["train_loss"] == results["wsc"]["train_loss"]
    files = load(STUDY / "config.json")
    assert {run.model_name for run in files} == {"wsc_powers"} and len(files) == 30
