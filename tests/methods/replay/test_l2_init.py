"""L2-init: the penalty draws each weight to its first value."""

import torch
from support.at_task_end import after
from support.methods import BATCH, TARGETS, negative_log_likelihood, perturb
from support.small_runs import batch_of

from pycil_wsc.training.learner import grow_for


def test_l2_init_draws_every_weight_to_its_first_value(digits, tmp_path):
    learner, tasks = after("l2_init", 0, digits, tmp_path, l2_init=0.2)
    grow_for(learner, tasks[0])
    first = {name: value.clone() for name, value in learner.network.named_parameters()}
    perturb(learner.network)
    grow_for(learner, tasks[1])
    second = {name: value.clone() for name, value in learner.network.named_parameters()}
    perturb(learner.network)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    distance = 0.0
    for name, value in learner.network.named_parameters():
        start = first[name] if name.startswith("backbone") else torch.cat([first[name], second[name][4:]])
        distance += ((value - start) ** 2).sum()
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS) + 0.2 * distance)
    assert learner.config.weight_decay == learner.config.init_weight_decay == 0
