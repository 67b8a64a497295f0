"""What holds of the tree as a whole: the direction of imports, and that the README's code is true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.runs.run import Run

ROOT = Path(__file__).parent.parent

LEAVES = ["pycil_wsc.errors", "pycil_wsc.registry", "pycil_wsc.files", "pycil_wsc.seeding", "pycil_wsc.allocator"]
ROOMS = ["data", "networks", "engine", "learners", "config", "runs"]  # each may import the rooms before it


def rooms_up_to(room):
    return [f"pycil_wsc.{name}" for name in ROOMS[: ROOMS.index(room) + 1]]


ALLOWED = {  # what a module may import of ours; the longest matching name counts
    **dict.fromkeys(LEAVES, ["pycil_wsc.errors"]),
    **{f"pycil_wsc.{room}": [*LEAVES, "pycil_wsc.consolidation", *rooms_up_to(room)] for room in ROOMS},
    "pycil_wsc.consolidation": ["pycil_wsc.consolidation"],
    "pycil_wsc.plugins": ["pycil_wsc.consolidation", "pycil_wsc.plugins"],
    "pycil_wsc.analysis": [*LEAVES, "pycil_wsc.analysis"],
    "pycil_wsc.config": [*LEAVES, "pycil_wsc.analysis", "pycil_wsc.consolidation", *rooms_up_to("config")],
    "pycil_wsc.runs": [*LEAVES, "pycil_wsc.analysis", "pycil_wsc.report", *rooms_up_to("runs")],
    "pycil_wsc.report": [*LEAVES, "pycil_wsc.report", "pycil_wsc.config.keys"],
    "pycil_wsc.llm": [*LEAVES, "pycil_wsc.llm", "pycil_wsc.consolidation", *rooms_up_to("runs")],
    "pycil_wsc": ["pycil_wsc.runs.weights"],  # lazily, see below
    "main": ["pycil_wsc.runs", "pycil_wsc.config.loading", "pycil_wsc.errors", "pycil_wsc.llm.torchrun"],
}
ALLOWED["pycil_wsc.config"] += ["pycil_wsc.llm.config"]
ALLOWED["pycil_wsc.runs"] += ["pycil_wsc.llm"]


def modules():
    for path in [
        *ROOT.glob("*.py"),
        *(p for top in ("pycil_wsc",) for p in (ROOT / top).rglob("*.py")),
    ]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, parents):
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@pytest.mark.parametrize("name, path", list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_one_way(name, path):
    rule = max((known for known in ALLOWED if within(name, [known])), key=len)
    ours = [module for module in imports(path) if within(module, ["convs", "utils", "pycil_wsc"])]
    assert [module for module in ours if not within(module, ALLOWED[rule])] == []


def test_the_consolidation_needs_nothing_but_torch():
    foreign = {
        m.split(".")[0] for name, path in modules() if within(name, ["pycil_wsc.consolidation"]) for m in imports(path)
    }
    assert foreign - sys.stdlib_module_names <= {"torch", "pycil_wsc"}


def test_importing_the_consolidation_loads_torch_and_nothing_heavier():
    script = "import sys, pycil_wsc.consolidation; print([m for m in ('torchvision', 'sklearn', 'pycil_wsc.runs', 'pycil_wsc.data') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_the_readmes_learner_learns_three_tasks(tmp_path, monkeypatch):
    (source,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "register_learner" in block
    )
    monkeypatch.setattr(registry, "learners", _copy(registry.learners))
    monkeypatch.setattr(registry, "learner_defaults", _copy(registry.learner_defaults))
    exec(source, {"__name__": "lwf"})
    config = resolve(
        {
            "model_name": "lwf",
            "dataset": "digits",
            "init_cls": 4,
            "increment": 3,
            "init_epoch": 2,
            "epochs": 1,
            "batch_size": 64,
            "convnet_type": "resnet8",
            "out": str(tmp_path),
            "distill": 2,
            "device": "cpu",
        }
    )
    result = Run(config, load_dataset("digits", ".")).execute()
    assert len(result["curve"]) == 3 and result["new_acc"] > 40


def _copy(registry):
    copy = type(registry)(registry.kind)
    copy.update(registry)
    return copy
