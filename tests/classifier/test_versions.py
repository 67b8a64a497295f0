"""Versions of a saved learner: what is kept, going back, and loading a new one while threads and processes ask."""

import contextlib
import copy
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.months import MONTHS, month, photos
from support.shelves import labelled, names
from support.small_learners import FILES, QUICK, SMALL, arrays, assert_same, dies_at, learned, months
from support.small_runs import Tiny
from torch import nn

from pycil_wsc import Learner, registry, seeding
from pycil_wsc.classifier.store import parts, versions
from pycil_wsc.errors import UserError
from pycil_wsc.state import names_of_parts, save_state

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def learners(months):
    """The learners after one, two and three months; not to be changed."""
    return [learned(*months[: count + 1], **QUICK) for count in range(3)]


@pytest.fixture(scope="module")
def saved(learners, tmp_path_factory):
    """A folder with the three as its versions; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "shelf"
    for learner in learners:
        learner.save(folder)
    return folder


@pytest.fixture(params=["in one file", "in parts"])
def any_saved(request, learners, saved, tmp_path, monkeypatch):
    """The same folder, and one in which even small learners have parts."""
    if request.param == "in one file":
        return saved
    monkeypatch.setattr(parts, "SMALLEST", 1 << 11)
    for learner in learners:
        learner.save(tmp_path / "in_parts")
    assert len(listed_parts(tmp_path / "in_parts")) > 3
    return tmp_path / "in_parts"


def listed_parts(folder):
    paths = [folder / versions.FILE, *versions.kept(folder).values()]
    return {f"{name}.safetensors" for path in paths for name in names_of_parts(path)}


@pytest.fixture
def shelf(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "shelf")


def tasks_of(folder, version=None):
    return len(Learner.load(folder, version=version, quiet=True).history)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_each_save_is_a_version_that_can_be_loaded(learners, saved):
    assert names(saved) == ["learner.safetensors", "versions/000001.safetensors", "versions/000002.safetensors"]
    for number, learner in enumerate(learners, 1):
        loaded = Learner.load(saved, version=number)
        assert_same(loaded, learner)
        assert loaded.version == number
    assert_same(Learner.load(saved), learners[2])
    listed = Learner.versions(saved)
    assert [(version["version"], version["tasks"], version["present"]) for version in listed] == [
        (1, 1, False),
        (2, 2, False),
        (3, 3, True),
    ]
    for version, learner in zip(listed, learners):
        assert version["classes"] == learner.classes and version["when"] == learner.history[-1]["when"]
    assert listed[2]["bytes"] == (saved / "learner.safetensors").stat().st_size


def test_a_users_notes_are_those_of_the_version(learners, tmp_path):
    learner = copy.copy(learners[0])
    for camera in ("north gate", "yard"):
        learner.notes = {"camera": camera}
        learner.save(tmp_path)
    assert Learner.load(tmp_path).notes == {"camera": "yard"}
    assert Learner.load(tmp_path, version=1).notes == {"camera": "north gate"}
    learner.rollback()
    assert learner.notes == Learner.load(tmp_path).notes == {"camera": "north gate"}


@pytest.mark.parametrize("notes", [{"a": object()}, [1], {(1, 2): 3}])
def test_notes_that_are_no_json_are_one_line_and_the_saved_learner_stays(notes, learners, tmp_path):
    learner = copy.copy(learners[0])
    learner.save(tmp_path)
    before = (tmp_path / "learner.safetensors").read_bytes()
    learner.notes = notes
    with pytest.raises(UserError, match="^notes: not a dictionary of JSON values .*; give lists, numbers and strings$"):
        learner.save(tmp_path)
    assert (tmp_path / "learner.safetensors").read_bytes() == before


def test_only_so_many_versions_are_kept_and_the_copies_that_they_need(tmp_path):
    sources = [photos(tmp_path / str(number), ["cat", "ant"], number) for number in range(4)]
    folder, learner = tmp_path / "shelf", Learner("replay", **SMALL | FILES | {"memory_per_class": 2})
    contents = []
    for source in sources:
        learner.learn(source)
        contents.append(labelled(learner))
        learner.save(folder, copy_images=True, versions=2)
    shutil.rmtree(tmp_path / "0")
    assert names(folder)[-2:] == ["learner.safetensors", "versions/000003.safetensors"]
    for version, content in ((3, contents[2]), (4, contents[3])):
        loaded = Learner.load(folder, version=version)
        assert labelled(loaded) == content
        assert all(path.startswith(str(folder)) for path in loaded._held.train.images)
    needed = {image for content in contents[2:] for _, image in content}
    assert len(os.listdir(folder / "exemplars")) == len(needed)
    learner.save(folder, versions=1, copy_images=True)
    assert not (folder / "versions").exists()
    assert len(os.listdir(folder / "exemplars")) == len({image for _, image in contents[3]})


def test_where_the_disk_has_no_links_versions_are_copies(learners, tmp_path):
    with patch("os.link", side_effect=PermissionError):
        for learner in learners[:2]:
            learner.save(tmp_path / "shelf")
    assert tasks_of(tmp_path / "shelf", 1) == 1 and tasks_of(tmp_path / "shelf") == 2


# ---- going back ------------------------------------------------------------------------------------------------------


def test_rollback_goes_back_one_version_here_and_in_the_folder_and_keeps_the_one_it_leaves(learners, shelf):
    learner = Learner.load(shelf, quiet=True)
    for left, number in ((3, 2), (2, 1)):
        learner.rollback()
        assert_same(learner, learners[number - 1])
        assert learner.version == number and tasks_of(shelf) == number and tasks_of(shelf, left) == left
    with pytest.raises(UserError, match="shelf: has no version before 1 to go back to"):
        learner.rollback()
    learner.save(shelf)
    assert learner.version == 4 and [version["version"] for version in Learner.versions(shelf)] == [1, 2, 3, 4]
    learner.rollback()
    assert learner.version == 3 and len(learner.history) == 3, "the version with the number before"


def test_rollback_goes_to_the_version_that_was_learned_from_and_not_to_a_rejected_one(learners, months, tmp_path):
    shelf = tmp_path / "shelf"
    learner = learned(months[0], **QUICK)
    learner.save(shelf)
    learner.learn(months[1])
    learner.save(shelf)
    learner.rollback()  # the second version is rejected
    learner.learn(months[2])
    learner.save(shelf, versions=2)
    assert [version["version"] for version in Learner.versions(shelf)] == [1, 3], "the rejected one was removed first"
    learner.rollback()
    assert learner.version == 1
    assert_same(learner, learners[0])


def test_what_was_learned_and_not_saved_is_undone_first(learners, shelf, tmp_path):
    learner = Learner.load(shelf, quiet=True)
    learner.learn(month(tmp_path / "more.npz", ["bee"], 9))
    assert learner.version is None
    learner.rollback()
    assert_same(learner, learners[2])
    assert learner.version == 3 and tasks_of(shelf) == 3


def test_a_learner_that_is_not_the_folders_present_version_undoes_what_it_learned_and_nothing_else(
    learners, shelf, tmp_path
):
    learner = Learner.load(shelf, quiet=True, version=2)
    learner.learn(month(tmp_path / "more.npz", ["bee"], 9))
    learner.rollback()
    assert_same(learner, learners[1])
    assert learner.version == 2 and tasks_of(shelf) == 3
    with pytest.raises(UserError, match="shelf: its present version is 3, but this learner is version 2; reload it"):
        learner.rollback()
    assert learner.version == 2 and tasks_of(shelf) == 3


def test_without_the_present_version_another_one_can_be_loaded(learners, shelf):
    (shelf / "learner.safetensors").unlink()
    with pytest.raises(UserError, match="learner.safetensors is missing; load another version, such as version=2"):
        Learner.load(shelf)
    assert_same(Learner.load(shelf, version=1), learners[0])


def test_a_damaged_version_is_not_gone_back_to(learners, shelf):
    learner, path = Learner.load(shelf, quiet=True), shelf / "versions/000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = (shelf / "learner.safetensors").read_bytes()
    with pytest.raises(
        UserError, match="rollback: version 2 cannot be loaded: .*shelf: is not a complete saved learner"
    ):
        learner.rollback()
    assert (shelf / "learner.safetensors").read_bytes() == before and learner.version == 3
    with pytest.raises(UserError, match="shelf: is not a complete saved learner"):
        Learner.load(shelf, version=2)


def test_a_version_that_cannot_be_loaded_leaves_the_folder_as_it_is(learners, shelf):
    learner = Learner.load(shelf, quiet=True)
    full = patch("pycil_wsc.classifier.learner.answers_of", side_effect=torch.OutOfMemoryError("of the device"))
    with full, pytest.raises(UserError, match="rollback: version 2 .* there is not enough memory to load it"):
        learner.rollback()
    assert learner.version == Learner.load(shelf, quiet=True).version == 3
    learner.rollback()
    assert learner.version == 2 and not learner.reload()


def test_the_version_that_is_asked_for_is_loaded_though_another_is_saved_meanwhile(learners, shelf):
    find = versions.find

    def find_before_the_next_one_is_saved(folder, number):
        path = find(folder, number)
        if number == 3 and path.name == "learner.safetensors":
            learners[0].save(shelf)
        return path

    with patch.object(versions, "find", find_before_the_next_one_is_saved):
        learner = Learner.load(shelf, version=3, quiet=True)
    assert learner.version == 3 and learner.classes == learners[2].classes
    assert tasks_of(shelf) == 1


def test_a_save_after_which_nothing_can_be_removed_has_saved(learners, shelf, caplog):
    learner = Learner.load(shelf, quiet=True)
    learner.learn(arrays_of_bees())
    with patch.object(versions, "remove_oldest", side_effect=PermissionError("another's file")):
        learner.save(shelf)
    assert "the next save tries again" in caplog.text
    assert learner.version == Learner.load(shelf, quiet=True).version == 4 and not learner.reload()


def arrays_of_bees():
    return np.zeros((4, 8, 8, 3), np.uint8), ["bee"] * 4


@pytest.mark.parametrize("method", ["reload", "rollback", "save", "learn"])
def test_what_changes_a_learner_is_refused_while_the_same_thread_learns(method, learners, shelf):
    def interfere(progress):
        arguments = {"save": [shelf], "learn": [arrays_of_bees()]}.get(method, [])
        getattr(learner, method)(*arguments)

    learner = Learner.load(shelf, on_progress=interfere, quiet=True)
    learners[0].save(shelf)  # another version, which there is to reload
    with pytest.raises(UserError, match="the learner is learning; call this when learn has returned"):
        learner.learn(arrays_of_bees())
    learner.on_progress = None
    assert learner.version == 3 and learner.learn(arrays_of_bees())["task"] == 4


def saved_for_ever(learners, folder, started):
    for number in itertools.count():
        learners[number % 2].save(folder, versions=3)
        started.set()


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_the_old_or_the_new_learner(learners, any_saved, tmp_path):
    """A real SIGKILL, at a random moment of many saves."""
    folder = shutil.copytree(any_saved, tmp_path / "shelf")
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng(0)
    for _ in range(5):
        started = context.Event()
        process = context.Process(target=saved_for_ever, args=(learners, folder, started))
        process.start()
        assert started.wait(60)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        loaded = Learner.load(folder, quiet=True)
        assert_same(loaded, learners[len(loaded.history) - 1])
        kept = [version["version"] for version in Learner.versions(folder)]
        assert len(kept) >= 3 and kept[-1] == loaded.version
        assert {tasks_of(folder, number) for number in kept[:-1]} <= {1, 2, 3}
    learners[2].save(folder)
    assert_same(Learner.load(folder, quiet=True), learners[2])
    assert not list(folder.rglob("*.partial"))
    assert {path.name for path in folder.glob("parts/*")} == listed_parts(folder)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["save", "save and drop", "rollback"])
def test_killed_at_any_moment_the_folder_has_the_old_or_the_new_learner_and_no_version_is_lost(
    change, learners, any_saved, tmp_path
):
    states = set()
    for moment in range(100):
        folder = shutil.copytree(any_saved, tmp_path / f"{change}-{moment}")
        learner = Learner.load(folder, quiet=True)
        if change == "rollback":
            alive = dies_at(moment, learner.rollback)
        else:
            versions = 5 if change == "save" else 2
            alive = dies_at(moment, lambda: learners[0].save(folder, versions=versions))
        now, old = Learner.load(folder, quiet=True), learners[2]
        states.add(now.version)
        assert_same(now, {2: learners[1], 3: old, 4: learners[0]}[now.version])
        kept = {version["version"] for version in Learner.versions(folder)}
        assert kept >= ({3} if change == "save and drop" else {1, 2, 3})
        for number in kept & {1, 2, 3}:
            assert tasks_of(folder, number) == number
        if alive:
            break
        learners[1].save(folder, versions=5)
        assert_same(Learner.load(folder, quiet=True), learners[1])
        assert not [path for path in folder.rglob("*.partial")]
        assert {path.name for path in folder.glob("parts/*")} == listed_parts(folder)
    assert alive and moment > 3 and states == {3, 2 if change == "rollback" else 4}


# ---- a new version while others ask ----------------------------------------------------------------------------------


def test_reload_loads_another_version_if_there_is_one_with_the_keys_of_load(learners, shelf):
    learner = Learner.load(shelf, quiet=True, epochs=7, held_out=3)
    before = learner.answers
    assert not learner.reload() and learner.answers is before
    learners[0].save(shelf)
    assert learner.reload() and not learner.reload()
    assert learner.version == 4 and learner.classes == learners[0].classes
    assert learner.config.epochs == 7 and learner.held_out == 3
    Learner.load(shelf, quiet=True).rollback()
    assert learner.reload() and learner.version == 3
    assert before.classes == learners[2].classes, "answers that were taken before stay"


def test_the_present_version_loaded_by_its_number_is_not_loaded_again(learners, shelf, tmp_path):
    learner = Learner.load(shelf, quiet=True, version=3)
    learner.learn(month(tmp_path / "more.npz", ["bee"], 9))
    assert not learner.reload() and len(learner.history) == 4
    assert Learner.load(shelf, quiet=True, version=2).reload()


def test_threads_that_ask_while_the_learner_changes_get_whole_answers_of_one_version(learners, shelf):
    """No answer mixes the classes of one version with the logits of another."""
    images = arrays_of(learners)
    expected = {number: learners[number - 1].predict_proba(images).tolist() for number in (1, 2, 3)}
    learner, seen = Learner.load(shelf, quiet=True), set()

    def ask():
        answers = learner.answers
        rows = answers.predict_proba(images)
        seen.add(answers.version)
        wanted = np.array(expected[min(answers.version, 3)])
        assert rows.shape == wanted.shape and np.allclose(rows, wanted, atol=1e-6), answers.version
        assert learner.predict(images[:3]).shape == (3,)

    other = Learner.load(shelf, quiet=True)
    with again_and_again(ask, threads=4):
        for _ in range(2):
            other.rollback()
            assert learner.reload()
    assert len(seen) > 1


@contextlib.contextmanager
def again_and_again(call, threads=1):
    """A context in which threads call this; an error in one of them is raised at its end."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            call()

    with ThreadPoolExecutor(threads) as pool:
        loops = [pool.submit(loop) for _ in range(threads)]
        try:
            yield
        finally:
            stop.set()
        for future in loops:
            future.result()


@pytest.mark.parametrize("change", ["reload", "rollback"])
def test_what_changes_the_learner_waits_until_it_has_learned(change, learners, shelf, tmp_path):
    """Else the learner would be that of before the change with one more task, or lose what it learned half-way."""
    learner = Learner.load(shelf, quiet=True)
    learners[0].save(shelf)  # version 4
    learning, waiting = threading.Event(), threading.Event()
    tasks = []

    def progress(_):
        learning.set()
        assert waiting.wait(60)
        tasks.append(len(learner.history))

    learner.on_progress = progress
    thread = threading.Thread(target=learner.learn, args=(month(tmp_path / "more.npz", ["bee"], 9),))
    thread.start()
    assert learning.wait(60)
    other = threading.Thread(target=getattr(learner, change))
    other.start()
    other.join(0.1)
    assert other.is_alive() and len(learner.history) == 3
    waiting.set()
    thread.join()
    other.join()
    assert set(tasks) == {3}, "nothing changed while it learned"
    assert learner.version == (4 if change == "reload" else 3), "what it learned is undone, or the folder's is loaded"
    assert_same(learner, learners[0 if change == "reload" else 2])


def arrays_of(learners):
    return np.random.default_rng(0).integers(0, 256, (11, 8, 8, 3), dtype=np.uint8)


def test_a_thread_that_asks_while_another_learns_disturbs_nothing(learners, shelf, tmp_path):
    images, more = arrays_of(learners), month(tmp_path / "more.npz", ["bee"], 9)
    quiet, asked = Learner.load(shelf, quiet=True), Learner.load(shelf, quiet=True)
    quiet.learn(more)
    before, probabilities = asked.predict_proba(images), []
    with again_and_again(lambda: probabilities.append(asked.answers.predict_proba(images))):
        asked.learn(more)
    assert_same(asked, quiet)
    after = quiet.predict_proba(images)
    assert probabilities and all(np.array_equal(rows, before) or np.array_equal(rows, after) for rows in probabilities)


class Dropping(Tiny):
    """Its weights depend on random numbers of every step."""

    def __init__(self):
        super().__init__()
        self.stem.append(nn.Dropout(0.3))


def test_a_thread_that_loads_while_another_learns_disturbs_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(registry.backbones, "dropping", Dropping)
    months = [month(tmp_path / f"{number}.npz", MONTHS[number], number) for number in range(2)]
    learner = learned(months[0], convnet_type="dropping", precision="auto")
    learner.save(tmp_path / "shelf")
    quiet, disturbed = Learner.load(tmp_path / "shelf", quiet=True), Learner.load(tmp_path / "shelf", quiet=True)
    quiet.learn(months[1])
    images, loaded = arrays_of([learner]), []
    with again_and_again(lambda: loaded.append(Learner.load(tmp_path / "shelf", quiet=True).predict_proba(images))):
        disturbed.learn(months[1])
    assert loaded
    assert_same(disturbed, quiet)


def test_a_process_that_is_forked_while_a_thread_draws_random_numbers_can_draw_its_own():
    """As one that loads a learner while the parent's thread is in an epoch."""
    inside, finished = threading.Event(), threading.Event()

    def draw():
        with seeding.seeded(0):
            inside.set()
            finished.wait()

    thread = threading.Thread(target=draw)
    thread.start()
    inside.wait()
    child = multiprocessing.get_context("fork").Process(target=draw_one, daemon=True)
    child.start()
    child.join(60)
    finished.set()
    thread.join()
    assert child.exitcode == 0


def draw_one():
    with seeding.seeded(0):
        torch.rand(1)


def asked_in_a_process(folder, images, queue):
    learner = Learner.load(folder, quiet=True)
    queue.put(learner.predict_proba(images))
    while not learner.reload():
        pass
    queue.put(learner.predict_proba(images))


def test_processes_that_load_the_same_folder_answer_alike_and_see_a_new_version(learners, shelf):
    images, context = arrays_of(learners), multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=asked_in_a_process, args=(shelf, images, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    first = [queue.get(timeout=120) for _ in processes]
    learners[0].save(shelf)
    second = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    for rows in first:
        np.testing.assert_allclose(rows, learners[2].predict_proba(images), atol=1e-6)
    for rows in second:
        np.testing.assert_allclose(rows, learners[0].predict_proba(images), atol=1e-6)


def test_a_file_that_is_no_learner_hides_no_version(learners, shelf):
    expected = Learner.versions(shelf)
    save_state(shelf / "versions" / "000007.safetensors", {"format": 2})
    assert Learner.versions(shelf) == expected


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"[]", bytes(100)])
def test_a_damaged_present_version_is_called_damaged_and_its_number_is_not_used_again(damage, learners, shelf):
    learner = Learner.load(shelf, quiet=True)
    (shelf / "learner.safetensors").write_bytes(damage)
    asks = {
        r"shelf: its present version, learner.safetensors, is damaged; .* \(kept: 1, 2\)": learner.rollback,
        r"its present version is damaged: load another one, such as version=2": learner.reload,
        r"has no version 3; it has 1, 2; its present version, .* is damaged": lambda: Learner.load(shelf, version=3),
    }
    for message, ask in asks.items():
        with pytest.raises(UserError, match=message) as error:
            ask()
        assert "\n" not in str(error.value)
    assert [version["version"] for version in Learner.versions(shelf)] == [1, 2] and learner.version == 3
    other = Learner.load(shelf, quiet=True, version=2)  # which does not know that there was a third
    other.save(shelf)
    assert other.version == 4 and tasks_of(shelf) == 2
    learner.save(shelf)
    assert learner.version == 5 and tasks_of(shelf) == 3


def test_no_number_is_used_twice_though_nothing_but_a_damaged_version_is_left(learners, tmp_path):
    for _ in range(3):
        learners[0].save(tmp_path, versions=1)
    (tmp_path / "learner.safetensors").write_bytes(b"?")
    learners[1].save(tmp_path)
    assert learners[1].version == 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_bad_questions_are_one_line(learners, shelf, tmp_path):
    learner = learned(arrays(month(tmp_path / "0.npz", ["ant"], 0)), **QUICK)
    asks = {
        "rollback: the learner was not saved": learner.rollback,
        "reload: the learner was neither saved nor loaded": learner.reload,
        "versions: 0 keeps nothing; give 1": lambda: learner.save(tmp_path / "x", versions=0),
        "versions: 1.5 is not a whole number": lambda: learner.save(tmp_path / "x", versions=1.5),
        "shelf: has no version 9; it has 1, 2, 3": lambda: Learner.load(shelf, version=9),
        "version: 'x' is not a whole number": lambda: Learner.load(shelf, version="x"),
        "nowhere: no saved learner there": lambda: Learner.load(tmp_path / "nowhere", version=1),
    }
    for message, ask in asks.items():
        with pytest.raises(UserError) as error:
            ask()
        assert message in str(error.value) and "\n" not in str(error.value)
