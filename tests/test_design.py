"""What holds of the tree as a whole: the direction of imports, and that the README's code is true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycil_wsc.config import resolve
from pycil_wsc.trainer import Run
from utils import factory
from utils.data import load_dataset

ROOT = Path(__file__).parent.parent

ALLOWED = {  # what a module may import of ours; the longest matching name counts
    "utils.errors": [],
    "utils.factory": ["utils.errors"],
    "utils": ["utils", "convs"],
    "convs": ["convs", "utils.factory"],
    "pycil_wsc.consolidation": ["pycil_wsc.consolidation"],
    "pycil_wsc.plugins": ["pycil_wsc.consolidation"],
    "pycil_wsc.learners": ["pycil_wsc.learners", "pycil_wsc.consolidation", "utils"],
    "pycil_wsc.keys": ["utils.errors"],
    "pycil_wsc.config": ["pycil_wsc.analysis", "pycil_wsc.keys", "pycil_wsc.learners", "pycil_wsc.consolidation.importance", "pycil_wsc.llm.config", "utils"],
    "pycil_wsc.progress": ["utils.errors"],
    "pycil_wsc.analysis": ["pycil_wsc.analysis", "utils"],
    "pycil_wsc.machine": ["utils.allocator", "utils.errors"],
    "pycil_wsc.scalars": ["utils"],
    "pycil_wsc.saved": ["pycil_wsc.config", "pycil_wsc.machine", "utils"],
    "pycil_wsc.first_task": ["utils"],
    "pycil_wsc.trainer": [f"pycil_wsc.{name}" for name in ("analysis", "first_task", "learners", "machine", "progress", "saved", "scalars")] + ["utils"],
    "pycil_wsc.report": ["pycil_wsc.report", "pycil_wsc.keys", "utils"],
    "pycil_wsc.llm": [f"pycil_wsc.{name}" for name in ("llm", "consolidation", "keys", "learners", "machine", "progress", "trainer")]
    + [f"utils.{name}" for name in ("allocator", "errors", "factory", "files", "metrics", "seeding")],
    "pycil_wsc.attempt": [f"pycil_wsc.llm.{name}" for name in ("corpus", "trainer")] + [f"pycil_wsc.{name}" for name in ("config", "machine", "progress", "trainer")] + ["pycil_wsc.report", "utils"],
    "pycil_wsc.workers": ["pycil_wsc.attempt", "pycil_wsc.progress"],
    "pycil_wsc.cluster": ["pycil_wsc.attempt", "pycil_wsc.machine", "pycil_wsc.progress", "utils"],
    "pycil_wsc.sweep": [f"pycil_wsc.{name}" for name in ("analysis", "attempt", "cluster", "llm.parallel", "workers", "progress", "trainer", "report")] + ["utils"],
    "pycil_wsc": ["pycil_wsc.saved"],  # lazily, see below
    "main": ["pycil_wsc.config", "pycil_wsc.llm.torchrun", "pycil_wsc.sweep", "utils.errors"],
}


def modules():
    for path in [*ROOT.glob("*.py"), *(p for top in ("convs", "utils", "pycil_wsc") for p in (ROOT / top).rglob("*.py"))]:
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
    foreign = {m.split(".")[0] for name, path in modules() if within(name, ["pycil_wsc.consolidation"]) for m in imports(path)}
    assert foreign - sys.stdlib_module_names <= {"torch", "pycil_wsc"}


def test_importing_the_consolidation_loads_torch_and_nothing_heavier():
    script = "import sys, pycil_wsc.consolidation; print([m for m in ('torchvision', 'sklearn', 'pycil_wsc.saved', 'utils') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_readmes_learner_learns_three_tasks(tmp_path, monkeypatch):
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "register_learner" in block)
    monkeypatch.setattr(factory, "learners", _copy(factory.learners))
    monkeypatch.setattr(factory, "learner_defaults", _copy(factory.learner_defaults))
    exec(source, {"__name__": "lwf"})
    config = resolve({"model_name": "lwf", "dataset": "digits", "init_cls": 4, "increment": 3, "init_epoch": 2, "epochs": 1, "batch_size": 64,
                      "convnet_type": "resnet8", "out": str(tmp_path), "distill": 2, "device": "cpu"})  # fmt: skip
    result = Run(config, load_dataset("digits", ".")).execute()
    assert len(result["curve"]) == 3 and result["new_acc"] > 40


def _copy(registry):
    copy = type(registry)(registry.kind)
    copy.update(registry)
    return copy
