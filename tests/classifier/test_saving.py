"""Saved learners: what a folder holds, what a save replaces, and what is refused."""

import contextlib
import functools
import hashlib
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.damage import each_part_forged, each_with_a_bit_flipped, forged
from support.months import photos
from support.shelves import labelled, names
from support.small_learners import FILES, assert_same, dies_at, learned

from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.store import parts
from pycil_wsc.classifier.store.versions import FILE
from pycil_wsc.errors import UserError
from pycil_wsc.state import load_state, save_state

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")
QUICK = {"epochs": 1, "init_epoch": 1}
OF_FILES = {"image_size": 16, "num_workers": 0, **QUICK}


# ---- what a save replaces --------------------------------------------------------------------------------------------


def test_saving_again_replaces_the_learner_and_leaves_all_else_as_it_is(tmp_path):
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **OF_FILES)
    learner.save(tmp_path / "shelf", copy_images=True)
    may = photos(tmp_path / "shelf" / "may", ["bee"], 2)
    for name in ("notes.txt", "exemplars/notes.txt", "weights.safetensors"):
        (tmp_path / "shelf" / name).write_text("not the learner's")
    foreign = set(names(tmp_path / "shelf" / "may"))
    learner.learn(may)
    learner.save(tmp_path / "shelf", copy_images=True)
    kept = names(tmp_path / "shelf")
    assert {f"may/{name}" for name in foreign} <= set(kept)
    assert {"notes.txt", "exemplars/notes.txt", "weights.safetensors", "learner.safetensors"} <= set(kept)
    os.rename(tmp_path / "shelf", tmp_path / "elsewhere")
    assert labelled(Learner.load(tmp_path / "elsewhere")) == labelled(learner, moved=(tmp_path, "shelf", "elsewhere"))


def test_a_folder_with_other_files_takes_a_learner(months, tmp_path):
    learner = learned(months[0], **QUICK)
    learner.save(tmp_path)
    assert_same(Learner.load(tmp_path), learner)
    assert names(tmp_path) == ["0.npz", "1.npz", "2.npz", "learner.safetensors"]


def test_a_link_to_a_saved_learner_stays_a_link(months, shelf, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(shelf)
    learner = Learner.load(link, quiet=True, epochs=1)
    learner.learn(months[1])
    learner.save(link)
    assert link.is_symlink() and sorted(os.listdir(tmp_path)) == ["0.npz", "1.npz", "2.npz", "link", "shelf"]
    assert_same(Learner.load(shelf), learner)


def test_without_the_originals_the_learner_is_loaded_again_from_the_folder_with_the_copies(tmp_path):
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **OF_FILES)
    learner.save(tmp_path / "shelf", copy_images=True)
    shutil.rmtree(tmp_path / "january")
    february = photos(tmp_path / "february", ["bee"], 2)
    with pytest.raises(UserError, match="or load the learner from a folder in which it was saved with copy_images"):
        learner.learn(february)
    Learner.load(tmp_path / "shelf", quiet=True).learn(february)


def test_copies_that_are_loaded_through_a_link_are_not_removed(tmp_path):
    learned(photos(tmp_path / "january", ["cat", "ant"], 1), **OF_FILES).save(tmp_path / "shelf", copy_images=True)
    (tmp_path / "link").symlink_to("shelf")
    learner = Learner.load(tmp_path / "link")
    learner.save(tmp_path / "shelf")
    assert labelled(Learner.load(tmp_path / "shelf")) == labelled(learner) != []


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_killed_at_any_moment_a_save_loses_neither_learner_and_the_next_one_leaves_nothing_behind(copied, tmp_path):
    first = photos(tmp_path / "january", ["cat", "ant"], 1)
    learned(first, **OF_FILES).save(tmp_path / "shelf", copy_images=True)
    older = Learner.load(tmp_path / "shelf", quiet=True)
    learner = Learner.load(tmp_path / "shelf", quiet=True, memory_per_class=2)
    learner.learn(photos(tmp_path / "february", ["bee", "cat"], 2))
    learner.save(shutil.copytree(tmp_path / "shelf", tmp_path / "undisturbed"), copied, versions=1)
    expected = names(tmp_path / "undisturbed")
    killed = 0
    for moment in range(100):
        folder = shutil.copytree(tmp_path / "shelf", tmp_path / f"killed-{moment}")
        alive = dies_at(moment, functools.partial(learner.save, folder, copied, versions=1))
        loaded = Learner.load(folder, quiet=True)
        assert labelled(loaded) == labelled(older if len(loaded.history) == 1 else learner)
        if alive:
            break
        killed += 1
        learner.save(folder, copied, versions=1)
        assert names(folder) == expected
    assert alive and killed >= (8 if copied else 3)


@pytest.mark.slow
@pytest.mark.parametrize("smallest_part", [parts.SMALLEST, 1 << 11])
def test_two_that_save_and_one_that_loads_never_meet_half_a_learner(smallest_part, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SMALLEST", smallest_part)
    tasks = [photos(tmp_path / "january", ["cat", "ant"], 1), photos(tmp_path / "february", ["bee", "cat"], 2)]
    one = learned(tasks[0], **OF_FILES)
    two = learned(*tasks, **OF_FILES)
    one.save(tmp_path / "shelf", copy_images=True)
    context = multiprocessing.get_context("fork")
    seen_both = context.Event()
    savers = [
        context.Process(target=_save_often, args=(learner, tmp_path / "shelf", seen_both)) for learner in (one, two)
    ]
    for saver in savers:
        saver.start()
    loaded = set()
    while any(saver.is_alive() for saver in savers):
        loaded.add(len(Learner.load(tmp_path / "shelf").history))
        if loaded == {1, 2}:
            seen_both.set()
    assert [saver.exitcode for saver in savers] == [0, 0]
    last = Learner.load(tmp_path / "shelf")
    assert all(Path(path).is_file() for path in last._held.train.images)


def _save_often(learner, folder, enough):
    saved = 0
    while saved < 25 or not enough.is_set():
        learner.save(folder, copy_images=True)
        saved += 1


# ---- exemplars -------------------------------------------------------------------------------------------------------


def test_what_is_saved_outlives_the_images_where_they_are_copied(tmp_path):
    keys = OF_FILES
    tasks = [photos(tmp_path / "january", ["cat", "ant"], 1), photos(tmp_path / "february", ["bee", "cat"], 2)]
    learner = learned(tasks[0], **keys)
    learner.save(tmp_path / "names")
    learner.save(tmp_path / "shelf", copy_images=True)
    learner.learn(tasks[1])
    shutil.rmtree(tmp_path / "january")
    os.rename(tmp_path / "shelf", tmp_path / "elsewhere")
    other = Learner.load(tmp_path / "elsewhere", quiet=True)
    other.learn(tasks[1])
    ours, theirs = (one._state["learner"]["network.head.weight"] for one in (learner, other))
    assert torch.equal(ours, theirs) and other._held.train.images[0].startswith(
        str(tmp_path / "elsewhere" / "exemplars")
    )
    with pytest.raises(UserError, match="no longer exists, one of 8 missing files of exemplars; restore them"):
        Learner.load(tmp_path / "names", quiet=True).learn(tasks[1])


def test_saved_month_by_month_in_one_folder_the_copied_exemplars_stay_with_their_labels(tmp_path):
    """The originals are gone; a learner that is not saved goes on with the copies too."""
    keys = OF_FILES | {"memory_bytes": 12 * 32 * 32 * 3}
    learner = learned(photos(tmp_path / "0", ["cat", "ant"], 0), **keys)
    learner.save(tmp_path / "shelf", copy_images=True)
    for number, classes in enumerate((["bee"], ["dog", "cat"], ["bee"]), 1):
        shutil.rmtree(tmp_path / str(number - 1))
        learner = Learner.load(tmp_path / "shelf", quiet=True)
        learner.learn(photos(tmp_path / str(number), classes, number))
        before = labelled(learner)
        assert {name for name, _ in before} == set(learner.classes)
        learner.save(tmp_path / "shelf", copy_images=number != 3)
        assert labelled(learner) == before == labelled(Learner.load(tmp_path / "shelf", quiet=True))
    assert all(path.startswith(str(tmp_path)) for path in learner._held.train.images)


def test_images_learned_by_a_relative_path_are_found_from_another_folder(tmp_path, monkeypatch):
    photos(tmp_path / "photos", ["cat", "ant"], 1)
    monkeypatch.chdir(tmp_path)
    learner = learned("folder:photos", **OF_FILES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    learner.save(tmp_path / "shelf")
    loaded = Learner.load(tmp_path / "shelf", quiet=True)
    loaded.learn(photos(tmp_path / "more", ["bee"], 2))
    assert all(Path(path).is_file() for path in loaded._held.train.images)


def test_an_exemplar_that_is_another_image_now_is_refused_by_name(tmp_path):
    cats, ants = tmp_path / "january" / "cat", tmp_path / "january" / "ant"
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **OF_FILES)
    learner.save(tmp_path / "names")
    learner.save(tmp_path / "copies", copy_images=True)
    february = photos(tmp_path / "february", ["bee"], 2)
    os.rename(cats, tmp_path / "swapped")
    os.rename(ants, cats)
    os.rename(tmp_path / "swapped", ants)
    for holder in (learner, Learner.load(tmp_path / "names", quiet=True)):
        with pytest.raises(UserError, match=r"january/(cat|ant)/\d.png: is another image than the exemplar that was"):
            holder.learn(february)
        with pytest.raises(
            UserError, match=r"january/(cat|ant)/\d.png: is another image than the one that was learned"
        ):
            holder.save(tmp_path / "later", copy_images=True)
    first, *_, last = sorted((tmp_path / "copies" / "exemplars").iterdir())
    last.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=f"{last.name}: is another image than the exemplar that was learned; restore"):
        Learner.load(tmp_path / "copies", quiet=True).learn(february)
    assert len(learner.history) == 1


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_whole_is_one_line(shelf):
    path = shelf / "learner.safetensors"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"[]", content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="shelf: is not a complete saved learner") as error:
            Learner.load(shelf)
        assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(UserError, match="shelf: no saved learner there"):
        Learner.load(shelf)


def test_a_flipped_bit_of_a_saved_learner_is_noticed_or_does_no_harm(january, shelf):
    learner, _ = january
    noticed = 0
    for _ in each_with_a_bit_flipped(shelf / "learner.safetensors", 40):
        try:
            assert_same(Learner.load(shelf), learner)
        except UserError as error:
            assert "is not a complete saved learner" in str(error)
            noticed += 1
    assert noticed > 36


WRONG = [None, 10**9, "x", [None] * 3, float("nan")]
PLACES = [[], ["info"], ["exemplars"], ["config"], ["run"], ["run", "learner", "_extra_state"]]
PLACES += [["run", "learner", "_extra_state", "memory"], ["ledger"], ["ledger", "held_out"]]


@pytest.mark.slow
def test_a_forged_learner_is_one_line_or_does_no_harm(shelf, january):
    """Each part in turn is left out or replaced, with a right checksum; what is loaded also learns or refuses to."""
    path, images = shelf / "learner.safetensors", np.zeros((2, 8, 8, 3), np.uint8)
    whole, refused = load_state(path), 0
    february = (np.concatenate([images, images + 9]), ["dog", "cat", "dog", "cat"])

    def attempt(state):
        save_state(path, state)
        try:
            learner = Learner.load(shelf, quiet=True, epochs=1)
            learner.predict(images)
            assert learner.history and repr(learner)
            learner.save(shelf)
            learner.learn(february)
        except UserError as error:
            assert "\n" not in str(error)
            return 1
        return 0

    for _, _, state in each_part_forged(whole, PLACES, WRONG):
        refused += attempt(state)
    for place, value in FORGED:
        assert attempt(forged(whole, place, value)), (place, value)
    assert refused > 75
    for value in WRONG:
        save_state(path, value)
        with pytest.raises(UserError, match="shelf: is not a complete saved learner"):
            Learner.load(shelf)


FORGED = [
    (["version"], "1"),
    (["parent"], [1]),
    (["config", "tasks"], [None]),
    (["ledger", "entries"], [{"data": 5}]),
    (["ledger", "entries"], [{"when": ["now"]}]),
    (["seen"], [2, 10**9]),
    (["seen"], [10**9]),
    (["info", "padding"], 10**9),
    (["info", "image_size"], 10**9),
    (["info", "mean"], (0.5, 0.5, float("inf"))),
    (["exemplars", "labels"], torch.full((8,), -1)),
    (["exemplars", "labels"], torch.arange(8)),
    (["exemplars", "tasks"], torch.full((8,), 7)),
    (["exemplars", "pixels"], torch.zeros(8, dtype=torch.uint8)),
    (["exemplars", "pixels"], torch.zeros(8, 8, 8, 3)),
    (["data"], {"tasks": None}),
    (["config", "tasks"], []),
    (["run", "history"], []),
    (["ledger", "temperature"], 0.0),
    (["ledger", "entries"], [{}, {}]),
    (["ledger", "held_out"], {"labels": torch.tensor([2]), "pixels": torch.zeros(1, 8, 8, 3, dtype=torch.uint8)}),
]


def test_what_is_no_image_is_not_copied_though_its_hash_is_right(of_files, tmp_path):
    private = tmp_path / "passwd"
    private.write_text("root:x:0:0")
    with renamed(of_files, str(private), hashlib.sha256(private.read_bytes()).hexdigest()):
        learner = Learner.load(of_files, quiet=True)
    with pytest.raises(UserError, match="passwd: not a readable image"):
        learner.save(tmp_path / "published", copy_images=True)
    assert "published/exemplars/passwd" not in names(tmp_path) and not (tmp_path / "published" / FILE).exists()


@pytest.mark.parametrize("digest", ["0" * 63, "g" * 64, 5, "", None])
def test_what_cannot_be_a_hash_is_one_line(digest, of_files):
    with (
        renamed(of_files, "exemplars/x.png", digest),
        pytest.raises(UserError, match="is not a complete saved learner"),
    ):
        Learner.load(of_files)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_is_refused_and_nothing_waits(kind, of_files, tmp_path):
    """Without a check, each of these waits for ever, or takes all memory; and a link is not written through."""
    odd = tmp_path / "odd.png"
    odd.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(odd)
    with renamed(of_files, str(odd), "0" * 64):
        learner = Learner.load(of_files, quiet=True)
    with pytest.raises(UserError, match=r"odd.png: cannot be read \(not a file but a pipe or a device\)"):
        learner.save(tmp_path / "published", copy_images=True)
    with pytest.raises(UserError, match="odd.png: no longer exists"):
        learner.learn(photos(tmp_path / "february", ["bee"], 2))
    learner = Learner.load(of_files, quiet=True)
    (of_files / "versions").mkdir()
    for place in ("versions/000001.safetensors", "versions/000007.safetensors", ".last_version"):
        (of_files / place).unlink(missing_ok=True)
        shutil.copy(odd, of_files / place, follow_symlinks=False) if kind == "device" else os.mkfifo(of_files / place)
    assert [version["version"] for version in Learner.versions(of_files)] == [1]
    with pytest.raises(UserError, match="has no version 7; it has 1"):
        Learner.load(of_files, version=7)
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (of_files / ".learner.safetensors.partial").symlink_to(victim)
    learner.save(of_files)
    assert victim.read_text() == "keep me" and learner.version == 8, "a number whose file is odd may have been used"
    (of_files / FILE).unlink()
    os.mkfifo(of_files / FILE)
    with pytest.raises(UserError, match="no saved learner there"):
        Learner.load(of_files)
    learner.save(of_files)
    assert Learner.load(of_files).classes == learner.classes


@pytest.fixture(scope="module")
def of_photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_photos")
    learner = learned(photos(folder / "january", ["cat", "ant"], 1), **OF_FILES)
    learner.save(folder / "shelf", copy_images=True)
    return folder / "shelf"


@pytest.fixture
def of_files(of_photos, tmp_path):
    """The test's own copy of a saved learner with copied exemplars."""
    return shutil.copytree(of_photos, tmp_path / "shelf")


@contextlib.contextmanager
def renamed(folder, name, digest):
    """A context in which the saved learner names its first exemplar so, with this hash, and the file is forged well."""
    path = folder / FILE
    content = path.read_bytes()
    state = load_state(path)
    exemplars = state["exemplars"]
    files, hashes = [name, *exemplars["files"][1:]], [digest, *exemplars["sha256"][1:]]
    save_state(path, state | {"exemplars": exemplars | {"files": files, "sha256": hashes}})
    yield
    path.write_bytes(content)


# ---- where it is saved -----------------------------------------------------------------------------------------------


def test_a_learner_of_a_relative_folder_goes_on_in_another_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES).save("shelf", copy_images=True)
    shutil.rmtree("january")
    learner = Learner.load("shelf", quiet=True, out="work")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert not learner.reload()
    learner.learn(photos(tmp_path / "february", ["bee"], 2))
    learner.save(tmp_path / "backup")
    assert labelled(Learner.load(tmp_path / "backup")) == labelled(learner)
    assert os.listdir() == [] and (tmp_path / "work/task2").is_dir()


def test_what_another_folder_has_copies_of_is_copied_as_it_may_remove_them(tmp_path):
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES)
    learner.save(tmp_path / "shelf", copy_images=True)
    other = Learner.load(tmp_path / "shelf", quiet=True)
    other.save(tmp_path / "backup")
    shutil.rmtree(tmp_path / "shelf")
    assert labelled(Learner.load(tmp_path / "backup")) == labelled(learner)
