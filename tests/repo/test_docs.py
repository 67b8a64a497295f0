"""Every block of code in README.md and docs/ runs, every page's link leads somewhere,
and generated content is up to date.

The blocks of a page run in their order, in an empty folder: Python in one namespace, except that a block whose title is
a file's name sees its own names only; JSON saved under its title; commands in process. A command trains only where it
is quick; where it takes hours it is a dry run, with the page's own arguments. A page may prepare what its blocks need
(``prepares``), and check what they did (``checks``).
"""

import csv
import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support import fresh
from support.pages import ROOT, blocks, shown_in
from support.small_runs import Command, killed_at, small_data, without_measurements
from torch import nn
from torch.nn.functional import cross_entropy

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.state import load_state

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {"text", "bibtex", "yaml", "toml"}  # test_package.py installs the package of the toml
TOOLS = {"pip", "pytest", "ruff", "pyright", "mkdocs", "accelerate", "lm_eval"}  # installed software; not run here
TINY = {  # commands that train: what makes them quick
    "exps/quickstart.json": {
        "init_epoch": 1,
        "epochs": 2,
        "seed": 1993,
        "batch_size": 128,
        "memory_per_class": 10,
        "model_name": "wsc",
        "convnet_type": "tiny",
    },
    "my_experiment.json": {"convnet_type": "tiny", "init_epoch": 1, "epochs": 2, "seed": 1993, "batch_size": 16},
    "on_top.json": {"convnet_type": "tiny", "init_epoch": 1, "epochs": 2},
    "exps/studies/trace_quickstart.json": {
        "llm.epochs": [2, 2, 2],
        "llm.train_items": 2,
        "llm.test_items": 1,
        "llm.max_new_tokens": 2,
        "llm.replay_ratio": 0.2,
        "seed": 1234,
    },
}
TRAINED = set()  # commands with the repository's files, which train on the first of the pages that have them
PREPARES, CHECKS = {}, {}


def prepares(page):
    """Register ``function(monkeypatch) -> {name: value}``, called in the page's folder:
    the names its Python blocks use.
    """
    return lambda function: PREPARES.setdefault(page, function)


def checks(page):
    """Register ``function({name: value}, output)``, called after the page's blocks."""
    return lambda function: CHECKS.setdefault(page, function)


QUICK = {"README.md", "index.md", "extending.md", "wsc.md", "any_loop.md", "your_classifier.md", "pycil.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow, id=page.name) for page in PAGES],
)
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch, capfd, registries, undrawn, data_sets):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data_sets_of_the_pages(data_sets, tmp_path)
    names = PREPARES.get(page.name, lambda monkeypatch: {})(monkeypatch)
    for language, title, code in blocks(page.relative_to(ROOT)):
        if language == "python" and not all(map(find_spec, packages_of(code))):
            continue
        if language == "python":
            module = {} if title else names
            exec(compile(code, str(page), "exec"), module)
            names |= module
        elif language == "json" and title:
            json.loads(code)
            Path(title).write_text(code)
        elif language == "json":  # a few keys of a configuration
            check_keys(json.loads(code))
        elif language == "bash":
            for command in commands(code):
                run_command(command)
        else:
            assert language in NOT_RUN, f"{page.name}: a block of '{language}' is not run by any test"
    CHECKS.get(page.name, lambda names, output: None)(names, capfd.readouterr().out)


def packages_of(code):
    """The packages of extras that a block of Python needs, or the module that another block is."""
    if "import my_derpp" in code:
        return ("my_derpp",)
    return ("onnx", "onnxscript", "onnxruntime") if "onnx" in code else ()


def check_keys(some):
    """These keys of a configuration exist and have values that they may have."""
    from pycil_wsc.config.image_config import KEYS
    from pycil_wsc.config.loading import flatten, resolve

    assert flatten(some).keys() <= KEYS.keys()
    if str(some.get("convnet_type")).startswith("timm:"):
        pytest.importorskip("timm")
    resolve({"dataset": "digits", "model_name": "wsc", "seed": 1993} | flatten(some))


@pytest.fixture
def registries(monkeypatch):
    """What a page registers is forgotten afterwards."""
    kept = {name: dict(entry) for name, entry in vars(registry).items() if isinstance(entry, registry.Registry)}
    yield
    for name, entries in kept.items():
        getattr(registry, name).clear()
        getattr(registry, name).update(entries)


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    """Small stand-ins for the data that the pages' commands read."""
    folder = tmp_path_factory.mktemp("data_sets")
    images = np.zeros((200, 32, 32, 3), np.uint8)
    images[::2] = 255
    labels = np.arange(200) % 100
    np.savez(folder / "cifar100.npz", train_x=images, train_y=labels, test_x=images, test_y=labels)
    for number in range(100):
        for part in ("train", "val"):
            path = folder / f"imagenet100/{part}/n{number:08}"
            path.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(path / "image.jpg")
    return folder


def data_sets_of_the_pages(data_sets, folder):
    """Put the data that the pages' commands read into ``folder``, and the repository's own files."""
    (folder / "exps").symlink_to(ROOT / "exps")
    (folder / "main.py").symlink_to(ROOT / "main.py")
    (folder / "data").mkdir()
    for each in data_sets.iterdir():
        (folder / "data" / each.name).symlink_to(each)
    flowers = small_flowers()
    np.savez(folder / "flowers.npz", **{f"{part}_{kind}": flowers[part, kind] for part, kind in flowers})


def small_flowers(classes=6, per_class=10):
    rng = np.random.default_rng(0)
    targets = np.repeat(np.arange(classes), per_class)
    templates = rng.integers(0, 200, (classes, 8, 8, 3))
    images = (templates[targets] + rng.integers(0, 56, (len(targets), 8, 8, 3))).astype(np.uint8)
    return {(part, kind): {"x": images, "y": targets}[kind] for part in ("train", "test") for kind in "xy"}


def commands(code):
    """The commands of a shell block, as lists of words, with the words' quotes removed as a shell does."""
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        assert not re.search(r"(?<!')--set (?!')\S*[][*?]", line), f"zsh takes this for a pattern: {line}"
        for command in line.split("&&"):
            words = shlex.split(command, comments=True)
            yield [word for word in words if not re.match(r"[A-Z_]+=", word)]


def run_command(words):
    match words:
        case ["pip", "install", *arguments]:
            check_installation(arguments)
        case [tool, *_] if tool in TOOLS:
            pass
        case ["python", "main.py", *arguments] | ["pycil-wsc", *arguments]:
            run_main(arguments)
        case ["torchrun", *_, "train.py"]:
            pass  # a script of the reader's
        case ["torchrun", *arguments]:  # in this process alone
            run_main(arguments[arguments.index("main.py") + 1 :])
        case ["python", "-m", "pycil_wsc.report", *arguments]:
            from pycil_wsc.report.__main__ import main

            assert main(arguments) == 0, words
        case ["python", "-m", "pycil_wsc.results", *_] | [
            "python",
            "docs/scripts/generate.py"
            | "docs/scripts/words.py"
            | "results/studies/abundant/abundant.py"
            | "results/studies/night/claims.py",
        ]:
            pass  # test_run_table.py, test_what_is_generated_is_up_to_date, test_records.py, test_claims.py
        case ["python", "-m", module, *arguments]:
            print(fresh.printed(run_as_main(module), Path("module.py").resolve(), *arguments, cwd=Path.cwd()))
        case ["python", script, *arguments] if script.startswith("benchmarks/"):
            run_benchmark(script, arguments)
        case _:
            pytest.fail(f"a command that no test runs: {shlex.join(words)}")


def run_main(arguments):
    """``python main.py``: as it is if it only looks, in a quick version where there is one, else as a dry run."""
    from main import main

    config = arguments[arguments.index("--config") + 1]
    given = {value.partition("=")[0] for option, value in zip(arguments, arguments[1:]) if option == "--set"}
    if {"--dry-run", "--status"} & set(arguments):
        quick = []
    elif config in TINY:
        quick = [f"--set={name}={json.dumps(value)}" for name, value in TINY[config].items() if name not in given]
    else:
        quick = ["--dry-run"]
    if "trace" in config:  # models are not here
        quick += ["--set=llm.model=tiny-llama"] + ["--set=llm.train_items=9"] * (config not in TINY)
    if config.startswith("exps/") and (*arguments,) in TRAINED:
        quick = ["--dry-run"]
    if "seed" not in given and config not in TINY:  # other seeds are the same runs again: 800 of night/all.json
        quick.append("--set=seed=1993")
    TRAINED.add((*arguments,))
    assert main([*arguments, *quick]) == 0, arguments


def check_installation(arguments):
    """The files and the extras that ``pip install`` is given exist."""
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    for option, value in zip(arguments, [*arguments[1:], ""]):
        if option == "-r":
            assert (ROOT / value).is_file(), value
        for extra in re.findall(r"\[(\w+)\]", option):
            assert re.search(rf"^{extra} = ", extras, re.MULTILINE), extra


def run_benchmark(script, arguments):
    """Minutes each, some on a GPU: their options are there. ``test_the_pages_benchmarks_run`` runs each script."""
    text = options_of(script)
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in text, (script, option)


@functools.cache
def options_of(path):
    return script(ROOT / path, "--help")


def script(path, *arguments):
    """What the script prints. Processes that it starts are forks, too."""
    return Command(arguments, path, forking).printed()


def forking():
    """Make forks of Python's processes that a benchmark starts, which need not import torch again.
    The rates of the machine are measured once.
    """
    subprocess.run = forked
    spawning = importlib.import_module("torch.multiprocessing.spawn")
    spawning.spawn = functools.partial(spawning.start_processes, start_method="fork")
    roofline = importlib.import_module("roofline")
    roofline.machine_rates = functools.partial(roofline.machine_rates, repeats=1)


def forked(command, **_):
    _, path, *arguments = command
    process = Command(arguments, path)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_as_main(module):
    return f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"


# ---- what pages need, and what came of it ----------------------------------------------------------------------------


QUICK_LEARNER = {"convnet_type": "tiny", "init_epoch": 1, "epochs": 1, "projection": 64}


def quick_learners(monkeypatch, **quick):
    """Learners have these keys, whatever a page gives."""
    from pycil_wsc.classifier import learner

    class Quick(learner.Learner):
        def __init__(self, *names, **keys):
            super().__init__(*names, **keys | QUICK_LEARNER | quick)

    monkeypatch.setattr(learner, "Learner", Quick)


@prepares("pretrained_study.md")
def prepare_pretrained_study(monkeypatch):
    Path("results").symlink_to(ROOT / "results")
    return {}


@checks("pretrained_study.md")
def check_pretrained_study(names, output):
    assert "finetune" in output and "64.39" in output


@prepares("index.md")
def prepare_index(monkeypatch):
    quick_learners(monkeypatch)
    return a_loop()


def a_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    loop = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "cross_entropy": cross_entropy}
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(20)]
    return loop | {"batches": batches, "epochs": 2}


@prepares("README.md")
def prepare_readme(monkeypatch):
    """A training loop, and photographs with a learner that is quick with them."""
    prepare_photos(monkeypatch)
    return a_loop()


@prepares("getting_started.md")
def prepare_getting_started(monkeypatch):
    return flower_names()


def flower_names():
    flowers = small_flowers()
    return {
        f"{part}_{name}": flowers[part, kind]
        for part in ("train", "test")
        for kind, name in (("x", "images"), ("y", "labels"))
    }


@checks("getting_started.md")
def check_named_experiment(names, output):
    results = check_experiment()
    assert {name for result in results for name in result["class_names"]} >= {"daisy", "tulip"}


def check_experiment():
    report = Path("runs/flowers/report/index.html").read_text()
    results = [json.loads(path.read_text()) for path in Path("runs/flowers").rglob("result.json")]
    assert "replay" in report and len(results) >= 4
    return results


@checks("README.md")
def check_readme(names, output):
    check_experiment()
    assert names["learner"].classes == ["goldfish", "trilobite", "bullfrog", "koala"]
    assert Path("my_classifier/learner.safetensors").is_file()


@prepares("outputs.md")
def prepare_a_run_with_weights(monkeypatch):
    """A quick run in the folder of the quickstart's that the page loads, and others for the report."""
    (page,) = set(
        re.findall(r"runs/quickstart/[^\"/]+/[^\"/]+/[^\"/]+/[^\"/]+", (ROOT / "docs/outputs.md").read_text())
    )
    from pycil_wsc.config.loading import load

    quickstart = json.loads((ROOT / "exps/quickstart.json").read_text())
    assert page in {str(run_folder(run)) for run in load("exps/quickstart.json")}
    Path("quick.json").write_text(json.dumps(quickstart | TINY["exps/quickstart.json"] | {"save_weights": True}))
    monkeypatch.setitem(TINY, "quick.json", {})
    run_main(["--config", "quick.json"])
    (run,) = Path("runs/quickstart").rglob("result.json")
    Path(page).parent.mkdir(parents=True)
    run.parent.rename(page)
    for folder in "paper", "mine":
        shutil.copytree(ROOT / "results/studies/cifar100_short", f"runs/{folder}")
    return {"images": np.zeros((5, 8, 8, 3), np.uint8)}


@checks("outputs.md")
def check_loaded(names, output):
    assert names["labels"].shape == (5,) and names["logits"].shape == (5, 10)
    assert all(Path(folder, "index.html").is_file() for folder in ("runs/paper/report", "report"))


@checks("analyses.md")
def check_analyses(names, output):
    lines = [
        json.loads(line) for path in Path("runs").rglob("analyses.jsonl") for line in path.read_text().splitlines()
    ]
    assert lines and all({"gradients", "drift", "flatness", "dormant"} <= set(line) for line in lines)


@prepares("your_classifier.md")
def prepare_the_guide(monkeypatch):
    """January has enough photographs to hold out twenty."""
    return prepare_photos(monkeypatch, january=50)


def prepare_photos(monkeypatch, january=5):
    """Four months of five photographs a class, each of its own colour, and a learner that is quick with them."""
    rng = np.random.default_rng(0)
    quick = {"pretrained": False, "image_size": 16, "num_workers": 0}
    months = {"january": ["goldfish", "trilobite"], "february": ["bullfrog", "koala"], "april": ["tractor"]}
    months |= {"march": ["goldfish", "jellyfish"], "test": ["goldfish", "trilobite", "bullfrog", "koala", "jellyfish"]}
    for month, names in months.items():
        for name in names:
            Path("photos", month, name).mkdir(parents=True)
            colour = np.random.default_rng([*name.encode()]).integers(0, 200, 3)
            for number in range(january if month == "january" else 5):
                image = Image.fromarray((colour + rng.integers(0, 56, (40, 40, 3))).astype(np.uint8))
                image.save(f"photos/{month}/{name}/{number}.jpg")

    quick_learners(monkeypatch, **quick)
    monkeypatch.setitem(TINY, "photos.json", QUICK_LEARNER | quick | {"model_name": "wsc", "memory_per_class": 2})
    return {}


@checks("your_classifier.md")
def check_photos(names, output):
    learner = names["learner"]
    assert names["update"]["accepted"] and "10 images of 2 classes" in output
    assert learner.classes == ["goldfish", "trilobite", "bullfrog", "koala"], "March is undone"
    assert learner.version == 2 and [each["version"] for each in learner.versions("shelf")] == [1, 2, 3]
    assert names["probabilities"].shape == (25, 4) and names["best"].shape == (25, 2)
    assert output.count("photos/test/koala/0.jpg") == 1 and output.rstrip().endswith("False")


@prepares("classifier_details.md")
def prepare_a_shelf(monkeypatch):
    """The same photographs, and a learner of them that was saved."""
    from pycil_wsc.classifier import learner

    prepare_photos(monkeypatch)
    saved = learner.Learner("wsc", memory_per_class=2, quiet=True)
    for month in ("january", "february", "march"):
        saved.learn(f"folder:photos/{month}")
    saved.save("shelf")
    return {}


@checks("classifier_details.md")
def check_details(names, output):
    classes = ["goldfish", "trilobite", "bullfrog", "koala", "jellyfish", "tractor"]
    assert names["learner"].classes == classes
    assert pycil_wsc.Learner.load("shelf", quiet=True).classes == ["goldfish", "animal", "jellyfish", "tractor"]
    assert Path("work/task4/learner.safetensors").is_file()
    (result,) = (json.loads(path.read_text()) for path in Path("runs").rglob("result.json"))
    assert result["class_names"] == classes[:5]


@prepares("tuning.md")
def prepare_trials(monkeypatch):
    settings = {"prefix": "tune", "dataset": "digits", "init_cls": 4, "increment": 3, "convnet_type": "tiny"}
    settings |= {"init_epoch": 1, "epochs": 1, "validation_split": 0.1, "wsc.retain": [0.2, 0.5]}
    Path("trials.json").write_text(json.dumps(settings))
    monkeypatch.setitem(TINY, "trials.json", {})
    run_main(["--config", "trials.json"])
    return {}


@checks("methods.md")
def check_consolidated(names, output):
    assert re.search(r"^icarl  .*\d\n(.*\n)*icarl\+wsc .*\d$", output, re.MULTILINE)


@prepares("pycil.md")
def prepare_pycil(monkeypatch):
    shutil.copytree(ROOT / "tests/pycil_standin", "PyCIL")
    Path("PyCIL/exps").mkdir(exist_ok=True)
    (_, _, config), *_ = (block for block in blocks("docs/pycil.md") if block[0] == "json")
    Path("PyCIL/exps/icarl.json").write_text(json.dumps(json.loads(config) | {"model_name": "icarl"}))
    return {}


@checks("pycil.md")
def check_pycil(names, output):
    assert output.count("top1") == 3


@prepares("any_loop.md")
def prepare_any_loop(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    tasks = [[(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(80)] for _ in range(2)]
    return {"torch": torch, "model": model, "tasks": tasks, "epochs": 3}


@checks("any_loop.md")
def check_any_loop(names, output):
    assert (names["wsc"].phase, names["wsc"].resets, names["wsc"].steps) == ("finished", 1, 80)


@prepares("huggingface.md")
def prepare_huggingface(monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    rows = torch.randint(13, (2, 16, 8))
    tasks = [[{"input_ids": row, "labels": row} for row in task] for task in rows]
    return {"model": transformers.GPT2LMHeadModel(config), "tasks": tasks}


@checks("huggingface.md")
def check_huggingface(names, output):
    assert Path("runs/task1/model.safetensors").is_file() and names["trainer"].state.global_step == 6


@prepares("language_models.md")
def prepare_language_models(monkeypatch):
    """TRACE's folders with a few rows each; a tiny model in place of the one that is not here."""
    pytest.importorskip("transformers")
    from pycil_wsc.llm.config import TRACE

    for size in ("500", "1000"):
        for task in (*TRACE, "Lima"):
            shutil.copytree(ROOT / "exps/data/trace_small/FOMC", f"data/trace/{size}/{task}")
    return {}


@checks("language_models.md")
def check_language_models(names, output):
    assert f"expected: {names['item']['answer']}\n" in output and names["inputs"]["input_ids"].shape[1] > 10


# ---- the page on extending -------------------------------------------------------------------------------------------


@pytest.fixture
def extended(registries, tmp_path, monkeypatch):
    """A function that trains with what docs/extending.md and docs/porting.md add: settings -> result; ``names`` are
    the pages' own.
    """
    monkeypatch.chdir(tmp_path)  # without runs yet
    names = {"__name__": "extensions"}
    for language, title, code in [*blocks("docs/extending.md"), *blocks("docs/porting.md")]:
        if language == "python" and not all(map(find_spec, packages_of(code))):
            continue
        if language == "python":
            module = {"__name__": "extensions"} if title else names
            exec(code, module)
            names |= module

    def trained(**settings):
        from pycil_wsc.config.loading import resolve
        from pycil_wsc.data.images.datasets import load_dataset
        from pycil_wsc.runs.run import Run

        small = {"dataset": "digits", "init_cls": 4, "increment": 3, "convnet_type": "tiny", "batch_size": 64}
        small |= {"init_epoch": 2, "epochs": 2, "device": "cpu", "checkpoint_seconds": 0, "memory_per_class": 5}
        config = resolve(small | {"out": str(tmp_path / "runs")} | settings)
        return Run(config, load_dataset(config.dataset, ".")).execute()

    trained.names = names
    return trained


def test_the_pages_metric_is_that_of_a_worked_example(extended):
    assert extended.names["backward_transfer"]([[90.0], [60.0, 80.0], [50.0, 70.0, 100.0]]) == (-40 - 10) / 2
    assert extended.names["backward_transfer"]([[90.0]]) == 0


@pytest.mark.slow
def test_the_pages_derpp_learns_three_tasks_with_stored_logits(extended):
    """The page's metric is in its result."""
    result = extended(model_name="my_derpp")
    assert len(result["curve"]) == 3 and result["new_acc"] > 40
    assert extended(model_name="my_derpp", alpha=0)["matrix"] != result["matrix"]
    one, two, three = result["matrix"]
    assert result["backward_transfer"] == pytest.approx((three[0] - one[0] + three[1] - two[1]) / 2)


@pytest.mark.slow
def test_the_pages_script_trains_its_method_in_several_workers(tmp_path):
    scripts = {Path(title).name: code for language, title, code in blocks("docs/extending.md") if title}
    for name in ("my_derpp.py", "my_main.py"):
        (tmp_path / name).write_text(scripts[name])
    data = small_data(tmp_path / "small.npz")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "report").touch()  # no report, which takes longer than the runs
    keys = {"prefix": "mine", "model_name": "my_derpp", "seed": [1, 2], "dataset": f"npz:{data}", "max_tasks": 2}
    keys |= {"init_cls": 2, "increment": 2, "memory_per_class": 2, "convnet_type": "resnet8", "device": "cpu"}
    (tmp_path / "mine.json").write_text(json.dumps(keys | {"init_epoch": 1, "epochs": 1}))
    command = [sys.executable, "my_main.py", "--config", "mine.json", "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("result.json"))) == 2


@pytest.mark.slow
def test_the_pages_agem_never_steps_against_the_exemplars(extended, monkeypatch):
    """Its gradient has no component against theirs, which is computed here without the page's hook."""
    from pycil_wsc import registry

    learner, products = registry.learners["my_agem"], []
    hook = learner.after_backward

    def watched(self, batch, backward):
        hook(self, batch, backward)
        if len(self.memory):
            parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
            with self.precision.autocast():
                old = torch.autograd.grad(self.memory_loss(batch)[0], parameters)
            both = [(a.grad, b) for a, b in zip(parameters, old)]
            scale = sum(b.square().sum() for _, b in both)
            products.append((sum((a * b).sum() for a, b in both) / scale).item())

    monkeypatch.setattr(learner, "after_backward", watched)
    extended(model_name="my_agem", precision="fp32")
    assert min(products) > -1e-3 and sum(abs(product) < 1e-3 for product in products) > 2, "some are projected"


@pytest.mark.slow
def test_the_pages_second_phase_trains_the_head_alone(extended, monkeypatch):
    learner, before = registry.learners["my_balanced"], []

    def begin_phase(self, task, run):
        if run.phase.name == "head":
            before.append({name: value.clone() for name, value in self.network.state_dict().items()})

    def end_task(self, task):
        if task.index:
            after = self.network.state_dict()
            changed = {name for name, value in before.pop().items() if not torch.equal(value, after[name])}
            assert changed == {"head.weight", "head.bias"}

    monkeypatch.setattr(learner, "begin_phase", begin_phase)
    monkeypatch.setattr(learner, "end_task", end_task)
    quick = {"init_epoch": 1, "epochs": 1}
    replay, result = extended(model_name="replay", **quick), extended(model_name="my_balanced", head_epochs=3, **quick)
    exemplars = 5 * (4 + 7)  # of the classes before the second task, and before the third
    assert result["images_trained"] - replay["images_trained"] == 3 * exemplars and not before


def test_the_pages_network_has_a_cosine_head_a_teacher_and_a_slow_copy(extended, monkeypatch):
    learner, distances = registry.learners["my_cosine"], []
    slow_step = learner.after_step

    def after_step(self):
        before = [value.clone() for value in self.slow.parameters()]
        slow_step(self)
        for old, slow, new in zip(before, self.slow.parameters(), self.network.parameters(), strict=True):
            assert torch.allclose(slow, 0.99 * old + 0.01 * new, atol=1e-6)
        features = torch.randn(3, self.network.head.in_features)
        cosines = torch.cosine_similarity(features[:, None], self.network.head.weight, dim=2)
        distances.append((self.network.classify(features) - self.network.head.scale * cosines).abs().max().item())

    monkeypatch.setattr(learner, "after_step", after_step)
    result = extended(model_name="my_cosine", precision="fp32", init_epoch=1, epochs=1)
    assert len(result["slow_curve"]) == 3 and result["slow_curve"] != result["curve"]
    assert max(distances) < 1e-5


@pytest.mark.slow
def test_the_pages_slow_copy_is_there_when_a_run_resumes(extended, tmp_path):
    undisturbed = extended(model_name="my_cosine", out=str(tmp_path / "undisturbed"))
    with killed_at(lambda calls: calls[-1][0] == {"task": 2, "phase": 0, "epoch": 1}):
        extended(model_name="my_cosine")
    assert without_measurements(extended(model_name="my_cosine")) == without_measurements(undisturbed)


@pytest.mark.slow
def test_the_pages_port_of_icarl_is_icarl(extended):
    """Three small tasks end with the losses and accuracies of the built-in method."""
    built_in, ported = (extended(model_name=name, init_epoch=1, epochs=1) for name in ("icarl", "my_icarl"))
    assert len(ported["curve"]) == 3 and ported["train_loss"] == built_in["train_loss"]
    assert ported["matrix"] == built_in["matrix"]


def test_the_pages_choice_takes_the_farthest_samples(extended):
    targets, points = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([0.0, 1, 5, 2, 0, 9, 8])[:, None]  # means: 2, 17 / 3
    memory = ExemplarMemory(True, 2, 0, "farthest")
    task = Task(0, 0, 2, np.arange(7), np.empty(0, np.int64))
    memory.update(task, targets, lambda indices: points[indices], np.random.default_rng(0))
    assert {label: kept.tolist() for label, kept in memory.classes.items()} == {0: [2, 0], 1: [4, 5]}
    assert len(extended(model_name="replay", exemplars="farthest")["curve"]) == 3


@pytest.mark.slow
def test_the_pages_derpp_resumes_with_its_logits(extended, tmp_path):
    """Killed in the last task, it ends as if it had not been."""
    undisturbed = extended(model_name="my_derpp", out=str(tmp_path / "undisturbed"))
    with killed_at(lambda calls: calls[-1][0] == {"task": 2, "phase": 0, "epoch": 1}):
        extended(model_name="my_derpp")
    assert without_measurements(extended(model_name="my_derpp")) == without_measurements(undisturbed)


@pytest.mark.slow
def test_the_pages_backbone_serves_every_method(extended):
    for learner in ("replay", "memo"):
        assert len(extended(model_name=learner, convnet_type="plain")["curve"]) == 3
    wide = extended(model_name="replay", convnet_type="plain", **{"convnet_options.width": 8})
    assert wide["parameters"] == 3 * 8 * 9 + 8 + 2 * 8 + 8 * 16 * 9 + 16 + 2 * 16 + 16 * 10 + 10


def test_the_pages_optimizer_trains(extended):
    result = extended(model_name="replay", optimizer="rmsprop")
    assert result["config"]["lrate"] == 1e-3 and result["train_loss"][0][1] < result["train_loss"][0][0]


@pytest.mark.slow
def test_the_pages_data_set_is_learned(extended):
    result = extended(
        model_name="replay", dataset="stripes", init_cls=2, increment=2, batch_size=8, init_epoch=6, epochs=6
    )
    assert result["class_names"] and set(result["class_names"]) == {"rows", "columns", "diagonals", "wide diagonals"}
    assert result["avg_acc"] > 60


@pytest.mark.slow
def test_the_pages_importance_ranks(extended):
    from pycil_wsc import registry

    weights = {"a": torch.tensor([-3.0, 1.0]), "b": torch.tensor(2.0)}
    scores = registry.importances["magnitude"](None, weights, None, None, None)
    assert {name: score.tolist() for name, score in scores.items()} == {"a": [3, 1], "b": 2}
    ours, paper = (extended(**{"wsc.importance": name, "wsc.average": False}) for name in ("magnitude", "moment"))
    assert ours["importance_passes"] == 0 and ours["train_loss"][1][1:] != paper["train_loss"][1][1:]


@pytest.mark.slow
def test_the_pages_reset_halves_the_distance_from_the_mean_of_what_is_not_kept(extended):
    rule, weights = extended.names["TowardsMean"](), torch.tensor([0.0, 2.0, 4.0, 6.0])
    rule([weights], [None], [torch.tensor([True, False, False, True])])
    assert weights.tolist() == [0, 2.5, 3.5, 6]
    ours, paper = (extended(**{"wsc.reset": name, "wsc.average": False}) for name in ("towards_mean", "blend"))
    assert ours["train_loss"][0] == paper["train_loss"][0] and ours["train_loss"][1] != paper["train_loss"][1]


@pytest.mark.slow
def test_the_pages_analysis_is_recorded(extended, tmp_path):
    extended(analyse=["norms"], save_weights=True)
    (path,), (saved,) = (list((tmp_path / "runs").rglob(name)) for name in ("analyses.jsonl", "weights.pt"))
    norms = [json.loads(line)["norms"]["norm"] for line in path.read_text().splitlines()]
    counted = ("running_mean", "running_var", "num_batches_tracked")
    weights = {
        name: value
        for name, value in load_state(saved)["learner"].items()
        if name.startswith("network.") and not name.endswith(counted) and isinstance(value, torch.Tensor)
    }
    squares = sum(value.double().square().sum().item() for value in weights.values())
    assert len(norms) == 3 and norms[-1] == pytest.approx(squares**0.5, rel=1e-5)


# ---- the benchmarks --------------------------------------------------------------------------------------------------

SMALL = {  # by script: options that make it quick
    "throughput": "--shape small --images 20 --batch-size 8 --epochs 1 --repeats 1 --workers 1",
    "engine_ablation": "--shape small --images 20 --batch-size 8 --epochs 1 --repeats 1 --parts whole memory",
    "run_cost": "--shape small --increment 2 --epochs 1 --images 2 --memory 1 --repeats 1 --methods replay",
    "keep_up_to_date": "--epochs 1 1 --ways 'WSC, all images kept'",
    "monthly_updates": "--months 2 --images 2 --seeds 1 --ways SLDA",
    "gate": "--seeds 1 --draws 2 --photographs 1 2",
    "planted_faults": "--draws 1 --classes 3 --photographs 1 --planted 1",
    "upkeep": "--data digits --classes 2 2 --images 50 --epochs 1 1 --draws 2 --repeats 1 --backbone resnet8",
    "peak_memory": "--methods replay --tasks 2 --batch-size 8",
    "scaling": "--shapes cifar --processes 2 --threads 1 --steps 1 --batch-size 8 --precision fp32",
    "image_folder": "--images 2600 --batch-size 8 --caches false --workers 0",
    "backbone_settings": "--backbone timm:test_efficientnet --image-size 32 --batch-size 4 --steps 1 --repeats 1",
    "predict_precision": "--backbones test_efficientnet:32 --repeats 1",
    "consolidation_overhead": "--backbone resnet8 --batch-size 4 --image-size 8 --steps 12 --repeats 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_pages_benchmarks_run(name, tmp_path, data_sets):
    if name in ("backbone_settings", "gate", "monthly_updates", "planted_faults", "predict_precision"):
        pytest.importorskip("timm")
    options = shlex.split(SMALL[name])
    if name in ("gate", "keep_up_to_date", "monthly_updates", "planted_faults", "predict_precision"):
        shutil.copytree(data_sets / "imagenet100", tmp_path / "imagenet100")
        options += ["--data", tmp_path / "imagenet100"]
    if name in ("gate", "planted_faults"):  # which learn further photographs of a class
        for path in (tmp_path / "imagenet100/train").glob("*/image.jpg"):
            with Image.open(path) as image:  # another one: SLDA learns each image once
                ImageOps.invert(image).save(path.with_name("further.jpg"))
    if name == "predict_precision":
        import timm
        from safetensors.torch import save_file

        save_file(timm.create_model("test_efficientnet").state_dict(), tmp_path / "test_efficientnet.safetensors")
        options += ["--weights", tmp_path]
    if name == "image_folder":
        options += ["--folder", tmp_path / "made"]
    script(ROOT / f"benchmarks/{name}.py", *options, "--out", tmp_path / "record.json")
    written = (tmp_path / "record.json").read_text()
    assert {"commit", "device", "torch"} <= set(json.loads(written))
    if name == "monthly_updates":  # what is there is not measured again
        script(ROOT / f"benchmarks/{name}.py", *options, "--out", tmp_path / "record.json")
        assert (tmp_path / "record.json").read_text() == written


def test_the_study_of_short_tasks_runs(tmp_path):
    """It writes rows, not a record."""
    options = "--loops sgd --methods replay --epochs 2 --seeds 2".split()
    script(ROOT / "results/studies/short_tasks/short_tasks.py", *options, "--out", tmp_path / "rows.csv")
    (row,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    assert row["method"] == "replay" and 0 < float(row["0"]) < 100 and 0 < float(row["1"]) < 100


def test_every_benchmark_of_these_pages_is_among_them():
    pages = [ROOT / f"docs/{page}.md" for page in ("speed", "wsc", "your_classifier", "pretrained")]
    text = "".join(page.read_text() for page in [*pages, ROOT / "results/benchmarks/keep_up_to_date/README.md"])
    needs_pilot, of_another_page = {"pilot_fidelity", "pilot_speed"}, {"planted_faults", "predict_precision"}
    found = set(re.findall(r"benchmarks/(\w+)\.py", text))
    assert found | of_another_page == {*SMALL, *needs_pilot}


# ---- links, and what is generated ------------------------------------------------------------------------------------


NOTES = sorted((ROOT / "results").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for place, _, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(#([^)]*))?\)", text):
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), place
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, (place, anchor)


def slug(heading):
    """A heading's anchor, as GitHub and MkDocs make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.fixture(scope="module")
def scripts():
    """The modules of docs/scripts by name."""
    folder = ROOT / "docs" / "scripts"
    sys.path.insert(0, str(folder))
    yield lambda name: importlib.import_module(name)
    sys.path.remove(str(folder))


def test_tables_of_keys_are_those_of_the_declarations(scripts):
    generate = scripts("generate")
    for name in generate.GENERATED:
        assert generate.page(name) == generate.file_of(name).read_text(encoding="utf-8"), "run docs/scripts/generate.py"


def test_the_readmes_figure_shows_the_records_of_the_papers_schedule(scripts, tmp_path):
    figure = scripts("figure")
    shown = shown_in(ROOT / "docs/images/paper_schedule.svg")
    for memory in ("20", "200"):
        for method in ("replay", "wsc"):
            record = json.loads((ROOT / f"results/studies/cifar100_paper_schedule/{method}-m{memory}.json").read_text())
            assert record["curve"] in shown[memory][method]
    assert {int(memory): methods for memory, methods in shown.items()} == figure.curves()
    assert figure.paper_averages(20, "wsc") == [52.0, 52.16]  # Tables of the main results, the ablation, the retraining
    figure.draw_schedule(tmp_path / "figure.svg")
    assert shown_in(tmp_path / "figure.svg") == shown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for memory in ("20", "200"):
        averages = {method: statistics.mean(shown[memory][method][0]) for method in ("replay", "wsc")}
        assert f"{averages['wsc'] - averages['replay']:.2f}" in readme


def test_the_figure_of_all_methods_shows_the_records(scripts, tmp_path):
    figure = scripts("figure")
    shown = shown_in(ROOT / "docs/images/accuracy_and_cost.svg")
    assert {int(memory): values for memory, values in shown.items()} == figure.points()
    record = json.loads((ROOT / "results/studies/cifar100_short_all/wsc-m200.json").read_text())
    assert shown["200"]["wsc"][1] == record["avg_acc"]
    figure.draw(tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_examples_of_the_help_are_quoted():
    from pycil_wsc.launch.command import EXAMPLES

    examples = [re.split(r"\s{2,}", line.strip())[0] for line in EXAMPLES.splitlines() if line.startswith("  ")]
    assert len(list(commands("\n".join(examples)))) == len(examples) > 5 and "--set '" in EXAMPLES


def test_the_first_task_is_consolidated_nowhere_by_default_and_the_pages_say_so():
    from pycil_wsc.config.loading import resolve

    assert resolve({}).wsc.first_task is False
    for page, says in {
        "any_loop": "All but the first: before it the weights are random",
        "pycil": "The consolidation begins with the second task.",
        "huggingface": "The first task is trained without the callback.",
        "language_models": "The first task is Replay's unless `wsc.first_task` is set.",
        "wsc": "In each task after the first:",
    }.items():
        assert says in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


def test_the_page_lists_the_keys_that_make_no_new_run():
    from pycil_wsc.config.image_config import KEYS
    from pycil_wsc.keys import RESULT

    page = (ROOT / "docs/configuration.md").read_text()
    (listed,) = re.findall(r"These keys do not make a new run:\n\n(.*?)\n\n", page, re.DOTALL)
    others = {name for name, key in KEYS.items() if key.decides not in RESULT}
    assert set(re.findall(r"`(\w+)`", listed)) == others - {"prefix", "out"}  # they decide the folder


def test_class_names_of_a_file_are_documented():
    text = (ROOT / "docs/getting_started.md").read_text(encoding="utf-8")
    assert re.search(r"classes=\[.*\],  # optional: names for the report", text) and "`classes`" in text


def test_the_citation_file_cites_what_the_readme_cites():
    yaml = pytest.importorskip("yaml")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^@inproceedings\{.*?^\}", readme, re.DOTALL | re.MULTILINE)
    cited = dict(re.findall(r"^ *(\w+) *= \{(.*)\},?$", entry, re.MULTILINE))
    authors = [f"{each['given-names']} {each['family-names']}" for each in paper["authors"]]
    assert cited == {
        "title": paper["title"],
        "author": " and ".join(authors),
        "booktitle": paper["collection-title"],
        "year": str(paper["year"]),
        "url": paper["url"],
    }


def test_the_figure_of_the_classifier_kept_up_to_date_shows_the_records(scripts, tmp_path):
    figure = scripts("upkeep_figure")
    shown = shown_in(ROOT / "docs/images/upkeep.svg")
    assert shown == figure.errors()
    figure.draw(tmp_path / "figure.svg")
    assert shown_in(tmp_path / "figure.svg") == shown


def test_the_two_commands_of_the_readme_are_as_they_are():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "pip install -r requirements.txt && python main.py --config exps/quickstart.json" in lines
    assert "pip install -r requirements.txt && pytest" in lines


DOORS = ("Research", "Applications", "WSC in your own loop", "Language models")


def test_readme_home_and_navigation_have_the_same_doors():
    pages = (ROOT / "README.md", ROOT / "docs/index.md")
    for page in pages:
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert [heading for heading in headings if heading in DOORS] == [*DOORS], page.name
    menu = re.findall(r"^  - ([^:\n]+):", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)
    assert menu == ["Home", *DOORS, "Project"]


BUDGET = 27_000  # words in all


def test_no_sentence_is_longer_than_forty_words(scripts):
    words = scripts("words")
    long = {path.name: words.too_long(words.prose(path.read_text(encoding="utf-8"))) for path in words.pages()}
    assert {name: sentences for name, sentences in long.items() if sentences} == {}


def test_the_pages_have_no_more_words_than_they_need(scripts):
    words = scripts("words")
    counts = {path.name: words.words(words.by_hand(path)) for path in words.pages()}
    assert len(counts) > 25 and sum(counts.values()) <= BUDGET
    assert counts["claims.md"] > 0 and counts["methods.md"] <= 2413


def test_words_are_counted_without_code_and_generated_parts(scripts):
    words = scripts("words")
    text = (
        "# One two\n\n```bash\npip install x\n```\n<!-- keys: run -->\n| a |\n<!-- end -->\n[three](four.md) | - five\n"
    )
    assert words.words(words.prose(text)) == 4
    long, short = "Word " * 41 + "end.", "Word " * 39 + "end."
    assert words.too_long(f"{short} {long}\n- {short}") == [long]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_begins_with_what_the_reader_can_do_and_a_block_that_runs(page):
    text = page.read_text(encoding="utf-8")
    before, _, _ = text.partition("```")
    assert "This page shows" in before and len(before.split()) <= 100
    assert any(language not in NOT_RUN for language, _, _ in blocks(page.relative_to(ROOT)))


def test_the_readme_is_of_a_readable_length():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def learners_of_pycil():
    """PyCIL's 26 files have these names; a file runs if its learner is one of ours."""
    theirs = (
        "acil aper_finetune beef bic coil der ds-al ewc fetril finetune foster gem icarl il2a lwf memo pass podnet "
        "replay rmm-foster rmm-icarl rmm-pretrain simplecil ssre tagfex wa"
    ).split()
    assert len(theirs) == 26
    return sorted(name for name in theirs if name in registry.learners)


def test_pycils_files_that_run_are_those_that_the_pages_name():
    ours = learners_of_pycil()
    assert len(ours) == 25
    page = (ROOT / "docs/pycil.md").read_text()
    (said,) = re.findall(r"[Tt]wenty-five of the 26 JSON files.*?\.\s", page, re.DOTALL)
    assert sorted(set(re.findall(r"`([\w-]+)`", said))) == ours
    assert "run unchanged, except one of each." in (ROOT / "README.md").read_text()


def test_the_readme_names_every_method_once():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| family \|.*\n\|[-|]+\n((?:\|.*\n)+)", readme, re.MULTILINE)[1]
    named = re.findall(r"`([\w-]+)`", rows)
    built_in = [name for name, learner in registry.learners.items() if learner.__module__.startswith("pycil_wsc.")]
    assert sorted(named) == sorted(built_in)
    assert f"{len(named)} methods." in readme


def test_the_comparison_with_pycil_has_every_file_that_runs():
    page = (ROOT / "docs/pycil.md").read_text().partition("## Compared with PyCIL itself")[2]
    assert (
        sorted(re.findall(r"^\| `([\w-]+)` \| \S+ \| [\d.]+ \| [\d.]+ \|$", page, re.MULTILINE)) == learners_of_pycil()
    )


# ---- the notebook and the site ---------------------------------------------------------------------------------------


def test_the_notebook_installs_the_repository_that_it_was_opened_from_only_where_it_is_needed(monkeypatch):
    """Colab's list of sessions has the address."""
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))
    cell = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    installed = []
    monkeypatch.setattr("subprocess.run", lambda command, check: installed.append(command))
    exec(cell, {})
    assert installed == []
    page = "https%3A//github.com/someone/continual.learning/blob/main/docs/tutorial.ipynb"
    sessions = json.dumps([{"path": f"fileId={page}", "kernel": {}}]).encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda address: io.BytesIO(sessions))
    monkeypatch.setattr("socket.gethostbyname", lambda name: "172.28.0.12")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(cell, {})
    assert [command[-1] for command in installed] == ["git+https://github.com/someone/continual.learning"]
    sessions = json.dumps([{"path": "fileId=uploaded.ipynb", "kernel": {}}]).encode()
    with pytest.raises(SystemExit, match="^Opened without a GitHub address: install pycil_wsc"):
        exec(cell, {})


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells, in their order, in a folder of its own, with shorter training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shorter = [re.sub(r'(epochs?"): 8,', r"\1: 1,", cell) for cell in cells]
    assert shorter != cells
    names = {"__name__": "__main__"}
    for cell in shorter:
        exec(compile(cell, "tutorial.ipynb", "exec"), names)
    assert names["accuracy"] == pytest.approx(names["resumed"]["last_acc"])
    assert names["resumed"]["curve"] == names["result"]["curve"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    assert "wsc.retain" in (tmp_path / "configuration/index.html").read_text(encoding="utf-8")
