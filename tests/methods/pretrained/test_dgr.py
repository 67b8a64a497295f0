"""DGR: the gradients of its head, against slow twins of PILOT's arithmetic."""

import math

import pytest
import torch
from reference import pilot
from support.methods import after
from support.small_runs import batch_of

from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.step.backward import Backward

KEYS = {"init_cls": 3, "increment": 3, "precision": "fp32"}
BATCH = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pass_backward(learner, phase, batch):
    learner.zero_grad(set_to_none=True)
    backward = Backward(learner, phase)
    backward(batch)
    return backward


@pytest.mark.parametrize("task", [0, 1])
def test_dgrs_gradient_of_the_head_is_the_twins(task, digits, tmp_path):
    learner, tasks = after("dgr", task, digits, tmp_path, **KEYS)
    grow_for(learner, tasks[task])
    learner.begin_task(tasks[task])
    old = tasks[task].num_old
    with torch.no_grad():  # otherwise the student is the teacher
        learner.network.head.weight[:old] += 0.1 * torch.randn(old, learner.network.head.in_features)
        learner.network.head.renew()
    targets = torch.tensor([0, 1, 2, 0, 1, 2]) + (torch.tensor([0, 3, 0, 3, 0, 3]) if task else 0)
    (phase,) = learner.phases(tasks[task])
    learner.received.copy_(torch.linspace(0.1, 0.6, len(learner.received)))
    received = learner.received.tolist()
    batch = batch_of(BATCH, targets)
    backward = pass_backward(learner, phase, batch)
    head = learner.network.head
    ours = torch.cat([head.weight.grad, head.bias.grad[:, None]], 1).tolist()
    distilled = torch.cat([head.copy_weight.grad, head.copy_bias.grad[:, None]], 1).tolist() if old else []
    learner.after_backward(batch, backward)
    expected, sums = pilot.reweighted(ours, distilled, received, old, learner.config.options.gammar_r)
    found = torch.cat([head.weight.grad, head.bias.grad[:, None]], 1)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(learner.received, torch.tensor(sums), rtol=1e-5, atol=1e-7)


def test_dgrs_cross_entropy_is_adjusted_by_the_classes_frequencies(digits, tmp_path):
    learner, tasks = after("dgr", 1, digits, tmp_path, memory_per_class=3, **KEYS)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    counts = [3] * 3 + [int((learner.manager.train_targets == label).sum()) for label in range(3, 6)]
    expected = [math.log(each / sum(counts)) for each in counts]
    assert learner.prior.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_distillation_without_a_gradient_does_not_move_dgrs_head_by_its_rounding(digits, tmp_path):
    """In a task's first step the student is its teacher; PILOT scales up what rounding leaves of the gradient."""
    learner, tasks = after("dgr", 1, digits, tmp_path, **KEYS)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    (phase,) = learner.phases(tasks[1])
    learner.eval()
    batch = batch_of(BATCH, torch.tensor([0, 4, 2, 3, 1, 5]))
    backward = pass_backward(learner, phase, batch)
    head = learner.network.head
    norm = head.weight.grad.norm()
    assert head.copy_weight.grad.norm() < 1e-5 * norm
    distilled = torch.cat([head.copy_weight.grad, head.copy_bias.grad[:, None]], 1)
    head.copy_weight.grad.zero_()
    head.copy_bias.grad.zero_()
    learner.after_backward(batch, backward)
    without = head.weight.grad.clone()
    backward = pass_backward(learner, phase, batch)
    learner.received.zero_()
    learner.after_backward(batch, backward)
    assert distilled.any()
    assert (head.weight.grad - without).norm() < 0.05 * norm
