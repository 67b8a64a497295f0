"""Properties of the whole repository: the direction of imports, and the README's code."""

import ast
import json
import subprocess
import sys

import numpy as np
import pytest
from structure import ROOT, annotated, cycles, functions, imports, modules, parsed, within
from support import fresh

LEAVES = [
    f"pycil_wsc.{name}"
    for name in (
        "errors",
        "registry",
        "keys",
        "files",
        "state",
        "seeding",
        "allocator",
        "devices",
        "output",
        "reproducibility",
        "lazy",
        "version",
    )
]
ROOMS = [
    "data",
    "networks",
    "training",
    "methods",
    "config",
    "results",
    "runs",
    "launch",
]  # each may import the rooms before it


def rooms_up_to(room):
    return [f"pycil_wsc.{name}" for name in ROOMS[: ROOMS.index(room) + 1]]


ALLOWED = {  # what a module may import of the package; the longest matching name counts
    **dict.fromkeys(LEAVES, ["pycil_wsc.errors", "pycil_wsc.allocator"]),
    "pycil_wsc.keys": ["pycil_wsc.errors", "pycil_wsc.files"],
    "pycil_wsc.state": ["pycil_wsc.errors", "pycil_wsc.files"],
    **{f"pycil_wsc.{room}": [*LEAVES, "pycil_wsc.consolidation", *rooms_up_to(room)] for room in ROOMS},
    "pycil_wsc.consolidation": ["pycil_wsc.consolidation"],
    "pycil_wsc.plugins": ["pycil_wsc.consolidation", "pycil_wsc.plugins"],
    "pycil_wsc.studies": [*LEAVES, "pycil_wsc.consolidation", "pycil_wsc.studies", *rooms_up_to("training")],
    "pycil_wsc.config": [
        *LEAVES,
        "pycil_wsc.consolidation",
        "pycil_wsc.studies.rival_keys",
        *rooms_up_to("config"),
    ],
    "pycil_wsc.methods": [*LEAVES, "pycil_wsc.consolidation", "pycil_wsc.studies", *rooms_up_to("methods")],
    "pycil_wsc.runs": [
        *LEAVES,
        "pycil_wsc.consolidation",
        "pycil_wsc.studies",
        *rooms_up_to("runs"),
    ],
    "pycil_wsc.launch": [
        *LEAVES,
        "pycil_wsc.report",
        "pycil_wsc.llm.config",
        "pycil_wsc.llm.kind",
        *rooms_up_to("launch"),
    ],
    "pycil_wsc.classifier": [*LEAVES, "pycil_wsc.classifier", *rooms_up_to("runs")],
    "pycil_wsc.classifier.class_names": [],
    **{  # its parts, each of which may import the first two
        f"pycil_wsc.classifier.{part}": [
            *LEAVES,
            f"pycil_wsc.classifier.{part}",
            "pycil_wsc.classifier.class_names",
            *(["pycil_wsc.classifier.predict"] if part != "predict" else []),
            *(["pycil_wsc.classifier.store"] if part in ("update", "export") else []),
            *rooms_up_to("runs"),
        ]
        for part in ("predict", "store", "update", "export")
    },
    "pycil_wsc.sklearn": [*LEAVES, "pycil_wsc.classifier", *rooms_up_to("data")],
    "pycil_wsc.results": [
        *LEAVES,
        "pycil_wsc.consolidation.options",
        "pycil_wsc.data.data_options",
        "pycil_wsc.config",
        "pycil_wsc.results",
    ],
    "pycil_wsc.report": [*LEAVES, "pycil_wsc.report", "pycil_wsc.results"],
    "pycil_wsc.llm": [
        *LEAVES,
        "pycil_wsc.llm",
        "pycil_wsc.consolidation",
        "pycil_wsc.plugins.huggingface",
        *rooms_up_to("runs"),
    ],
    "pycil_wsc": [  # lazily, see below
        "pycil_wsc.classifier.export.folder",
        "pycil_wsc.classifier.update.gate",
        "pycil_wsc.classifier.predict.load",
        "pycil_wsc.classifier.learner",
        "pycil_wsc.errors",
        "pycil_wsc.version",
    ],
    "main": ["pycil_wsc.launch.command"],
    "convs": ["convs", *LEAVES, "pycil_wsc.networks"],  # PyCIL's names over the package, which imports neither
    "utils": ["convs", "utils", *LEAVES, *rooms_up_to("runs")],
}


def test_imports_point_one_way():
    wrong = []
    for name, path in modules():
        allowed = ALLOWED[max((known for known in ALLOWED if within(name, [known])), key=len)]
        ours = (module for module in imports(path) if within(module, ["convs", "utils", "pycil_wsc"]))
        wrong += [f"{name} -> {module}" for module in ours if not within(module, allowed)]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other():
    assert not cycles()


KINDS_OF_DEVICES = ("cuda", "hip", "hpu", "mps", "mtia", "npu", "xpu")


def named_devices(path):
    """The lines of a file that name a kind of device: in ``torch.cuda``, ``tensor.cuda()``, "cuda" or "cuda:0"."""
    for node in ast.walk(parsed(path)):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.alias):
            name = node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
        if name in KINDS_OF_DEVICES:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_code_names_a_kind_of_device():
    """Not even ``pycil_wsc/devices.py``, which asks torch; tests do, and so are found."""
    paths = [path for _, path in modules()]
    for folder in ("benchmarks", "docs/scripts", "examples", "results"):
        paths += (ROOT / folder).rglob("*.py")
    assert [line for path in paths for line in named_devices(path)] == []
    assert len(list(named_devices(ROOT / "tests/training/test_devices.py"))) > 10


def test_public_functions_are_annotated():
    missing = [
        f"{path}: {name}" for _, path in modules() for name, f, public in functions(path) if public and not annotated(f)
    ]
    assert not missing, "\n".join(missing)


def test_only_the_launcher_imports_language_models():
    """No import by name either, as by ``importlib``."""
    named = [name for name, path in modules() if "pycil_wsc.llm" in path.read_text()]
    assert [name for name in named if not within(name, ["pycil_wsc.llm"])] == [
        "pycil_wsc.launch.attempt",
        "pycil_wsc.launch.command",
    ]


# methods of PyCIL and PILOT, which say nothing of themselves to us, and as they were when earlier results were written
OTHERS_METHODS = {
    "pycil_wsc.config.pycil_files",
    "pycil_wsc.config.pilot_files",
    "pycil_wsc.plugins.pycil",
    "pycil_wsc.results.old_schemas",
}


def test_what_is_true_of_a_method_stands_in_its_class_and_in_no_list_of_names():
    from pycil_wsc.registry import learners

    names = set(learners)
    lists = []
    for module, path in modules():
        if within(module, ["pycil_wsc.methods", "pycil_wsc.llm", *OTHERS_METHODS]):
            continue
        for node in ast.walk(parsed(path)):
            elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            strings = [element.value for element in elements if isinstance(element, ast.Constant)]
            if len(names.intersection(strings)) > 1:
                lists.append((module, node.lineno, strings))
    assert lists == []


def test_the_layout_of_a_saved_learner_is_known_to_its_owner():
    classifier = ["pycil_wsc.classifier"]  # which reads states of its own, and of earlier versions
    readers = [name for name, path in modules() if '"_extra_state"' in path.read_text()]
    assert [name for name in readers if not within(name, classifier)] == ["pycil_wsc.training.learner_state"]


def test_help_and_the_declared_keys_do_not_wait_for_torch():
    script = """
import contextlib, sys
from pycil_wsc.config import image_config, loading
from pycil_wsc.launch import command
with contextlib.suppress(SystemExit):
    command.parse(["--help"])
print("torch" in sys.modules)
"""
    assert printed_by("-c", script).splitlines()[-1] == "False"


def test_the_kinds_of_runs_do_not_wait_for_their_packages(tmp_path):
    heavy = ["transformers", "tokenizers", "peft"]
    script = f"""
import sys
from pycil_wsc.config.kinds import kinds
from pycil_wsc.launch import attempt
print(sorted(kinds), [name for name in {heavy} if name in sys.modules])
"""
    assert fresh.printed(script, tmp_path / "kinds.py", forgotten=heavy) == "['class_incremental', 'llm'] []\n"


SLOW = ["torchvision", "torch._dynamo", "pandas", "scipy", "sklearn", "matplotlib", "transformers", "timm"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--status", "--dry-run"])
def test_what_trains_nothing_does_not_wait_for_what_only_training_and_reports_need(option, tmp_path):
    images = np.zeros((4, 8, 8, 3), np.uint8)
    labels = np.array([0, 0, 1, 1])
    np.savez(tmp_path / "data.npz", train_x=images, train_y=labels, test_x=images, test_y=labels)
    keys = {"dataset": f"npz:{tmp_path}/data.npz", "model_name": ["replay", "wsc"], "convnet_type": "resnet8"}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"init_cls": 1, "increment": 1}))
    script = f"""
import sys
from pycil_wsc.launch.command import main
code = main(["--config", "{tmp_path}/config.json", "{option}"])
print(code, [name for name in {SLOW} if name in sys.modules])
"""
    assert printed_by("-c", script).splitlines()[-1] == "0 []"


def printed_by(*arguments):
    """What python prints, started with these arguments at the root."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_consolidation_needs_nothing_but_torch():
    foreign = {
        m.split(".")[0] for name, path in modules() if within(name, ["pycil_wsc.consolidation"]) for m in imports(path)
    }
    assert foreign - sys.stdlib_module_names <= {"torch", "pycil_wsc"}
