"""SLCA: its alignment of the head, against slow twins of PILOT's arithmetic."""

import numpy as np
import pytest
import torch
from reference import pilot
from support.methods import after
from support.small_runs import batch_of

from pycil_wsc.training.learner import grow_for

KEYS = {"init_cls": 3, "increment": 3, "precision": "fp32"}


def test_slcas_alignment_is_the_twins_loss_of_the_drawn_features(digits, tmp_path):
    learner, tasks = after("slca", 2, digits, tmp_path, **KEYS)
    phase = learner.alignment(tasks[1])
    assert phase.network is learner.network.head
    rows, targets = next(phase.source.batches(phase.indices, phase.targets, 256, train=True, seed=3, shuffle=False))
    loss, logits = learner.alignment_loss(batch_of(rows[:4], targets[:4]))
    expected = pilot.aligned_loss(logits.tolist(), targets[:4].tolist(), [3, 3], 0.1)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_slca_draws_each_class_from_the_distribution_of_its_features(digits, tmp_path):
    learner, tasks = after("slca", 2, digits, tmp_path, **KEYS)
    indices = np.flatnonzero(learner.manager.train_targets == 4)
    features = learner.outputs.features(indices).astype(float)
    covariance = learner.factors[4] @ learner.factors[4].T
    expected = np.cov(features.T) + 1e-4 * np.eye(features.shape[1])
    np.testing.assert_allclose(covariance.numpy(), expected, atol=1e-5)
    scaled = learner.scaled_means(tasks[1])
    for label in (1, 4):
        ours = scaled[label] / learner.means[label]
        assert ours.mean().item() == pytest.approx(pilot.mean_scale(label, [3, 3]), abs=1e-6)
    source = learner.alignment(tasks[1]).source
    source.rows = 20_000
    drawn, labels = source.drawn(torch.Generator().manual_seed(0))
    many = drawn[labels == 4].double()
    np.testing.assert_allclose(many.mean(0).numpy(), scaled[4].double().numpy(), atol=0.05)
    np.testing.assert_allclose(np.cov(many.numpy().T), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("kept", [False, True])
def test_the_next_task_begins_with_slcas_head_as_it_was_before_the_alignment_unless_asked(kept, digits, tmp_path):
    learner, tasks = after("slca", 2, digits, tmp_path, keep_alignment=kept, **KEYS)
    aligned = learner.network.head.parts[0].weight.clone()
    before = learner.unaligned["parts.0.weight"].clone()
    assert not torch.equal(aligned, before)
    grow_for(learner, tasks[2])
    learner.begin_task(tasks[2])
    assert torch.equal(learner.network.head.parts[0].weight, aligned if kept else before)
    assert not learner.network.head.parts[0].weight.requires_grad
