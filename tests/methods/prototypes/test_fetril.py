"""FeTrIL: a frozen backbone, and old classes for which features of new ones stand."""

import copy

import numpy as np
import pytest
import torch
from reference.prototypes import mean, moved_to
from support.methods import SILENT, SMALL, negative_log_likelihood, snapshot

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.runs.run import Run


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The run after three tasks, the states after each, and the batches and losses of the third task."""
    keys = {"model_name": "fetril", "out": str(tmp_path_factory.mktemp("runs")), "lrate": 0.01}
    run = Run(resolve(SMALL | keys), load_dataset("digits", "."))
    learner, states, batches, losses = run.learner, [], [], []
    for task in run.manager.tasks[:3]:
        states.append(snapshot(learner.network))
        if task.index == 2:
            take_batches, head_loss = learner.batches.of, learner.head_loss
            learner.batches.of = lambda *a: kept(batches, take_batches(*a))
            learner.head_loss = lambda batch: kept_loss(losses, learner, head_loss(batch))
        learner.learn(task, SILENT)
    return run, [*states[1:], snapshot(learner.network)], batches, losses


def kept(seen, batches):
    for batch in batches:
        seen.append(batch)
        yield batch


def kept_loss(seen, learner, computed):
    seen.append((computed[0].item(), copy.deepcopy(learner.network.head)))
    return computed


def test_after_the_first_task_only_the_head_changes(learned):
    _, states, _, _ = learned
    before, after = states[1:]
    same = [name for name, value in after.items() if value.shape == before[name].shape and value.equal(before[name])]
    assert sorted(after.keys() - same) == ["head.bias", "head.weight"]


def test_an_epoch_has_each_new_feature_and_for_each_old_class_those_of_the_most_similar_new_one(learned):
    run, _, batches, _ = learned
    learner, task = run.learner, run.manager.tasks[2]
    targets = run.manager.train_targets[task.train_indices]
    features = learner.outputs.features(task.train_indices)
    new = {label: features[targets == label].tolist() for label in np.unique(targets)}
    expected = {label: rows for label, rows in new.items()}
    for label in range(task.num_old):
        indices = np.flatnonzero(run.manager.train_targets == label)
        expected[label] = moved_to(mean(learner.outputs.features(indices).tolist()), new)
    rows = torch.cat([batch.images for batch in batches])
    labels = torch.cat([batch.targets for batch in batches])
    assert len(labels) == sum(map(len, expected.values()))
    for label, wanted in expected.items():
        found, wanted = sorted(rows[labels == label].tolist()), sorted(wanted)
        assert np.allclose(np.mean(found, 0), np.mean(wanted, 0), atol=1e-5) and len(found) == len(wanted)
        assert np.allclose(np.sort(found, 0), np.sort(wanted, 0), atol=1e-5)


def test_the_loss_is_the_cross_entropy_over_all_classes_of_the_head(learned):
    _, _, batches, losses = learned
    assert len(losses) == len(batches)
    for batch, (loss, head) in zip(batches, losses):
        logits = batch.images @ head.weight.detach().T + head.bias.detach()
        assert loss == pytest.approx(negative_log_likelihood(logits, batch.targets).item(), rel=1e-5)


def test_the_schedules_and_the_augmentation_are_pycils():
    config = resolve({"model_name": "fetril"})
    assert (config.init_epoch, config.init_lr, config.init_weight_decay) == (200, 0.1, 5e-4)
    assert (config.epochs, config.lrate, config.weight_decay, config.scheduler) == (50, 0.05, 5e-4, "cosine")
    assert config.augmentation == "autoaugment"
