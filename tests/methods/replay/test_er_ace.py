"""ER-ACE whose memory is filled at a task's end: its two losses. ``test_streams.py`` has that of each step."""

import torch
from support.at_task_end import INDICES, OLD, grown, second_task
from support.methods import BATCH, TARGETS, negative_log_likelihood
from support.small_runs import batch_of


def test_er_ace_lets_new_images_compete_among_the_classes_of_the_batchs_new_images(digits, tmp_path):
    learner, _ = second_task("er_ace", digits, tmp_path)
    loss, logits = learner.loss(batch_of(BATCH, TARGETS, INDICES, OLD))
    present = [5, 6]  # of the two new images
    own = sum(-logits[row, label] + logits[row, present].logsumexp(0) for row, label in ((1, 6), (4, 5)))
    torch.testing.assert_close(loss, own / 2 + negative_log_likelihood(logits[OLD], TARGETS[OLD]))
    loss.backward()
    first, _ = grown("er_ace", 1, digits, tmp_path)
    first.eval()
    loss, logits = first.loss(batch_of(BATCH, TARGETS % 4))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS % 4))


def test_er_aces_new_images_do_not_push_old_classes_away(digits, tmp_path):
    learner, _ = second_task("er_ace", digits, tmp_path)
    none = torch.zeros(6, dtype=torch.bool)
    learner.loss(batch_of(BATCH, torch.tensor([4, 5, 4, 5, 4, 5]), INDICES, none))[0].backward()
    moved = learner.network.head.weight.grad.abs().sum(1)
    assert moved[4:6].all() and not moved[:4].any() and not moved[6]
