"""FDR: two steps on each batch, and what is stored of each task, as in Mammoth."""

import numpy as np
import pytest
import torch
from reference import mammoth_steps as twin
from support.steps import RATE, assert_same, pair, recorded, run_of

from pycil_wsc.training.batches import Sampling


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_a_step_on_the_batch_is_followed_by_one_towards_the_probabilities_of_then(alpha, digits, tmp_path):
    run = run_of("fdr", digits, tmp_path, **({} if alpha == 1 else {"alpha": alpha}))
    steps = recorded(run)
    assert sum(len(step.batch.replay) for step in steps) > 3
    for step in steps:
        drawn = [(replayed.images, replayed.stored["logits"]) for replayed in step.batch.replay]
        twin.fdr(step.before, pair(step.batch), drawn[0] if drawn else None, RATE, alpha)
        assert_same(step.before, step.after)


def test_the_logits_are_those_of_augmented_images_after_the_task(digits, tmp_path):
    run = run_of("fdr", digits, tmp_path)
    steps = recorded(run, 1)
    learner, (task, *_) = run.learner, run.manager.tasks
    logits = {}
    for batch in learner.batches.of(Sampling(indices=task.train_indices, mixed=False), 0, "after the task"):
        with torch.no_grad():
            rows = steps[-1].after(batch.images)
        logits |= dict(zip(batch.indices.tolist(), rows))
    slots = torch.arange(len(learner.memory))
    expected = torch.stack([logits[sample] for sample in learner.memory.slots.tolist()])
    torch.testing.assert_close(learner.memory.stored.of("logits", slots), expected)
    assert learner.memory.slots.tolist() == list(logits)[:40], "the first images of the pass"


def test_that_pass_is_in_training_mode_and_moves_the_statistics_of_batch_norm(digits, tmp_path):
    """Of batches of 64, the first fills the memory of 40, and the second is seen before the pass ends."""
    backbone = {"convnet_type": "resnet8", "convnet_options.width": 2, "convnet_options.side": None}
    run = run_of("fdr", digits, tmp_path, **backbone)
    steps = recorded(run, 1)
    (norm, *_) = [name for name in steps[-1].after.state_dict() if name.endswith("num_batches_tracked")]
    assert run.learner.network.state_dict()[norm] == steps[-1].after.state_dict()[norm] + 2


def test_a_task_leaves_the_first_of_each_earlier_one_and_its_own_enter_a_reservoir(digits, tmp_path):
    """Of 40 slots: the second task keeps all 40 of the first, whose places its own images then take by chance."""
    run = run_of("fdr", digits, tmp_path)
    recorded(run, 2)
    memory, tasks = run.learner.memory, run.manager.train_tasks
    before = memory.slots.copy()
    counts = np.bincount(tasks[before], minlength=2)
    assert memory.seen == 80 and counts.sum() == 40 and counts.min() > 5
    rows = run.learner.memory.stored.of("logits", torch.arange(40)).clone()
    run.learner._keep_first_of_each_task(20)
    expected = [slot for task in (0, 1) for slot in np.flatnonzero(tasks[before] == task)[:20]]
    assert memory.slots.tolist() == before[expected].tolist() and memory.seen == len(expected)
    kept = run.learner.memory.stored.of("logits", torch.arange(len(expected)))
    assert torch.equal(kept, rows[expected]), "each with its logits"
