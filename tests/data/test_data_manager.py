"""Class orders and task splits are PyCIL's, for any sizes."""

import numpy as np
import pytest

from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split
from pycil_wsc.data.tasks.tasks import DataManager
from pycil_wsc.errors import UserError

SEED_1993 = """
68 56 78 8 23 84 90 65 74 76 40 89 3 92 55 9 26 80 43 38 58 70 77 1 85 19 17 50 28 53 13 81 45 82 6 59 83 16 15 44
91 41 72 60 79 52 20 10 31 54 37 95 14 71 96 98 97 2 64 66 42 22 35 86 24 34 87 21 99 0 88 27 18 94 11 12 47 25 30 46
62 69 36 61 7 63 75 5 32 4 51 48 73 93 39 67 29 49 57 33"""
FIRST_TEN = {
    1994: [72, 6, 33, 96, 60, 94, 29, 40, 45, 66],
    1995: [91, 18, 57, 73, 66, 71, 68, 61, 44, 54],
    1996: [35, 18, 40, 85, 63, 62, 77, 73, 12, 44],
    1997: [88, 77, 36, 54, 92, 4, 11, 24, 71, 31],
}


def dataset(classes=100, per_class=3):
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), per_class))
    split = Split(np.zeros((len(targets), 1, 1, 3), np.uint8), targets)
    return Dataset(
        DatasetInfo("made up", tuple(map(str, range(classes))), 1, (0,) * 3, (1,) * 3, "pad", 0, False, 0.0),
        split,
        split,
    )


def test_seed_1993_gives_pycils_order():
    assert DataManager(dataset(), True, 1993, 10, 10).class_order == [int(c) for c in SEED_1993.split()]


@pytest.mark.parametrize("seed", FIRST_TEN)
def test_other_seeds_begin_as_pycils(seed):
    assert DataManager(dataset(), True, seed, 10, 10).class_order[:10] == FIRST_TEN[seed]


def test_without_shuffle_the_order_is_the_data_sets():
    assert DataManager(dataset(12), False, 5, 4, 4).class_order == list(range(12))


@pytest.mark.parametrize(
    "first, increment, sizes",
    [
        (10, 10, [10] * 10),
        (5, 5, [5] * 20),
        (50, 10, [50, 10, 10, 10, 10, 10]),
        (20, 20, [20] * 5),
        (10, 40, [10, 40, 40, 10]),
        (30, 30, [30, 30, 30, 10]),
        (100, 10, [100]),
        (99, 5, [99, 1]),
    ],
)
def test_tasks_cover_every_class_once_in_order(first, increment, sizes):
    data, manager = dataset(), DataManager(dataset(), True, 1993, first, increment)
    assert [task.num_new for task in manager.tasks] == sizes
    assert sorted(np.concatenate([task.train_indices for task in manager.tasks])) == list(range(300))
    for task in manager.tasks:
        labels = manager.train_targets[task.train_indices]
        assert labels.tolist() == sorted(labels) and set(labels) == set(range(task.num_old, task.num_seen))
        assert set(manager.test_targets[task.test_indices]) == set(range(task.num_seen))
        for label in set(labels):
            own = task.train_indices[labels == label]
            assert own.tolist() == np.flatnonzero(data.train.targets == manager.class_order[label]).tolist()


def test_tasks_may_have_as_many_classes_as_they_are_given():
    even, uneven = DataManager(dataset(8), True, 1993, 4, 4), DataManager(dataset(8), True, 1993, 10, 10, [3, 1, 2, 2])
    assert [task.num_new for task in uneven.tasks] == [3, 1, 2, 2] and uneven.class_order == even.class_order
    assert uneven.tasks[3].train_indices.tolist() == even.tasks[1].train_indices[6:].tolist()


@pytest.mark.parametrize(
    "increments, line",
    [
        ([3, 1, 2], "increments: add up to 6 of the 8 classes of 'made up'; make them larger, or choose 6 of them"),
        ([3, 1, 5], "increments: add up to 9, but 'made up' has 8 classes; make them smaller"),
    ],
)
def test_tasks_that_leave_classes_over_are_refused(increments, line):
    with pytest.raises(UserError, match=line):
        DataManager(dataset(8), True, 1993, 10, 10, increments)


def test_too_large_a_first_task_is_refused():
    with pytest.raises(UserError, match="init_cls 101 is more than the 100 classes"):
        DataManager(dataset(), True, 1993, 101, 10)
