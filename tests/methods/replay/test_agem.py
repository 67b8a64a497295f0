"""A-GEM and A-GEM-R: the projection, and what their memories hold, as in Mammoth."""

import numpy as np
import pytest
import torch
from reference import mammoth_steps as twin
from support.steps import RATE, assert_same, drawn, pair, recorded, run_of


@pytest.fixture(scope="module")
def learned(digits, tmp_path_factory):
    run = run_of("agem", digits, tmp_path_factory.mktemp("agem"))
    return run, recorded(run)


def test_each_step_is_the_projected_one(learned):
    _, steps = learned
    projected = 0
    for step in steps:
        plain = twin.copied(step.before)
        twin.agem(step.before, pair(step.batch), drawn(step), RATE)
        assert_same(step.before, step.after)
        twin.agem(plain, pair(step.batch), None, RATE)
        projected += not torch.equal(plain.head.weight, step.after.head.weight)
    assert 0 < projected < len(steps)


def test_the_memory_has_one_batch_of_each_task_that_has_ended(learned, digits, tmp_path):
    run, steps = learned
    first = len(run.manager.tasks[0].train_indices) // 64
    assert not any(step.batch.replay for step in steps[:first])
    assert all(len(step.batch.replay[0]) == 24 for step in steps[first + 1 :])
    memory = run.learner.memory
    assert memory.seen == 2 * 64 and len(memory) == 40, "a reservoir of two batches"
    other = run_of("agem", digits, tmp_path, batch_size=16)
    recorded(other)
    assert np.bincount(run.manager.train_tasks[other.learner.memory.slots]).tolist() == [16, 16]
    assert run.plan == [run.learner.spent.images - run.plan[1], *run.plan[1:]]


@pytest.mark.parametrize("transformed", [False, True])
def test_agem_r_reads_pixels_that_are_neither_normalised_nor_augmented(transformed, digits, tmp_path):
    run = run_of("agem_r", digits, tmp_path, transformed=transformed, padding=1)
    steps = recorded(run)
    presented = sum(len(task.train_indices) for task in run.manager.tasks[:2])
    assert steps[1].batch.replay and run.learner.memory.seen == presented
    for step in steps:
        batch = None
        if step.batch.replay:
            (replayed,) = step.batch.replay
            pixels = digits.train.images[replayed.indices.numpy()]
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
            batch = (replayed.images if transformed else images, replayed.targets)
        twin.agem(step.before, pair(step.batch), batch, RATE)
        assert_same(step.before, step.after)
