"""Streams: tasks with their own images, whose classes are identified by name and may recur."""

import numpy as np
import pytest
from support.herding import herding_by_the_book

from pycil_wsc.data.data_options import ALL
from pycil_wsc.data.images.npz import info_of_arrays
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.growing_dataset import extended, joined, kept
from pycil_wsc.data.tasks.tasks import TaskStream
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError


def part(classes, count=6, test=2, seed=0, side=8):
    """``count`` training and ``test`` test images of each class, by class; each pixel of an image is a number of its
    own.
    """
    rng, splits = np.random.default_rng(seed), []
    for number in (count, test):
        targets = np.repeat(np.arange(len(classes)), number)
        images = rng.integers(0, 256, (len(targets), 1, 1, 3), dtype=np.uint8)
        splits.append(Split(np.broadcast_to(images, (len(targets), side, side, 3)).copy(), targets))
    return Dataset(info_of_arrays("part", tuple(classes), splits[0].images), *splits)


def stream(*parts):
    return joined(parts)


JANUARY, FEBRUARY, MARCH = part(["cat", "dog"], seed=1), part(["ant", "cat"], seed=2), part(["dog"], seed=3)


def test_classes_are_counted_as_they_appear_and_a_name_that_comes_again_is_the_class():
    tasks = TaskStream(whole := stream(JANUARY, FEBRUARY, MARCH)).tasks
    assert whole.info.classes == ("cat", "dog", "ant")
    assert [(task.num_old, task.num_seen, task.num_new) for task in tasks] == [(0, 2, 2), (2, 3, 1), (3, 3, 0)]
    for task, each in zip(tasks, (JANUARY, FEBRUARY, MARCH)):
        names = [whole.info.classes[label] for label in whole.train.targets[task.train_indices]]
        found = {name: whole.train.images[task.train_indices][np.array(names) == name] for name in names}
        wanted = {name: each.train.images[each.train.targets == k] for k, name in enumerate(each.info.classes)}
        assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)
        assert names == sorted(names, key=whole.info.classes.index)
    assert [len(task.test_indices) for task in tasks] == [4, 8, 10]


def features(dataset):
    return lambda indices: dataset.train.images[indices, 0, 0].astype(float)


def remembered(dataset, strategy="herding", fixed=True, per_class=3, total=9):
    memory = ExemplarMemory(fixed, per_class, total, strategy)
    for task in TaskStream(dataset).tasks:
        memory.update(task, dataset.train.targets, features(dataset), np.random.default_rng(task.index))
    return memory


def test_exemplars_of_a_class_that_comes_again_are_herded_out_of_the_old_ones_and_the_new_images():
    whole = stream(JANUARY, FEBRUARY)
    memory, before = remembered(whole), remembered(stream(JANUARY))
    rows = np.concatenate(
        [np.sort(before.classes[0]), np.flatnonzero((whole.train.targets == 0) & (np.arange(24) > 11))]
    )
    assert memory.classes[0].tolist() == rows[herding_by_the_book(features(whole)(rows), 3)].tolist()
    assert memory.classes[1].tolist() == before.classes[1].tolist(), "dog did not come again"


def test_with_room_for_all_the_memory_is_that_of_the_union():
    """Bit by bit: herding sees the same images of a class in the same order, whether they came at once or in parts."""
    later, at_once = stream(JANUARY, MARCH), part(["cat", "dog"], seed=1)
    images = np.concatenate([at_once.train.images, MARCH.train.images])
    labels = np.concatenate([at_once.train.targets, np.full(6, 1)])
    union = stream(Dataset(at_once.info, Split(images, labels), at_once.test))
    for strategy in ("herding", "random"):
        ours, theirs = (remembered(each, strategy, per_class=100) for each in (later, union))
        assert {c: sorted(kept) for c, kept in ours.classes.items()} == {
            c: sorted(k) for c, k in theirs.classes.items()
        }
        assert len(ours) == 18
    assert remembered(later, per_class=100).classes[1].tolist() == remembered(union, per_class=100).classes[1].tolist()


def test_a_shared_memory_stays_within_its_size_when_classes_come_again():
    memory = remembered(stream(JANUARY, FEBRUARY, MARCH), fixed=False, total=7)
    assert {c: len(indices) for c, indices in memory.classes.items()} == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("fixed, shares", [(True, [3 / 12, 3 / 12, 3 / 6]), (False, [9 / 30, 9 / 30, 9 / 30])])
def test_a_reservoir_takes_in_new_images_of_known_classes(fixed, shares):
    """``shares``: the probability of each image of cat, dog and ant. A fixed one has room for three images of each."""
    counts, whole = np.zeros(30), stream(JANUARY, FEBRUARY, MARCH)
    for seed in range(300):
        memory = ExemplarMemory(fixed, 3, 9, "reservoir")
        for task in TaskStream(whole).tasks:
            memory.update(task, whole.train.targets, None, np.random.default_rng([seed, task.index]))
        assert len(memory) == 9 and all((whole.train.targets[i] == c).all() for c, i in memory.classes.items())
        counts[memory.indices] += 1
    probability = np.array(shares)[whole.train.targets]
    deviation = np.sqrt(300 * probability * (1 - probability))
    assert (np.abs(counts - 300 * probability) <= 5 * deviation).all(), "as many of each, old class or new"


def test_a_reservoir_of_all_samples_keeps_those_of_known_classes_too():
    whole = stream(JANUARY, FEBRUARY, MARCH)
    memory = remembered(whole, "reservoir", per_class=ALL)
    assert sorted(memory.indices) == list(range(30))
    assert all((whole.train.targets[kept] == c).all() for c, kept in memory.classes.items())


def test_what_is_kept_between_tasks_is_the_exemplars_in_their_order():
    whole = stream(JANUARY, FEBRUARY)
    held, numbers = kept(whole, np.array([20, 3, 7]))
    assert np.array_equal(held.train.images, whole.train.images[[3, 7, 20]]) and held.info == whole.info
    assert held.train.targets.tolist() == whole.train.targets[[3, 7, 20]].tolist()
    assert numbers[[3, 7, 20]].tolist() == [0, 1, 2] and (np.delete(numbers, [3, 7, 20]) == -1).all()
    tasks, full = TaskStream(extended(held, MARCH)).tasks, TaskStream(stream(JANUARY, FEBRUARY, MARCH)).tasks
    assert [(t.num_old, t.num_seen) for t in tasks] == [(t.num_old, t.num_seen) for t in full]
    assert tasks[2].train_indices.tolist() == [3, 4, 5, 6, 7, 8], "the new images come after what is held"
    assert extended(held, MARCH).fingerprint == stream(JANUARY, FEBRUARY, MARCH).fingerprint


def test_the_fingerprint_tells_streams_apart_by_images_names_and_order():
    renamed = part(["cat", "cow"], seed=1)
    streams = [stream(JANUARY, MARCH), stream(MARCH, JANUARY), stream(renamed, MARCH), stream(JANUARY), stream(JANUARY)]
    assert len({each.fingerprint["sha256"] for each in streams}) == 4
    assert streams[0].fingerprint["tasks"][:1] == streams[3].fingerprint["tasks"]


@pytest.mark.parametrize(
    "other, message",
    [
        (part(["cat"], side=16), "part: images of side 16, earlier tasks had 8; resize them to one"),
        (
            Dataset(MARCH.info, Split(np.array(["a.png"]), np.array([0])), Split(np.array(["b.png"]), np.array([0]))),
            "part: has image files, earlier tasks had arrays; give all tasks in the same form",
        ),
        (
            Dataset(part(["ant", "bee"]).info, part(["ant"]).train, part(["ant", "bee"]).test),
            "part: class 'bee' has test images, but no training images in this task or an earlier one; "
            "add some, or remove its test images",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_one_line(other, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        stream(JANUARY, other)
