"""Large tensors of a saved learner are in files of their own, which its versions share."""

import functools
import shutil

import numpy as np
import pytest
import safetensors
from support.small_learners import QUICK, arrays, assert_same, learned, months

from pycil_wsc import Learner
from pycil_wsc.classifier.store import parts
from pycil_wsc.errors import UserError
from pycil_wsc.state import load_state, names_of_parts, save_state

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("undrawn")
SMALLEST = 1 << 11


@pytest.fixture
def in_parts(monkeypatch):
    """Small learners have parts, too."""
    monkeypatch.setattr(parts, "SMALLEST", SMALLEST)


@pytest.fixture
def learners(months):
    """A nearest-mean learner of three months, and one that has learned one more image."""
    images, labels = arrays(months[0], "test")
    before = learned(*months, name="ncm", adapt=False, **QUICK)
    after = learned(*months, name="ncm", adapt=False, **QUICK)
    after.learn((images[:1], labels[:1]))
    return before, after


def files(folder):
    return {path.stem: path for path in (folder / "parts").iterdir()}


def blocks_of_head(folder):
    """The sizes of the parts with rows of the classifier, by name."""
    sizes = {}
    for name, path in files(folder).items():
        with safetensors.safe_open(path, "pt") as part:
            if all("network.head" in key for key in part.keys()):  # noqa: SIM118
                sizes[name] = path.stat().st_size
    return sizes


def listed(path):
    return set(names_of_parts(path))


def test_a_save_writes_the_parts_that_changed_and_loads_as_it_was(in_parts, learners, tmp_path):
    before, after = learners
    before.save(tmp_path)
    first = {name: path.stat() for name, path in files(tmp_path).items()}
    after.save(tmp_path)
    for name, status in first.items():
        now = files(tmp_path)[name].stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert 0 < len(files(tmp_path)) - len(first) < len(first)
    assert_same(Learner.load(tmp_path, quiet=True), after)
    assert_same(Learner.load(tmp_path, quiet=True, version=1), before)


def test_parts_that_no_version_lists_are_removed_and_those_of_kept_versions_stay(in_parts, learners, tmp_path):
    before, after = learners
    before.save(tmp_path)
    present = tmp_path / "learner.safetensors"
    of_first = listed(present)
    after.save(tmp_path, versions=2)
    assert set(files(tmp_path)) == of_first | listed(present) > of_first
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    after.save(tmp_path, versions=1)
    assert set(files(tmp_path)) == listed(present) | {"notes"} and not of_first <= listed(present)
    assert_same(Learner.load(tmp_path, quiet=True), after)


def test_what_a_save_writes_does_not_grow_with_the_number_of_classes(in_parts, tmp_path):
    rng = np.random.default_rng(0)
    written = []
    for classes in (600, 1200):
        folder = tmp_path / str(classes)
        labels = np.arange(classes).repeat(2)
        learner = learned(name="ncm", adapt=False, **QUICK)
        learner.learn((rng.integers(0, 256, (len(labels), 8, 8, 3), np.uint8), labels))
        learner.save(folder)
        before = blocks_of_head(folder)
        learner.learn((rng.integers(0, 256, (1, 8, 8, 3), np.uint8), np.array([7])))
        learner.save(folder)
        new = blocks_of_head(folder).items() - before.items()
        written.append((len(new), sum(size for _, size in new)))
        assert len(before) > classes // 60
    assert written[0] == written[1] and written[0][0] == 4  # of sums, counts, means and biases


def test_a_new_class_leaves_the_blocks_of_the_others(in_parts, months, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(400)
    learner = learned(name="ncm", adapt=False, **QUICK)
    learner.learn((rng.integers(0, 256, (400, 8, 8, 3), np.uint8), labels))
    learner.save(tmp_path, versions=1)
    before = blocks_of_head(tmp_path)
    learner.learn((rng.integers(0, 256, (1, 8, 8, 3), np.uint8), np.array([400])))
    learner.save(tmp_path, versions=1)
    replaced = before.keys() - blocks_of_head(tmp_path).keys()
    assert len(replaced) <= 3 < len(before)  # the last blocks of sums, counts and means
    assert_same(Learner.load(tmp_path, quiet=True), learner)


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "a folder"])
def test_a_part_that_is_not_as_it_was_is_named_in_one_line_and_written_again(damage, in_parts, learners, tmp_path):
    before, after = learners
    before.save(tmp_path)
    of_first = listed(tmp_path / "learner.safetensors")
    after.save(tmp_path)
    name = min(listed(tmp_path / "learner.safetensors") - of_first)
    path = files(tmp_path)[name]
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    if damage == "cut":
        path.write_bytes(content[:-1])
    if damage == "a folder":
        path.mkdir()
    with pytest.raises(UserError, match=rf"{tmp_path}: is not a complete .* its part parts/{name}.*version=1") as error:
        Learner.load(tmp_path)
    assert "\n" not in str(error.value)
    assert_same(Learner.load(tmp_path, quiet=True, version=1), before)
    if damage == "a folder":
        path.rmdir()
    after.save(tmp_path)
    assert_same(Learner.load(tmp_path, quiet=True), after)


def test_a_forged_name_of_a_part_reads_nothing_outside_the_folder(in_parts, learners, tmp_path):
    learners[0].save(tmp_path / "shelf")
    path = tmp_path / "shelf" / "learner.safetensors"
    names = names_of_parts(path)
    state = load_state(path, functools.partial(parts.read_parts, path.parent))
    outside = tmp_path / "outside.safetensors"
    shutil.move(path.parent / "parts" / f"{names[0]}.safetensors", outside)
    assert outside.is_file()
    save_state(path, state, lambda tensors: ["../../outside", *names[1:]])
    with pytest.raises(UserError, match="its parts are not named by hashes"):
        Learner.load(tmp_path / "shelf")
