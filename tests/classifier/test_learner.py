"""`pycil_wsc.Learner`: tasks learned one by one from Python."""

import copy
import io
import multiprocessing
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from support.months import MONTHS, NAMES, TEMPLATES, listed, month, photos, weights
from support.small_learners import FILES, SMALL, arrays, assert_same, january, learned, shelf
from support.small_runs import executed, killed_at, suited, waiting_at
from torch.utils.data import Subset

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.store import learner_file
from pycil_wsc.classifier.store.settings import FIXED
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError
from pycil_wsc.runs.run import Run
from pycil_wsc.runs.testing import Evaluator

__all__ = ["january", "shelf"]
pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_learner_learns_as_the_run_of_the_same_tasks_and_saving_between_changes_nothing(name, months, tmp_path):
    """It keeps only exemplars between two tasks, and is saved and loaded; the run has the images of all tasks.

    Classes come again, in the second task alone, but for the methods that need new ones.
    """
    classes = {"ant", "bee", "cat", "dog"}
    if not registry.learners[name].Plan.needs_new_classes:
        months[1] = month(tmp_path / "again.npz", MONTHS[0], 1)
        classes.remove("bee")
    keys = {"class_means": "exemplars"} if name == "coil" else {}  # by default of images that are gone
    keys |= {"init_epoch": 2, "epochs": 2, "batch_size": 16, "checkpoint_seconds": 3600} | suited(name)
    keys["precision"] = "fp32"  # in which a learner predicts
    folder, result = executed(listed(tmp_path, months, model_name=name, nme=False, **keys))
    assert len(result["curve"]) == len(months) and np.isfinite(result["train_loss"][-1]).all()
    learner = learned(months[0], name=name, **keys)
    for source in months[1:]:
        learner.save(tmp_path / "shelf")
        learner = Learner.load(tmp_path / "shelf", quiet=True)
        learner.learn(source)
    whole = weights(folder)
    for key, value in learner._state["learner"].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, whole[key]), key
    for name in ("train_loss", "train_accuracy"):
        assert [line[name] for line in learner.history] == result[name]
    images, names = (np.concatenate(parts) for parts in zip(*(arrays(source, "test") for source in months)))
    assert learner.evaluate((images, names))["accuracy"] == pytest.approx(result["last_acc"])
    assert set(learner.predict(images)) <= set(learner.classes) == classes


def test_greyscale_images_are_learned_and_predicted_as_three_equal_channels(months):
    images, names = arrays(months[0])
    grey = images[..., 0]
    colour = np.stack([grey] * 3, -1)
    learner = learned((grey, names), init_epoch=1)
    assert_same(learner, learned((colour, names), init_epoch=1))
    assert learner.predict(grey).tolist() == learner.predict(colour).tolist()
    assert learner.predict(torch.from_numpy(grey[:0])).tolist() == []
    with pytest.raises(UserError, match=r"uint8 of shape \(1, 9, 9\); this model takes uint8 \(B, 8, 8, 3\)"):
        learner.predict(np.zeros((1, 9, 9), np.uint8))


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(january, tmp_path):
    wanted = r"cannot be written \(File name too long\); choose another folder, with --out or --data-root if this is a"
    with pytest.raises(UserError, match=wanted):
        january[0].save(tmp_path / (256 * "x"))


def script(out, tasks, tested, queue):
    """A user's script; its output goes into ``queue``."""
    learner = Learner("wsc", **SMALL | {"epochs": 8, "batch_size": 16}, out=out)
    accuracies = []
    for source in tasks:
        learner.learn(source)
        accuracies.append(learner.evaluate(tested)["accuracy"])
    queue.put((accuracies, learner._state["learner"]["network.head.weight"].sum().item()))


def in_a_process(*arguments):
    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=script, args=(*arguments, queue))
    process.start()
    return process, queue


@pytest.mark.slow
def test_kill_9_within_learn_and_the_same_script_again_ends_with_the_same_numbers(months, tmp_path):
    images, names = (np.concatenate(parts) for parts in zip(*(arrays(source, "test") for source in months)))
    whole, queue = in_a_process(tmp_path / "whole", months, (images, names))
    expected = queue.get(timeout=120)
    whole.join()
    work = tmp_path / "work"
    with waiting_at(9):  # in the second task
        process, _ = in_a_process(work, months, (images, names))
    log = work / ".task2" / "log.txt"
    while not (log.exists() and "epoch 3/8" in log.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (work / "task1").exists() and not (work / "task2").exists() and (work / ".task2" / "checkpoint.pt").exists()
    again, queue = in_a_process(work, months, (images, names))
    assert queue.get(timeout=120) == expected
    again.join()
    assert "resumes with train epoch" in (work / "task2" / "log.txt").read_text()
    assert not list(work.rglob("checkpoint.pt"))


@pytest.mark.slow
def test_stopped_at_each_checkpoint_of_two_tasks_it_ends_like_one_never_stopped(months, tmp_path):
    for _ in range(3 + 1 + 4 + 1):  # after each epoch, and after a task's end, before the learner is written
        with killed_at(1):
            learned(*months[:2], out=tmp_path / "work")
    with patch.object(Run, "_checkpoint", side_effect=AssertionError("a checkpoint at which it was not stopped")):
        ended = learned(*months[:2], out=tmp_path / "work")
    assert_same(ended, learned(*months[:2]))


def test_stopped_when_the_learner_is_written_it_is_not_trained_again_and_leaves_nothing(months, tmp_path, monkeypatch):
    rename = os.rename
    for stop in ("before", "after"):

        def renamed(*paths, stop=stop):
            if stop == "after":
                rename(*paths)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "rename", renamed)
        with pytest.raises(KeyboardInterrupt):
            learned(months[0], out=tmp_path / "work")
    monkeypatch.setattr(os, "rename", rename)
    with patch.object(Run, "epoch_ended", side_effect=AssertionError("an epoch")):
        ended = learned(months[0], out=tmp_path / "work")
    assert_same(ended, learned(months[0]))
    assert not [name for name in ("checkpoint.pt", "held_out.json") if list(tmp_path.rglob(name))]


def test_an_interrupted_task_does_not_go_on_with_other_images_held_out(months, tmp_path):
    with killed_at(2):
        learned(months[0], out=tmp_path / "work")
    seen = []
    with pytest.raises(UserError, match=r"\.task1: was begun with held_out=0, not 2; continue with that"):
        learned(months[0], out=tmp_path / "work", held_out=2, on_progress=seen.append)
    assert not seen and len(learned(months[0], out=tmp_path / "work").history) == 1
    assert not list(tmp_path.rglob("held_out.json"))


def test_files_in_the_place_of_a_finished_task_are_refused_before_it_is_learned(months, tmp_path):
    (tmp_path / "work" / "task1").mkdir(parents=True)
    (tmp_path / "work" / "task1" / "notes.txt").touch()
    seen = []
    with pytest.raises(UserError, match="task1: has files, but no learner; move or remove it"):
        learned(months[0], out=tmp_path / "work", on_progress=seen.append)
    assert not seen


@pytest.mark.parametrize("name", ["task1", ".task1"])
def test_a_file_in_the_place_of_a_task_is_one_line(name, months, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / name).touch()
    with pytest.raises(UserError, match=f"{name}: is a file; move or remove it, or choose another out"):
        learned(months[0], out=tmp_path / "work")


def test_a_copy_made_while_it_learns_can_learn(months):
    copies = []
    learner = learned(months[0])
    learner.on_progress = lambda progress: copies.append(copy.deepcopy(learner)) if not copies else None
    learner.learn(months[1])
    (other,) = copies
    other.on_progress = None
    other.learn(months[1])
    assert_same(other, learner)


def test_what_history_returns_is_not_the_learners_own(months, tmp_path):
    learner = learned(months[0])
    for entry in (*learner.history, learner.learn(months[1])):
        entry["train_loss"].append("x")
        entry["classes"].clear()
    assert learner.history[0]["classes"] == list(MONTHS[0])
    learner.save(tmp_path)
    assert Learner.load(tmp_path).history == learner.history


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_learns_in_a_context_without_gradients_as_outside(context, months):
    with context():
        inside = learned(*months[:2])
    assert_same(inside, learned(*months[:2]))


def test_without_a_temporary_folder_it_asks_for_one(months, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(UserError, match="^learn: no temporary folder can be made .*; set TMPDIR"):
        learned(months[0])


def test_the_threads_of_a_learner_are_its_own_and_its_log_is_closed_after_an_error(months, tmp_path, monkeypatch):
    used, learn = [], Run.learn

    def learn_and_fail(run):
        learn(run)
        used.append(torch.get_num_threads())
        if run.folder.parent == tmp_path:
            raise ZeroDivisionError

    monkeypatch.setattr(Run, "learn", learn_and_fail)
    learned(months[0], threads=2, epochs=1, init_epoch=1)
    assert (used, torch.get_num_threads()) == ([2], 1)
    with pytest.raises(ZeroDivisionError):
        learned(months[0], threads=2, epochs=1, init_epoch=1, out=tmp_path)
    assert torch.get_num_threads() == 1
    if (opened := Path("/proc/self/fd")).exists():
        assert not [path for path in map(os.path.realpath, opened.iterdir()) if path.endswith("log.txt")]


def test_interrupted_without_a_folder_it_learns_the_task_again_from_its_start(months, monkeypatch):
    """Nothing is left to resume from, and no checkpoint is written that could be."""
    monkeypatch.setattr("pycil_wsc.runs.run.save_state", None)
    learner, epochs, ended = learned(months[0]), [], Run.epoch_ended

    def end_twice(run, *arguments):
        ended(run, *arguments)
        epochs.append(arguments)
        if len(epochs) == 2:
            raise KeyboardInterrupt

    with patch.object(Run, "epoch_ended", end_twice), pytest.raises(KeyboardInterrupt):
        learner.learn(months[1])
    learner.learn(months[1])
    assert_same(learner, learned(*months[:2]))


@pytest.mark.slow
def test_a_task_that_is_learned_again_counts_the_cost_of_scoring_once(months):
    learner, once = (learned(*months[:2], wsc={"importance": "fisher", "average_every": 1}) for _ in range(2))
    with patch.object(Evaluator, "test", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        learner.learn(months[2])
    passes = [one.learn(months[2])["importance_passes"] for one in (learner, once)]
    assert passes[0] == passes[1] > 0


def test_other_settings_or_images_in_the_folder_of_the_work_are_refused(months, tmp_path):
    learned(months[0], out=tmp_path)
    with pytest.raises(UserError, match="task1: was learned with other settings; choose another folder 'out'"):
        learned(months[0], out=tmp_path, epochs=3)
    with pytest.raises(UserError, match="task1: was learned from other images"):
        learned(arrays(months[1]), out=tmp_path)


@pytest.mark.slow
def test_the_work_of_another_learner_is_refused(months, tmp_path):
    """Same settings, and images of all tasks, but the second task was learned at another rate."""
    learned(months[0], memory_per_class="all").save(tmp_path / "january")
    for name, lrate in (("first", 0.1), ("second", 0.01)):
        learner = Learner.load(tmp_path / "january", quiet=True, lrate=lrate)
        learner.learn(months[1])
        learner.save(tmp_path / name)
    keys = {"lrate": 0.05, "out": tmp_path / "work", "quiet": True}
    first, second = (partial(Learner.load, tmp_path / name, **keys) for name in ("first", "second"))
    with killed_at(2):
        first().learn(months[2])
    with pytest.raises(UserError, match="checkpoint.pt: was made from another learner; delete it"):
        second().learn(months[2])
    first().learn(months[2])
    with pytest.raises(UserError, match="task3: was learned from another learner; choose another folder 'out'"):
        second().learn(months[2])
    first().learn(months[2])  # loaded


def test_two_processes_do_not_share_a_folder(months, tmp_path):
    with pycil_wsc.files.locked(tmp_path / "work"):
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool, pytest.raises(UserError, match="is in use by another process"):
            pool.apply(learned, (months[0],), {"out": tmp_path / "work"})


def test_a_learner_of_each_task_can_be_gone_back_to(months, tmp_path):
    learned(*months, out=tmp_path / "work")
    assert_same(Learner.load(tmp_path / "work" / "task2"), learned(*months[:2]))


# ---- what it learns from ---------------------------------------------------------------------------------------------


class Photos(torch.utils.data.Dataset):
    """Map-style, as torchvision's."""

    def __init__(self, images, names, form):
        self.classes = sorted(set(names))
        self.samples = [(form(image), self.classes.index(name)) for image, name in zip(images, names)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


FORMS = {
    "PIL images": Image.fromarray,
    "tensors": lambda image: torch.from_numpy(image).permute(2, 0, 1),
    "arrays": np.asarray,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_torch_dataset_is_learned_as_the_arrays_that_it_holds(form, months):
    images, names = arrays(months[0])
    assert_same(learned(Photos(images, names, FORMS[form])), learned((images, list(names))))


@pytest.mark.parametrize("label", [torch.tensor, np.array, lambda number: torch.tensor([float(number)]), np.int64])
def test_labels_of_a_torch_dataset_may_be_whole_numbers_of_any_type(label):
    source = Few([(COLOUR, label(1)), (COLOUR, label(0))])
    source.classes = ["no", "yes"]
    assert read_source(source).info.classes == ("no", "yes")
    assert read_source(source).train.targets.tolist() == [1, 0]


def test_a_subset_of_a_torch_dataset_has_its_class_names():
    source = Few([(COLOUR, 2), (COLOUR, 0), (COLOUR, 1)])
    source.classes = ["no", "maybe", "yes"]
    part = read_source(Subset(Subset(source, [0, 1]), [1, 0]))
    assert part.info.classes == ("no", "yes") and part.train.targets.tolist() == [0, 1]


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK"])
def test_pil_images_of_other_colours_are_converted(mode):
    red = Image.new("RGB", (8, 8), (255, 0, 0)).convert(mode)
    assert np.unique(read_source(([red], ["red"])).train.images.reshape(-1, 3), axis=0).tolist() == [[255, 0, 0]]


def test_grey_and_coloured_pil_images_may_be_mixed():
    mixed = [Image.new("L", (8, 8), 7), Image.new("RGB", (8, 8), (7, 7, 7))]
    assert np.unique(read_source((mixed, ["a", "b"])).train.images).tolist() == [7]


def test_a_folder_is_learned_as_its_files_with_labels(tmp_path):
    source = photos(tmp_path / "january", ["cat", "ant"], 1)
    files = sorted(Path(tmp_path, "january").rglob("*.png"))
    keys = {"image_size": 16, "num_workers": 0, "epochs": 1, "init_epoch": 1}
    one, other = learned(source, **keys), learned((files, [file.parent.name for file in files]), **keys)
    assert_same(one, other)
    assert one.predict([str(file) for file in files]).tolist() == other.predict(list(map(str, files))).tolist()


@pytest.mark.parametrize("form", [str, Path])
def test_one_file_name_is_not_a_list_of_them(form, tmp_path):
    keys = {"image_size": 16, "num_workers": 0, "epochs": 1, "init_epoch": 1}
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **keys)
    file = form(next(Path(tmp_path, "january").rglob("*.png")))
    with pytest.raises(UserError, match="is one file; give a list of files"):
        learner.predict(file)
    assert learner.predict([file]).shape == (1,)


def test_numbers_are_names_too(months):
    images, names = arrays(months[0])
    learner = learned((images, [10 * NAMES.index(name) for name in names]))
    assert learner.classes == ["0", "20"] and set(learner.predict(images)) <= {"0", "20"}


def test_the_first_task_has_the_schedule_of_the_later_ones_unless_told_otherwise():
    config = Learner("wsc", epochs=7, lrate=0.02).config
    assert (config.init_epoch, config.init_lr) == (7, 0.02)
    assert Learner("wsc", epochs=7, init_epoch=9).config.init_epoch == 9


def test_keys_may_be_numpys_numbers_and_paths():
    numbers = {"lrate": np.float64(0.1), "memory_per_class": np.int64(5), "nme": np.bool_(False)}
    config = Learner("wsc", **numbers, milestones=(np.int64(3),), wsc={"retain": np.float32(0.5)}).config
    assert (config.lrate, config.memory_per_class, config.nme, config.milestones) == (0.1, 5, False, (3,))
    assert config.wsc.retain == 0.5
    assert Learner("wsc", milestones=np.array([3, 5])).config.milestones == (3, 5)
    config = Learner("wsc", data_root=Path("some/data"), convnet_options={"width": np.int64(4)}).config
    assert (config.data_root, type(config.convnet_options["width"])) == ("some/data", int)
    with pytest.raises(UserError, match="epochs: expected a whole number, got 2.5"):
        Learner("wsc", epochs=np.float64(2.5))


# ---- exemplars -------------------------------------------------------------------------------------------------------


def by_class(learner):
    """Class -> its exemplars, in some order that depends on the images alone."""
    held = learner._held.train
    return {
        name: sorted(image.tobytes() for image in held.images[held.targets == label])
        for label, name in enumerate(learner.classes)
    }


def test_with_all_kept_the_memory_is_the_union_and_joint_trains_on_it(months, tmp_path):
    """Whether a class came at once or in two parts."""
    (images, names), half = arrays(months[0]), np.arange(20) % 10 < 5
    parts = learned((images[half], names[half]), (images[~half], names[~half]), name="joint", memory_per_class="all")
    union = learned((images, names), name="joint", memory_per_class="all")
    assert by_class(parts) == by_class(union) and len(by_class(union)["cat"]) == 10
    assert parts.history[1]["images_trained"] == 10 * 3 + 20 * 4, "three epochs on a half, four on the union"


@pytest.mark.parametrize("name", ["replay", "er_ace", "gdumb"])
def test_an_update_after_which_no_exemplar_would_be_left_is_refused_and_nothing_is_lost(name, months, tmp_path):
    keys = {"memory_update": "task"} if name == "er_ace" else {}
    learner = learned(months[0], name=name, fixed_memory=False, memory_size=2, epochs=1, init_epoch=1, **keys)
    images = arrays(months[0])[0]
    answers = learner.predict(images).tolist()
    with pytest.raises(UserError) as error:
        learner.learn(months[1])
    assert str(error.value) == (
        "memory_size: the memory holds 2 exemplars, fewer than one for each of 3 classes; "
        "save the learner, and load it with a larger memory_size"
    )
    assert learner.predict(images).tolist() == answers
    assert [line["exemplars"] for line in learner.history] == [2]
    learner.save(tmp_path / "tight")
    larger = Learner.load(tmp_path / "tight", memory_size=6, quiet=True)
    larger.learn(months[1])  # of a class that does not come again there is still one
    assert [line["exemplars"] for line in larger.history] == [2, 5]


@pytest.mark.parametrize("budget", [8 * 8 * 3 * 9 + 5, 0])
def test_exemplars_take_at_most_the_bytes_they_may(budget, months):
    learner = learned(*months, memory_bytes=budget)
    assert learner._held.train.images.nbytes <= budget
    assert {len(images) for images in by_class(learner).values()} == {9 // 4 if budget else 0}
    with_files = budget // (8 * 8 * 3)
    assert learner.history[0]["exemplars"] == with_files // 2 * 2


def test_the_logits_that_are_stored_with_exemplars_count_as_bytes(months):
    """Two classes, then three: an exemplar takes its pixels and a float32 for each class."""
    budget = 8 * 8 * 3 * 9 + 5
    learner = learned(*months[:2], name="derpp", memory_update="task", memory_bytes=budget)
    logits = learner._state["learner"]["_extra_state"]["stored"]["logits"]["values"]
    assert learner._held.train.images.nbytes + logits.nbytes <= budget
    fit = [budget // (8 * 8 * 3 + 4 * classes) // classes * classes for classes in (2, 3)]
    assert [line["exemplars"] for line in learner.history] == fit == [8, 6]
    tight = learned(months[0], name="derpp", memory_update="task", memory_bytes=8 * 8 * 3 * 3)
    with pytest.raises(UserError, match="^memory_bytes: the memory holds 2 exemplars, fewer than one for each of 3 cl"):
        tight.learn(months[1])


def test_a_task_that_cannot_be_written_is_learned_again_not_twice(months, tmp_path):
    learner = learned(months[0], out=tmp_path / "work")
    with patch.object(learner_file, "write", side_effect=OSError("disk full")), pytest.raises(OSError):
        learner.learn(months[1])
    assert len(learner.history) == 1
    learner.learn(months[1])
    assert len(learner.history) == 2 and (tmp_path / "work" / "task2" / "learner.safetensors").exists()
    assert_same(learner, learned(*months[:2]))


# ---- keys at load ----------------------------------------------------------------------------------------------------


def test_a_learner_saved_with_keys_of_another_version_is_one_line(shelf, monkeypatch):
    monkeypatch.setattr("pycil_wsc.classifier.store.learner_file.read", with_key("invented", learner_file.read))
    with pytest.raises(UserError, match="shelf: was saved by another version of pycil_wsc \\(unknown key 'invented'"):
        Learner.load(shelf)


def test_keys_that_the_first_task_fixed_are_refused_at_load_unless_they_are_as_saved(shelf):
    fixed = {"convnet_type": "resnet20", "consolidate": True, "image_size": 16, "augmentation": "timm", "padding": 3}
    fixed |= {"flip": True, "brightness": 0.5, "init_epoch": 9, "convnet_options": {"width": 8}}
    for name, value in fixed.items():
        with pytest.raises(UserError, match=rf"^{name}(\.width)?: was fixed by the first task; leave it out") as error:
            Learner.load(shelf, **{name: value})
        assert "\n" not in str(error.value)
    same = {"convnet_type": "tiny", "consolidate": False, "image_size": None, "padding": None, "init_epoch": 3}
    assert Learner.load(shelf, lrate=0.5, **same).config.lrate == 0.5


def test_a_backbones_options_may_be_repeated_at_load_but_not_changed(months, tmp_path):
    learned(months[0], convnet_options={"width": 4}).save(tmp_path / "shelf")
    assert Learner.load(tmp_path / "shelf", convnet_options={"width": 4}).config.convnet_options == {"width": 4}
    with pytest.raises(UserError, match="convnet_options.width: was fixed by the first task"):
        Learner.load(tmp_path / "shelf", convnet_options={"width": 8})


def test_milestones_follow_other_epochs_at_load_unless_they_were_given(months, tmp_path):
    learned(months[0]).save(tmp_path / "scaled")
    learned(months[0], milestones=[1, 2]).save(tmp_path / "given")
    assert Learner.load(tmp_path / "scaled", epochs=2).config.milestones == Learner(epochs=2).config.milestones
    assert Learner.load(tmp_path / "given", epochs=9).config.milestones == (1, 2)
    with pytest.raises(UserError, match=r"milestones: \[1, 2\] must be increasing and within the 2 epochs"):
        Learner.load(tmp_path / "given", epochs=2)


@pytest.mark.parametrize(
    "name, before, later",
    [
        ("wsc", {}, {"optimizer": "adamw"}),
        ("wsc", {"optimizer": "adamw"}, {"optimizer": "sgd"}),
        ("foster", {}, {"epochs": 2}),
        ("replay", {"memory_bytes": 1000}, {"memory_bytes": None}),
    ],
)
def test_what_follows_from_a_key_follows_it_at_load(name, before, later, months, tmp_path):
    learned(months[0], name=name, **before).save(tmp_path / "shelf")
    loaded, new = Learner.load(tmp_path / "shelf", **later).config, Learner(name, **SMALL | before | later).config
    values = [{k: v for k, v in config.to_dict().items() if k not in FIXED} for config in (loaded, new)]
    assert values[0] == values[1] != Learner(name, **SMALL | before).config.to_dict()


def test_what_was_given_stays_at_load(months, tmp_path):
    given = {"lrate": 0.05, "weight_decay": 0.003, "wsc": SMALL["wsc"] | {"average_lr": 0.02}}
    learned(months[0], **given).save(tmp_path / "shelf")
    config = Learner.load(tmp_path / "shelf", optimizer="adamw").config
    assert (config.lrate, config.weight_decay, config.wsc.average_lr) == (0.05, 0.003, 0.02)


def with_key(name, read):
    def read_more(*arguments):
        stored, version = read(*arguments)
        return stored._replace(config=stored.config | {name: 1}), version

    return read_more


# ---- what it refuses -------------------------------------------------------------------------------------------------

GREY = np.zeros((2, 8, 8), np.float32)

COLOUR = np.zeros((8, 8, 3), np.uint8)

DEEP = Image.fromarray(np.full((8, 8), 40_000, np.uint16))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield GREY[0], 0


class Few(torch.utils.data.Dataset):
    classes = ["only"]

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Numbered(Few):
    classes: Any = 3


class NumberedNames(Few):
    classes: Any = (1,)


class Streamed(torch.utils.data.IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        yield COLOUR, 0


def damaged():
    """An image in half a file."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(content, "PNG")
    return Image.open(io.BytesIO(content.getvalue()[:1500]))


REFUSED = {
    "tasks: is a key for experiments in JSON files only; leave it out": lambda: Learner("wsc", tasks=["npz:a.npz"]),
    "unknown key 'epoch'; did you mean 'epochs'?": lambda: Learner("wsc", epoch=3),
    "unknown model_name 'wcs'; did you mean 'wsc'?": lambda: Learner("wcs"),
    "nothing has been learned yet; call learn first": lambda: Learner("wsc").predict(GREY),
    "images: float32 of shape (2, 8, 8); give uint8 (N, side, side, 3)": lambda: Learner().learn((GREY, [0, 1])),
    "labels: 3 is not a list; give one label per image": lambda: Learner().learn((GREY.astype(np.uint8), 3)),
    "max_tasks: is a key for experiments in JSON files only; leave it out": lambda: Learner.load("absent", max_tasks=1),
    "Stream: has no length; give a map-style Dataset": lambda: Learner().learn(Stream()),
    "label 1 has no name in its 1 classes": lambda: Learner().learn(Few([(COLOUR, 0), (COLOUR, 1)])),
    "Few: item 0: is a torch.uint8 tensor (4, 8, 8), not a PIL image": lambda: Learner().learn(
        Few([(torch.zeros(4, 8, 8, dtype=torch.uint8), 0)])
    ),
    "(images, labels): 2 images and 1 labels": lambda: Learner().learn((GREY.astype(np.uint8), ["cat"])),
    "labels: 0.5 is neither a string nor a whole number": lambda: Learner().learn((GREY.astype(np.uint8), [0.5, 1])),
    "cannot learn from a list; give 'folder:PATH'": lambda: Learner().learn([GREY]),
    "labels: 0.5 is neither a string nor a whole": lambda: Learner().learn(Few([(COLOUR, torch.tensor(0.5))])),
    "labels: an array of shape (9,); give a whole number": lambda: Learner().learn(Few([(COLOUR, torch.ones(9))])),
    "Few: item 0: more than 8 bits per channel (mode I;16)": lambda: Learner().learn(Few([(DEEP, 0)])),
    "Few: item 1: more than 8 bits per channel (mode F)": lambda: Learner().learn(
        Few([(COLOUR, 0), (Image.fromarray(GREY[0]), 0)])
    ),
    "Few: item 0: cannot be decoded (image file is truncated": lambda: Learner().learn(Few([(damaged(), 0)])),
    "images: item 2: cannot be decoded (image file is truncated": lambda: Learner().learn(
        ([Image.new("RGB", (32, 32)), damaged()], [0, 1])
    ),
    "Photos: item 0: is a torch.float32 tensor (8, 8, 3), not a PIL image or a uint8 tensor": lambda: Learner().learn(
        Photos(GREY[..., None].repeat(3, -1), ["cat", "dog"], torch.from_numpy)
    ),
    "no saved learner there": lambda: Learner.load("nowhere"),
    "unknown key 'heldout'; did you mean 'held_out'?": lambda: Learner(heldout=1),
    "unknown key 'on_progres'; did you mean 'on_progress'?": lambda: Learner(on_progres=print),
    "labels: class name 'a\\x00' has a zero byte": lambda: Learner().learn(([COLOUR, COLOUR], ["a", "a\0"])),
    f"{Path.home()}/nowhere: cannot be read": lambda: pycil_wsc.load("~/nowhere"),
    "folder: 'a\\x00b' has a zero byte": lambda: Learner.load("a\0b"),
    "folder: None is not the name of a folder": lambda: Learner.load(None),
    "folder: 3 is not the name of a folder": lambda: Learner().save(3),
    "out: 3 is not the name of a folder": lambda: Learner(out=3),
    f"{256 * 'x'}: no saved learner there": lambda: Learner.load(256 * "x"),
    "a\\x00b.jpg: embedded null byte": lambda: Learner().learn((["a\0b.jpg"], ["cat"])),
    "unknown dataset 'a\\x00b'": lambda: Learner().learn("a\0b"),
    "images: are not an array (can't convert Sparse": lambda: Learner().learn((torch.eye(2).to_sparse(), [0, 1])),
    "images: are not an array (Cannot copy out of meta": lambda: Learner().learn(
        (torch.ones(2, device="meta"), [0, 1])
    ),
    "Numbered: its 'classes' are 3, not a list of names": lambda: Learner().learn(Numbered([(COLOUR, 0)])),
    "NumberedNames: its 'classes' are (1,), not a list of names": lambda: Learner().learn(NumberedNames([(COLOUR, 0)])),
    "Streamed: has no length; give a map-style Dataset": lambda: Learner().learn(Streamed()),
    "memory_bytes: 100 bytes are less than an image takes (192)": lambda: Learner("replay", memory_bytes=100).learn(
        (np.stack([COLOUR, COLOUR]), [0, 1])
    ),
    "did you mean 'folder:/'?": lambda: Learner().learn("/"),
    f"did you mean 'npz:{__file__}'?": lambda: Learner().learn(__file__),
    "convnet_options of 'resnet8': ": lambda: Learner(
        convnet_type="resnet8", convnet_options={"width": 10**12}, device="cpu", quiet=True
    ).learn((np.stack([COLOUR, COLOUR]), [0, 1])),
    "choose a smaller network": lambda: Learner(
        convnet_type="resnet8", convnet_options={"width": 10**21}, device="cpu", quiet=True
    ).learn((np.stack([COLOUR, COLOUR]), [0, 1])),
    "batch_size: batch norm cannot train on a single image": lambda: Learner(
        convnet_type="resnet18", device="cpu", quiet=True
    ).learn((COLOUR[None], [0])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_one_line(message):
    with pytest.raises(UserError) as error:
        REFUSED[message]()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_was_never_learned_is_left_out_of_the_test_and_counted(months):
    learner = learned(months[0])
    images, names = arrays(months[1], "test")
    measures = learner.evaluate((images, names))
    assert (measures["images"], measures["unknown"], list(measures["classes"])) == (10, 10, ["cat"])
    with pytest.raises(UserError, match="has no image of a learned class"):
        learner.evaluate((images[names == "bee"], names[names == "bee"]))


def test_a_folder_with_a_test_part_is_tested_on_it(tmp_path):
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES)
    photos(tmp_path / "both" / "train", ["ant"], 2, 3)
    photos(tmp_path / "both" / "val", ["ant"], 3, 5)
    both = f"folder:{tmp_path / 'both'}"
    assert learner.evaluate(both)["images"] == 5
    line = learner.learn(photos(tmp_path / "february", ["bee"], 2), accept=pycil_wsc.Accept(max_drop=0.9, on=both))
    assert line["gate"]["old"]["images"] == 5


def test_lines_and_a_bar_unless_quiet(months, capsys):
    learner = learned(months[0], quiet=False)
    assert "task 1/1  2 classes: loss" in capsys.readouterr().out
    assert learner.history[0]["task"] == 1, "counted as in lines and folders"
    learned(months[0])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"memory_size": 5}, "memory_size: has no effect with fixed_memory true; memory_per_class (4) is used instead"),
        (
            {"fixed_memory": False},
            "memory_per_class: has no effect with fixed_memory false; memory_size (2000)",
        ),
        (
            {"name": "derpp", "memory_per_class": 9},
            "memory_per_class: has no effect with fixed_memory false, the default with memory_update 'step'; "
            "memory_size (2000) is used instead",
        ),
        ({"memory_bytes": 2000}, None),
        ({"memory_per_class": 9}, None),
        ({"memory_per_class": 11}, "memory_per_class: 11 is more than any class has images (at most 10); all images"),
        ({"memory_per_class": "all"}, None),
        (
            {"name": "wsc", "lrate": 0.01, "wsc.average_lr": 0.1},
            "wsc.average_lr: after the warm-up the learning rate rises from lrate 0.01 to 0.1",
        ),
        ({"name": "wsc", "lrate": 0.01}, None),
    ],
)
def test_keys_without_effect_or_with_one_that_may_surprise_are_told_in_a_line(keys, line, months, capsys):
    learned(months[0], **{"name": "replay", "quiet": False, "epochs": 1, "init_epoch": 1} | keys)
    lines = [text for text in capsys.readouterr().out.splitlines() if "is held out" not in text]
    assert len(lines) == 1 + bool(line) and (line is None or line in lines[0])
    learned(months[0], **{"name": "replay", "epochs": 1, "init_epoch": 1} | keys)
    assert capsys.readouterr().out == ""


def test_what_a_learner_is_is_told_by_its_repr(months):
    assert repr(Learner("wsc")) == "<Learner 'wsc': nothing learned yet>"
    assert repr(learned(months[0], epochs=1, init_epoch=1)) == "<Learner 'wsc': 2 classes after task 1, 8 exemplars>"


def test_predictions_of_no_images_are_none_and_of_odd_lists_one_line(months):
    learner = learned(months[0], epochs=1, init_epoch=1)
    for nothing in ([], (), np.empty((0, 8, 8, 3), np.uint8)):
        assert learner.predict(nothing).tolist() == []
    with pytest.raises(UserError, match="^image 0: is a list; give a PIL image, a file name, or uint8"):
        learner.predict([[1], [1, 2]])


def test_images_of_another_kind_than_before_are_refused_and_change_nothing(months, tmp_path):
    learner = learned(months[0])
    before = learner.predict(TEMPLATES.astype(np.uint8)).tolist()
    with pytest.raises(UserError, match="has image files, earlier tasks had arrays; give all tasks in the same form"):
        learner.learn(photos(tmp_path / "january", ["cat"], 1))
    assert learner.predict(TEMPLATES.astype(np.uint8)).tolist() == before and len(learner.history) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wsc", "der", "aper_finetune"])
def test_a_saved_learner_with_a_pre_trained_backbone_goes_on_without_its_file(name, months, tmp_path):
    timm = pytest.importorskip("timm")
    narrow = {"channels": [8, 8, 8, 8], "stem_width": 8, "layers": [1, 1, 1, 1]}
    torch.manual_seed(5)
    state, file = timm.create_model("resnet18", **narrow).state_dict(), tmp_path / "weights.pth"
    torch.save(state, file)
    keys = {"convnet_type": "timm:resnet18", "convnet_options": narrow, "image_size": 32, "precision": "fp32"}
    keys |= {"pretrained": str(file), "epochs": 1, "init_epoch": 1}
    learner = learned(months[0], name=name, **keys)
    scratch = learned(months[0], name=name, **keys | {"pretrained": False})
    images, _ = arrays(months[0])
    assert not torch.equal(learner.answers.classifier.logits(images), scratch.answers.classifier.logits(images))
    learner.save(tmp_path / "shelf")
    learner.learn(months[1])
    file.unlink()
    other = Learner.load(tmp_path / "shelf", quiet=True)
    other.learn(months[1])
    assert_same(learner, other)
