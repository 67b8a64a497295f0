"""LwF, against a slow twin."""

import torch
from support.methods import BATCH, grown, negative_log_likelihood
from support.small_runs import batch_of

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


def test_lwf_is_the_new_classes_cross_entropy_and_distillation(digits, tmp_path):
    learner, tasks = grown("lwf", 2, digits, tmp_path, lamda=1.5, T=3.0)
    learner.begin_task(tasks[1])
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, NEW))
    distilled = -((learner.teacher(BATCH) / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, negative_log_likelihood(logits[:, 4:], NEW - 4) + 1.5 * distilled)
