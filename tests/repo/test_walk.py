"""docs/how_a_step_runs.md and docs/development.md describe the code as it is."""

import ast
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from structure import PREDICTION, ROOT, STEP_OF_REPLAY, cycles, walks

import pycil_wsc
from pycil_wsc.training import loop

PACKAGE = ROOT / "pycil_wsc"
WALK = (ROOT / "docs/how_a_step_runs.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", WALK)


def defined(path):
    """The dotted names of a file's classes, functions and methods."""
    names = set()
    for node in ast.parse((PACKAGE / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_the_walk_is_of_some_length():
    assert len(NAMED) > 15


@pytest.mark.parametrize("path, names", NAMED)
def test_what_the_walk_names_is_there(path, names):
    assert set(re.findall(r"`([\w.]+)`", names)) <= defined(path)


def test_every_file_and_folder_that_the_walk_names_is_there():
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", WALK):
        assert (PACKAGE / path).exists(), path


def test_the_hooks_of_the_walk_are_called_in_its_order():
    """In the loop, and around it in the learner."""
    loop = (PACKAGE / "training/loop.py").read_text()
    learner = (PACKAGE / "training/learner.py").read_text()
    order = ["before_step(", "after_backward(", "clip(phase", "optimizer.step(", "after_step("]
    places = [loop.index(name, loop.index("def fit")) for name in order]
    assert places == sorted(places)
    learn = learner[learner.index("    def learn(") :]
    around = [
        "grow_for(self, ",
        "self.begin_task(",
        "loop.train(",
        "choose_exemplars(task)\n        self.after_memory(",
    ]
    places = [learn.index(name) for name in around]
    assert places == sorted(places)


def test_a_learner_holds_the_objects_that_the_walk_names():
    text = (PACKAGE / "training/learner.py").read_text()
    for name, kind in re.findall(r"^\| `self\.(\w+)` .*`(\w+)` \|$", WALK, re.MULTILINE):
        assert f"self.{name} = {kind}(" in text


def test_as_many_files_as_the_page_says_are_to_be_read():
    for what, files in walks().items():
        assert f"| {what} | {len(files)} |" in WALK
        assert len(set(files)) == len(files) and all((PACKAGE / path).exists() for path in files)


def files_run(call):
    """The package's files whose functions are called within ``call()``."""
    files = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


def test_the_files_that_are_to_be_read_are_those_that_run(monkeypatch):
    """Every listed file runs, and of the loop's room nothing is missing but what it merely calls."""
    fit, of_step = loop.fit, set()
    monkeypatch.setattr(loop, "fit", lambda *given: of_step.update(files_run(lambda: fit(*given))))
    learner = pycil_wsc.Learner("replay", memory_per_class=1, convnet_type="resnet8", epochs=1, held_out=0)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    learner.learn((images, ["a", "a", "b", "b"]))
    assert set(STEP_OF_REPLAY) <= of_step
    called = {"processes.py", "replay_plan.py"}  # the number of processes, a seed
    assert {path for path in of_step if path.startswith("training/") and path.count("/") == 1} <= (
        set(STEP_OF_REPLAY) | {f"training/{name}" for name in called}
    )
    of_prediction = files_run(lambda: learner.predict(images))
    assert set(PREDICTION) <= of_prediction
    parts = ("classifier/", "training/")
    merely = {"training/learner_config.py"}
    assert {path for path in of_prediction if path.startswith(parts)} == set(PREDICTION) | merely


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/scripts")
    yield importlib.import_module("house")
    sys.modules.pop("house")


@pytest.mark.slow
def test_the_house_is_that_of_the_imports(house):
    assert house.page() == house.PAGE.read_text(encoding="utf-8"), "run docs/scripts/house.py"
    assert house.picture() == house.IMAGE.read_text(encoding="utf-8"), "run docs/scripts/house.py"


@pytest.mark.slow
def test_the_houses_arrows_lead_to_all_that_is_imported_and_to_nothing_else(house):
    """Those that are left out follow from the others. No room imports itself by a detour."""
    found = house.arrows()
    drawn = {room: set() for room in house.rooms()}
    for way in house.routes(house.needed(found)):
        (room, high), *_, (other, low) = way
        drawn[room].add(other)
        assert [height for _, height in way] == list(range(high, low - 1, -1)), "an arrow leads down, level by level"
    for room in drawn:
        assert house.below(room, drawn) == house.below(room, found)
        assert drawn[room] <= found[room] and room not in house.below(room, found)
    assert not cycles()


@pytest.mark.slow
def test_every_room_has_a_box_and_no_two_places_are_one(house):
    svg = house.picture()
    assert sorted(re.findall(r"<text [^>]*>(\w+)</text>", svg)) == house.rooms()
    across = house.positions(house.routes(house.needed(house.arrows())))
    assert len({(height, x) for (_, height), x in across.items()}) == len(across)


def test_a_shortcut_is_not_drawn(house):
    assert house.needed({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_every_room_has_its_sentence(house):
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", house.table(), re.MULTILINE)
    assert [room for room, _ in rows] == house.rooms()
    assert all(sentence.endswith(".") for _, sentence in rows)
