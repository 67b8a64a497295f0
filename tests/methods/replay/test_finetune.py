"""Finetune: cross-entropy over the new classes."""

import torch
from support.methods import BATCH, grown, negative_log_likelihood
from support.small_runs import batch_of


def test_finetunes_loss_is_cross_entropy_over_the_new_classes(digits, tmp_path):
    learner, tasks = grown("finetune", 2, digits, tmp_path)
    learner.begin_task(tasks[1])
    learner.eval()
    targets = torch.tensor([4, 6, 5, 4, 5, 6])
    loss, logits = learner.loss(batch_of(BATCH, targets))
    assert logits.shape == (6, 7)
    torch.testing.assert_close(loss, negative_log_likelihood(logits[:, 4:], targets - 4))
    loss.backward()
    gradient = learner.network.head.weight.grad
    assert not gradient[:4].any() and gradient[4:].all()
