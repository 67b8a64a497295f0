"""The scripts of examples/ that people copy: each is short and does what its first line says.

Training is shorter here. ``test_serve.py`` runs ``serve.py``.
"""

import importlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.fresh import forget
from support.small_runs import ROOT, Command, Tiny

EXAMPLES = ROOT / "examples"
COPIED = {"own_data", "own_method", "wsc_in_a_loop", "monthly_classifier", "huggingface_trainer", "read_results"}
LONGEST = 40  # lines
QUICK = ["convnet_type=tiny", "init_epoch=1", "epochs=1", "seed=1993", "max_tasks=1", "batch_size=128"]


def run(tmp_path, name, *arguments, shorter=()):
    """What the example prints, in the folder ``tmp_path`` and with what ``shorter`` replaces: {text: other text}."""
    text = (EXAMPLES / f"{name}.py").read_text()
    for old, new in dict(shorter).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / f"{name}.py"
    path.write_text(text)

    def prepare():
        os.chdir(tmp_path)
        forget(("pycil_wsc",))
        registry = importlib.import_module("pycil_wsc.registry")  # as the example will see it
        registry.register_backbone("tiny")(Tiny)

    return Command(arguments, path, prepare).printed()


def test_the_examples_are_these_and_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == COPIED | {"serve"}
    assert max(lengths[name] for name in COPIED) <= LONGEST


def test_the_pages_name_every_example():
    named = set(re.findall(r"examples/(\w+)\.py", "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))))
    assert named == COPIED | {"serve"}


def sets(keys):
    return [f"--set={key}" for key in keys]


def results(tmp_path):
    return [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("result.json"))]


@pytest.mark.slow
def test_own_data_are_swept_over_methods_and_memory_sizes(tmp_path):
    (tmp_path / "runs/own_data").mkdir(parents=True)
    (tmp_path / "runs/own_data/report").touch()  # no report, which takes longer than the runs
    run(tmp_path, "own_data", *sets(QUICK))
    made = {(result["config"]["model_name"], result["config"]["memory_per_class"]) for result in results(tmp_path)}
    assert made == {("replay", 10), ("replay", 100), ("wsc", 10), ("wsc", 100)}
    assert not any(result["config"]["flip"] for result in results(tmp_path))


@pytest.mark.slow
def test_a_method_of_ones_own_is_trained_as_any_other(tmp_path):
    """With gamma 0 it is Replay."""
    (tmp_path / "runs/focal").mkdir(parents=True)
    (tmp_path / "runs/focal/report").touch()
    keys = [*QUICK, 'model_name=["replay","focal"]', "prefix=focal", "memory_per_class=5", "gamma=[0,2]"]
    keys += ["init_lr=0.1", "lrate=0.1"]
    config = ["--config", ROOT / "exps/quickstart.json"]
    run(tmp_path, "own_method", *config, *sets(keys))
    replay = [result for result in results(tmp_path) if result["config"]["model_name"] == "replay"]
    none, two = sorted(
        (result for result in results(tmp_path) if result["config"]["model_name"] == "focal"),
        key=lambda result: result["config"]["gamma"],
    )
    assert none["train_loss"][0] == pytest.approx(replay[0]["train_loss"][0])
    assert two["train_loss"][0][0] < none["train_loss"][0][0]


def test_the_loop_learns_ten_classes_and_consolidates_later_tasks(tmp_path):
    printed = run(tmp_path, "wsc_in_a_loop", shorter={"EPOCHS, MEMORY = 20, 20": "EPOCHS, MEMORY = 2, 20"})
    assert re.findall(r"^(\d+) classes: ", printed, re.MULTILINE) == ["2", "4", "6", "8", "10"]
    assert float(re.search(r"^10 classes: ([\d.]+) %", printed, re.MULTILINE)[1]) > 40


def photographs(folder, names):
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        colour = np.random.default_rng([*name.encode()]).integers(0, 200, 3)
        for number in range(6):
            image = (colour + rng.integers(0, 56, (40, 40, 3))).astype(np.uint8)
            Image.fromarray(image).save(folder / name / f"{number}.jpg")


@pytest.mark.slow
def test_a_classifier_goes_on_from_month_to_month_and_refuses_a_bad_one(tmp_path):
    photographs(tmp_path / "january", ["goldfish", "trilobite"])
    photographs(tmp_path / "february", ["bullfrog"])
    photographs(tmp_path / "march", ["koala"])
    quick = {
        '"held_out": 20': '"held_out": 1, "num_workers": 0, "quiet": True',
        '"projection": 2000': '"projection": 64',
        "timm:efficientnet_lite0": "resnet8",
        '"pretrained": True': '"pretrained": False',
        '"image_size": 96': '"image_size": 16',
    }
    printed = run(
        tmp_path, "monthly_classifier", "january", "february", shorter=quick | {"max_drop=0.1": "max_drop=0.9"}
    )
    assert "january: version 1, 2 classes" in printed and "february: version 2, 3 classes" in printed
    strict = quick | {"max_drop=0.1": "max_drop=0.0, strict=True"}  # which so few photographs cannot show
    assert "march is rejected" in run(tmp_path, "monthly_classifier", "march", shorter=strict)


@pytest.mark.slow
def test_the_trainer_learns_two_tasks(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    shorter = {"count=64": "count=8", "first[:16]": "first[:2]"}
    printed = run(tmp_path, "huggingface_trainer", shorter=shorter)
    assert len(re.findall(r"^task \d: loss on the first task \d", printed, re.MULTILINE)) == 2
    assert Path(tmp_path / "runs/task1/model.safetensors").is_file()


def test_a_comparison_is_read_back(tmp_path):
    """From run folders with the quickstart's recorded results."""
    for path in (ROOT / "results/studies/quickstart").rglob("*.json"):
        folder = tmp_path / "quickstart" / path.stem
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(path.read_text())
    printed = run(tmp_path, "read_results", tmp_path / "quickstart")
    assert re.search(r"^wsc +10 +92\.98 +1\.46 ", printed, re.MULTILINE)
    assert re.search(r"^10 +22\.88 +4\.98 +3$", printed, re.MULTILINE)
