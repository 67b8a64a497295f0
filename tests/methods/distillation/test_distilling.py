"""iCaRL, WA and BiC as in PyCIL: the teacher, and the loss in closed form."""

import pytest
import torch
from support.methods import BATCH, SILENT, TARGETS, after, grown, moved, negative_log_likelihood, snapshot
from support.small_runs import batch_of


@pytest.mark.parametrize("name", ["icarl", "wa", "bic"])
def test_the_teacher_is_the_network_of_the_task_before_and_does_not_learn(name, digits, tmp_path):
    learner, tasks = after(name, 1, digits, tmp_path)
    before = snapshot(learner.network)
    learner.learn(tasks[1], SILENT)
    assert moved(learner.teacher, before) == [] and moved(learner.network.backbone, snapshot(learner.teacher.backbone))
    assert not any(p.requires_grad for p in learner.teacher.parameters())


@pytest.mark.parametrize(
    "name, keys, shares",
    [("icarl", {"distill": 0.5}, (1, 0.5)), ("wa", {}, (3 / 7, 4 / 7)), ("bic", {}, (3 / 7, 4 / 7))],
)
def test_the_loss_is_cross_entropy_and_distillation_in_the_methods_proportion(name, keys, shares, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path, T=3.0, **keys)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    torch.testing.assert_close(logits, learner.network(BATCH))
    old = -((learner.teacher(BATCH) / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, shares[0] * negative_log_likelihood(logits, TARGETS) + shares[1] * old)
    itself = -((logits[:, :4] / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    assert (old - itself).abs() > 1e-3, "the teacher differs from the network"
