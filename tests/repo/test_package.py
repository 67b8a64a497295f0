"""The wheel works by itself: from its own files, in a folder that has modules of the same names as PyCIL's."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from support import fresh
from support.pages import blocks
from support.small_runs import small_data

import main
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.launch import command

ROOT = Path(__file__).resolve().parents[2]
EXTRA_OF = {"cluster": "ray"}  # requirements-<name>.txt is the extra <name>, but for these
CONFIG = {
    "dataset": "npz:data.npz",
    "data_root": ".",
    "model_name": "wsc",
    "convnet_type": "resnet8",
    "init_cls": 3,
    "increment": 3,
    "memory_per_class": 2,
    "init_epoch": 1,
    "epochs": 2,
    "wsc.average_every": 1,
    "device": "cpu",
    "save_weights": True,
}
TWO = ["--config", "config.json", "--set", "model_name=[wsc,my_derpp]", "--workers", "2"]
FOR_PYCIL = {"model_name": "wsc", "init_cls": 2, "increment": 2, "memory_per_class": 5, "device": [-1], "seed": [1]}
USE = """
import itertools, runpy, sys
from pycil_wsc.report import page
from pycil_wsc.report.figures import style

style.FORMATS = {"svg": {"Date": None}}  # Matplotlib writes the others, whatever the wheel has
figures = page.figures
page.figures = lambda group: itertools.islice(figures(group), 1)
sys.argv = [COMMAND, *TWO]
try:
    runpy.run_path(COMMAND, run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code

print("trained")

import pathlib
import numpy as np
import pycil_wsc

model = pycil_wsc.load(next(pathlib.Path("runs").rglob("wsc/*/*/result.json")).parent)
labels = model.predict(np.load("data.npz")["test_x"])
assert set(labels) <= set(range(6)), labels

import torch
from pycil_wsc.consolidation import Blend, WeightSpaceConsolidation

layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
wsc = WeightSpaceConsolidation(layer.named_parameters(), warmup_steps=1, retain=0.5, reset=Blend()).attach(optimizer)
for _ in range(3):
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
wsc.finish()
assert wsc.resets == 1

if TRANSFORMERS:
    import pycil_wsc.plugins.huggingface

    assert pycil_wsc.plugins.huggingface.WSCCallback.__name__ == "WSCCallback"

print(*sorted({name.split(".")[0] for name in sys.modules} & {"utils", "convs", "main", "tests"}))
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "pycil_wsc"))

sys.argv = ["plugin", "--pycil", PYCIL, "--config", "pycil.json"]
runpy.run_module("pycil_wsc.plugins.pycil", run_name="__main__", alter_sys=True)
"""


def run(*command, cwd, **environment):
    """What a command prints, without the paths and settings of this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder is left in the checkout or read from it."""
    source, folder = tmp_path_factory.mktemp("source") / "pycil_wsc", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "pycil_wsc", source / "pycil_wsc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", *build, cwd=source)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def binaries(wheel, tmp_path_factory):
    """The commands of a fresh environment with the wheel in it, which sees torch where it is installed already."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    scheme = {"base": environment, "platbase": environment}
    folder = environment / ("Scripts" if os.name == "nt" else "bin")
    name = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10 has the second alone
    site = Path(sysconfig.get_path("purelib", name, scheme))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = ["--python", folder / "python", "install", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", *install, cwd=environment)
    return folder


@pytest.fixture(scope="module")
def learner_package(tmp_path_factory):
    """The page's package with the page's DER++, as it is installed."""
    folder = tmp_path_factory.mktemp("learner")
    page, source, site = blocks("docs/extending.md"), folder / "source", folder / "site"
    (source / "my_learners").mkdir(parents=True)
    (learner,) = (code for _, title, code in page if title == "pycil_wsc/methods/my_derpp.py")
    (project,) = (code for language, _, code in page if language == "toml")
    (source / "my_learners" / "my_derpp.py").write_text(learner)
    (source / "pyproject.toml").write_text(project)
    install = ["install", source, "--no-build-isolation", "--no-deps", "--no-index", "--target", site]
    run(sys.executable, "-m", "pip", *install, cwd=folder)
    return site


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A project of somebody else, with ``utils`` and ``convs`` of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "utils.py").write_text("raise ImportError('utils of another project')\n")
    (folder / "convs").mkdir()
    (folder / "convs" / "__init__.py").write_text("raise ImportError('convs of another project')\n")
    small_data(folder / "data.npz", per_class=4)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "pycil.json").write_text(json.dumps(FOR_PYCIL))
    return folder


@pytest.fixture(scope="module")
def used(binaries, learner_package, elsewhere):
    """The lines that a script prints which uses the wheel, see ``USE``: its command has trained WSC and another
    package's learner in the folder ``elsewhere``, a process for each.
    """
    given = {
        "COMMAND": str(binaries / "pycil-wsc"),
        "TWO": TWO,
        "TRANSFORMERS": find_spec("transformers") is not None,
        "PYCIL": str(ROOT / "tests" / "pycil_standin"),
    }
    values = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    printed = run(binaries / "python", "-c", values + USE, cwd=elsewhere, PYTHONPATH=str(learner_package))
    return printed.partition("trained\n")[2].splitlines()


def requirements(name):
    """The set of a requirements file, with those of the files it names."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    own = {Requirement(line) for line in lines if line and not line.startswith("-r ")}
    return own.union(*(requirements(line.removeprefix("-r ")) for line in lines if line.startswith("-r ")))


def metadata(wheel):
    """What the wheel says of itself: header lines, and the README as payload."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return message_from_bytes(archive.read(name))


def declared(wheel, extra=None):
    """What the wheel says it needs: always, or more with an extra."""
    every = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    chosen = [each for each in every if (each.marker.evaluate({"extra": extra or ""}) if each.marker else not extra)]
    return {Requirement(str(each).split(";")[0]) for each in chosen}


@pytest.mark.slow
def test_the_requirements_files_are_what_the_wheel_declares(wheel):
    always = declared(wheel)
    assert always and always <= requirements("requirements.txt") <= always | declared(wheel, "dev")
    assert requirements("requirements-dev.txt") == always | declared(wheel, "dev")
    for path in ROOT.glob("requirements-*.txt"):
        name = path.stem.removeprefix("requirements-")
        needed = declared(wheel, EXTRA_OF.get(name, name))
        assert needed and needed <= requirements(path.name) <= always | declared(wheel, "dev") | needed, path.name


def test_the_wheel_and_the_readme_agree_on_the_licence(wheel):
    """As long as no licence is given, both say so."""
    given = any(ROOT.glob("LICEN[CS]E*"))
    assert given != (metadata(wheel)["License-Expression"] == "LicenseRef-None-Given-Yet")
    assert given != ("No licence has been given yet." in metadata(wheel).get_payload())


def test_the_workflow_runs_the_oldest_and_the_newest_python_of_the_metadata(wheel):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    named = [line.rpartition(" ")[2] for line in metadata(wheel).get_all("Classifier")]
    named.sort(key=lambda version: tuple(map(int, version.split("."))))
    assert metadata(wheel)["Requires-Python"] == f">={named[0]}"
    assert workflow["jobs"]["run"]["strategy"]["matrix"]["python"] == [named[0], named[-1]]
    assert {"run": "bash .ci/run"} in workflow["jobs"]["run"]["steps"]


def test_type_checkers_read_the_wheels_annotations(wheel):
    """PEP 561; what they then know of the public names is in ``tests/typed.py``."""
    with zipfile.ZipFile(wheel) as archive:
        assert "pycil_wsc/py.typed" in archive.namelist()
    text = (ROOT / "pycil_wsc/__init__.py").read_text()
    public = re.findall(r"import (\w+) as \1\n", text)
    assert set(re.findall(r'if name == "(\w+)"', text)) == set(public) - {"__version__"}
    typed = (ROOT / "tests/typed.py").read_text()
    assert all(f"pycil_wsc.{name}" in typed for name in public)


@pytest.mark.slow
def test_the_wheel_works_where_other_modules_have_pycils_names(elsewhere, used, binaries):
    (result,) = (json.loads(path.read_text()) for path in elsewhere.rglob("wsc/*/*/result.json"))
    assert len(result["curve"]) == 2
    (page,) = elsewhere.rglob("report/index.html")
    assert "wsc" in page.read_text() and list(page.parent.glob("figures/*.svg"))
    foreign, files, *_ = used
    assert foreign == ""
    assert files and all(Path(file).is_relative_to(binaries.parent) for file in files.split())


@pytest.mark.slow
def test_the_wheels_plugin_trains_in_a_checkout_of_pycil(used):
    assert "\n".join(used[2:]).count("top1") == 3


@pytest.mark.slow
def test_a_learner_of_another_package_is_found_in_every_process(learner_package, binaries, used, elsewhere, tmp_path):
    assert len(list(elsewhere.rglob("my_derpp/*/*/result.json"))) == 1
    broken = shutil.copytree(learner_package, tmp_path / "site")
    (broken / "my_learners" / "my_derpp.py").write_text("import no_such_module")
    environment = os.environ | {"PYTHONPATH": str(broken)}
    command = [binaries / "pycil-wsc", *TWO]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == (
        "error: config.json: unknown model_name 'my_derpp'; did you mean 'derpp'? (left out: entry point 'my_derpp = "
        "my_learners.my_derpp' of the package 'my-learners' cannot be loaded (ModuleNotFoundError: No module named "
        "'no_such_module'); correct or uninstall that package)\n"
    )


@pytest.fixture
def added(monkeypatch, tmp_path):
    """Write a file of a learner into the package's folder, as a look-up in a new process finds it."""
    from pycil_wsc import methods

    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_broken", {})
    monkeypatch.chdir(tmp_path)

    def write(name, code):
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(registry.learners, "_modules", [f"pycil_wsc.methods.{name}"])
        monkeypatch.delitem(sys.modules, f"pycil_wsc.methods.{name}", raising=False)

    yield write
    for of in (registry.learners, registry.learner_defaults):
        of._disputed.clear()


COPIED = """
from torch import nn
from models.base import BaseLearner
class LwF(BaseLearner):
    def incremental_train(self, data_manager):
        pass
"""
UNUSABLE = {
    "mine.py:3: cannot be imported (ModuleNotFoundError: No module named 'models'); PyCIL's models.base is "
    "pycil_wsc.training.learner here": COPIED,
    "mine.py:4: cannot be imported (LwF.incremental_train: is PyCIL's, and never called here; use the hook loss": (
        COPIED.replace("models.base", "pycil_wsc.training.learner")
    ),
    "mine.py:2: cannot be imported (SyntaxError: '(' was never closed": "\nclass Mine(\n    pass",
    "mine.py: cannot be imported (SyntaxError: source code string cannot contain null bytes": "\0",
    "mine.py:1: cannot be imported (SystemExit: 3)": "raise SystemExit(3)",
    "mine.py:1: cannot be imported (AssertionError)": "raise AssertionError",
}


@pytest.mark.parametrize("line", UNUSABLE)
def test_a_file_of_a_learner_that_cannot_be_imported_is_one_line_and_other_methods_run(line, added, tmp_path, caplog):
    added("mine", UNUSABLE[line])
    (tmp_path / "config.json").write_text('{"dataset": "digits", "model_name": "replay"}')
    assert command.main(["--config", str(tmp_path / "config.json"), "--status"]) == 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"left out: {line}") and "\n" not in said
    with pytest.raises(UserError, match="unknown model_name 'mine'") as error:
        registry.learners["mine"]
    assert line in str(error.value)


def test_a_name_that_two_files_register_is_nobodys_and_costs_no_other(added):
    added("mine", COPIED.replace("models.base", "pycil_wsc.training.learner").replace("incremental_train", "loss"))
    code = "from pycil_wsc.methods.distillation.icarl import ICaRL as Old\n"
    code += "from pycil_wsc.registry import register_learner\n"
    added("mine", f'{code}\n@register_learner("replay")\nclass Mine(Old): ...')
    assert registry.learners["finetune"]
    with pytest.raises(
        UserError, match="'replay' is registered by pycil_wsc.methods.replay.replay.Replay and by .*Mine"
    ):
        registry.learners["replay"]


def test_the_error_for_an_unknown_key_names_a_learner_that_cannot_be_imported(added):
    added("mine", "import no_such_module")
    with pytest.raises(UserError, match=r"unknown key 'of_mine'.*mine.py:1: cannot be imported .*no_such_module"):
        resolve({"dataset": "digits", "model_name": "replay", "of_mine": 1})


def test_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(registry, "_broken", {"pycil_wsc.methods.replay.replay": "replay.py:1: cannot be imported"})
    with pytest.raises(UserError, match="^torch cannot be imported .*; repair it, for example by pip install"):
        registry.learners["my_method"]


def test_a_broken_entry_point_is_named_and_hides_no_other(monkeypatch, tmp_path):
    (tmp_path / "sound_extension.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [EntryPoint(name, f"{name}_extension", "pycil_wsc") for name in ("broken", "sound")]
    look_up_with(lambda group: entries, monkeypatch)
    assert sys.modules["sound_extension"].loaded
    (line,) = registry.left_out()
    assert line.startswith("entry point 'broken = broken_extension' of the package '?' cannot be loaded (Module")
    with pytest.raises(UserError, match="unknown model_name 'of_broken'.*entry point 'broken = broken_extension' of"):
        registry.learners["of_broken"]


def test_an_entry_point_that_ends_the_program_is_named(monkeypatch, tmp_path):
    (tmp_path / "ending_extension.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("ending", "ending_extension", "pycil_wsc")
    look_up_with(lambda group: [entry], monkeypatch)
    (line,) = registry.left_out()
    assert line.startswith("entry point 'ending = ending_extension' of the package '?' cannot be loaded (SystemExit: 3")


def test_a_look_up_after_one_that_was_interrupted_loads_the_entry_points(monkeypatch, tmp_path):
    (tmp_path / "interrupted_extension.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("interrupted", "interrupted_extension", "pycil_wsc")
    for where in ("metadata", "module"):
        found = interrupt if where == "metadata" else lambda group: [Mock(load=interrupt)]
        with pytest.raises(KeyboardInterrupt):
            look_up_with(found, monkeypatch)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        assert registry.learners["replay"] and sys.modules.pop("interrupted_extension").loaded


def interrupt(group=None):
    raise KeyboardInterrupt


@pytest.mark.parametrize("content, line", [(b"\xff", "the metadata of an"), (b"[pycil_wsc]\nx = \n", "'x = '")])
def test_a_package_whose_metadata_are_broken_is_one_line(content, line, monkeypatch, tmp_path):
    folder = tmp_path / "broken.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    look_up_with(entry_points, monkeypatch)
    assert [line in said for said in registry.left_out()] == [True]


@pytest.fixture
def slow_to_import(monkeypatch, tmp_path):
    """A registry with one entry, of a module that takes 0.2 s to import, and a file: while it is there, the import is
    interrupted.
    """
    stop = tmp_path / "stop"
    code = f"""
import pathlib, time
from pycil_wsc import registry
if pathlib.Path({str(stop)!r}).exists():
    raise KeyboardInterrupt
time.sleep(0.2)
registry.probe.add("one", 1)
"""
    (tmp_path / "slow_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "probe", registry.Registry("probe", ["slow_module"]), raising=False)
    yield registry.probe, stop
    sys.modules.pop("slow_module", None)


@pytest.mark.slow
def test_what_registers_something_is_imported_before_the_first_run_of_several_workers(tmp_path):
    """Otherwise a run that begins after an edit would have a part of the new code."""
    code = """
import importlib, sys
from pycil_wsc import registry
for name in ["pycil_wsc.launch.workers", *registry.own_modules()]:
    importlib.import_module(name)
before = set(sys.modules)
for each in vars(registry).values():
    if isinstance(each, registry.Registry):
        list(each)
print([name for name in sys.modules if name.startswith("pycil_wsc") and name not in before])
"""
    assert fresh.printed(code, tmp_path / "probe.py") == "[]\n"


def test_threads_that_look_up_at_the_same_time_all_find_it(slow_to_import):
    probe, _ = slow_to_import
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: probe["one"], range(4))) == [1, 1, 1, 1]


def test_a_look_up_after_one_that_was_interrupted_finds_it(slow_to_import):
    probe, stop = slow_to_import
    stop.touch()
    with pytest.raises(KeyboardInterrupt):
        probe.get("one")
    stop.unlink()
    assert probe["one"] == 1


def look_up_with(entry_points, monkeypatch):
    """Look a learner up in a process that has not done so before."""
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_groups", ["pycil_wsc"])
    monkeypatch.setattr(registry, "_broken", {})
    registry.learners["replay"]


def test_the_command_is_main_py():
    assert main.main is command.main
