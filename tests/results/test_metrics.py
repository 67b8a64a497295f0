"""Metrics against hand-worked examples and PyCIL's own formula."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.results import metrics
from pycil_wsc.runs.predictions import _classes_of_other_tasks
from pycil_wsc.training.processes import SINGLE_PROCESS

MATRIX = [[90.0], [60.0, 80.0], [70.0, 50.0, 85.0]]


def test_forgetting_and_plasticity_of_a_hand_worked_matrix():
    assert metrics.forgetting(MATRIX) == pytest.approx(((90 - 70) + (80 - 50)) / 2)
    assert metrics.new_task_accuracy(MATRIX) == pytest.approx((90 + 80 + 85) / 3)
    assert metrics.forgetting([[88.0]]) == 0.0


def test_a_task_that_got_better_after_it_was_learned_is_not_forgotten():
    assert metrics.forgetting([[50.0], [70.0, 60.0]]) == 0.0


def test_forgetting_is_pycils_where_pycils_is_right():
    rng = np.random.default_rng(0)
    matrix = [rng.uniform(0, 100, t + 1).tolist() for t in range(10)]
    table = np.zeros((10, 10))
    for t, row in enumerate(matrix):
        table[t, : t + 1] = row
    table = table.T
    assert metrics.forgetting(matrix) == pytest.approx(np.mean((np.max(table, axis=1) - table[:, 9])[:9]))


def test_groups_are_the_true_tasks():
    targets = np.array([0, 0, 1, 2, 2, 2, 2, 3])
    predictions = np.array([0, 1, 1, 2, 2, 2, 0, 0])[:, None]
    assert metrics.task_accuracies(predictions, targets, np.array([0, 0, 1, 2])[targets]) == [
        pytest.approx(200 / 3),
        75.0,
        0.0,
    ]
    assert metrics.accuracy(predictions, targets) == pytest.approx(100 * 5 / 8)


def test_top_k_counts_a_hit_anywhere_and_top_1_the_first():
    predictions, targets = np.array([[0, 1], [1, 0], [1, 0]]), np.array([1, 1, 2])
    assert metrics.top_k_accuracy(predictions, targets) == pytest.approx(200 / 3)
    assert metrics.accuracy(predictions, targets) == pytest.approx(100 / 3)


def test_a_confusion_matrix_has_a_row_for_each_true_class():
    targets, predictions = np.array([0, 0, 1, 2, 2, 2]), np.array([[0, 1], [2, 0], [1, 0], [2, 1], [1, 2], [1, 0]])
    assert metrics.confusion_matrix(predictions, targets, 4).tolist() == [
        [1, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 2, 1, 0],
        [0, 0, 0, 0],
    ]


def test_the_classes_that_a_known_task_leaves_are_those_of_its_samples():
    """Task 1 has a class of task 0 too: 1; there is no test image of its class 3. Class 4 has not come yet."""
    manager = SimpleNamespace(
        test_targets=np.array([0, 1, 1, 2]),
        test_tasks=np.array([0, 0, 1, 1]),
        train_targets=np.array([0, 1, 3, 4]),
        train_tasks=np.array([0, 0, 1, 2]),
    )
    outputs = SimpleNamespace(batch_size=4)
    learner = SimpleNamespace(manager=manager, processes=SINGLE_PROCESS, device=torch.device("cpu"), outputs=outputs)
    (others,) = _classes_of_other_tasks(learner, Task(1, 2, 4, np.arange(0), np.arange(4)))
    first, second = [True, True, False, False], [False, True, True, True]
    assert (~others).tolist() == [first, first, second, second]
