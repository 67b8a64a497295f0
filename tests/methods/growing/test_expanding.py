"""What DER, MEMO and FOSTER share: networks of one block for each task."""

import pytest
import torch
from support.methods import BATCH, TARGETS, grown, negative_log_likelihood
from support.small_runs import batch_of


@pytest.mark.parametrize("name", ["der", "memo"])
def test_the_auxiliary_heads_loss_is_added_from_the_second_task_on(name, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path, alpha_aux=0.7)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    shared = learner.network.trunk(BATCH)
    features = [block(shared) for block in learner.network.blocks]
    torch.testing.assert_close(logits, learner.network.head(torch.cat(features, 1)))
    newest = learner.network.aux_head(features[1])
    assert newest.shape == (6, 1 + 3), "the old classes are one"
    auxiliary = negative_log_likelihood(newest, torch.tensor([0, 3, 0, 0, 2, 1]))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS) + 0.7 * auxiliary)
    first, _ = grown(name, 1, digits, tmp_path, alpha_aux=0.7)
    first.eval()
    loss, logits = first.loss(batch_of(BATCH, TARGETS % 4))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS % 4))


@pytest.mark.parametrize("name", ["der", "memo", "foster"])
def test_parts_that_do_not_learn_stay_in_evaluation_mode(name, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path)
    learner.network.train()
    assert [block.training for block in learner.network.blocks] == [False, True]
    assert learner.network.trunk.training == (name == "memo")
