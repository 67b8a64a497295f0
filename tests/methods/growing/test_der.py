"""DER: a backbone for each task."""

import copy
import math

import pytest
import torch
from support.methods import SILENT, after, grown, images, moved, snapshot
from support.recorded import recorded
from support.small_runs import batch_of
from torch.utils.flop_counter import FlopCounterMode

from pycil_wsc.training.learner import grow_for


def test_ders_old_backbones_do_not_move_and_its_features_stand_in_order(digits, tmp_path):
    learner, tasks = after("der", 2, digits, tmp_path)
    blocks = [snapshot(block) for block in learner.network.blocks]
    learner.eval()
    old_features = learner.extract(images())
    learner.learn(tasks[2], SILENT)
    network = learner.network
    assert len(network.blocks) == 3
    assert [moved(block, state) for block, state in zip(network.blocks, blocks)] == [[], []]
    assert moved(network.blocks[2], blocks[1]), "the newest began as a copy and has learned"
    learner.eval()
    features = learner.extract(images())
    torch.testing.assert_close(features[:, :128], old_features)
    torch.testing.assert_close(features[:, 128:], network.blocks[2](images()))
    torch.testing.assert_close(learner.classify(features), features @ network.head.weight.T + network.head.bias)


def test_the_head_of_an_expanding_net_keeps_old_rows_on_old_features(digits, tmp_path):
    learner, tasks = grown("der", 2, digits, tmp_path)
    head = copy.deepcopy(learner.network.head)
    grow_for(learner, tasks[2])
    new = learner.network.head
    assert new.weight.shape == (10, 192)
    assert torch.equal(new.weight[:7, :128], head.weight) and torch.equal(new.bias[:7], head.bias)
    assert new.weight[7:].abs().max() <= math.sqrt(3 / 192) and new.weight[:7, 128:].abs().max() <= math.sqrt(3 / 192)


def step_flops(learner, batch):
    learner.eval(), learner.network.train()
    with FlopCounterMode(display=False) as counter:
        learner.loss(batch_of(batch, torch.zeros(len(batch), dtype=torch.int64)))[0].backward()
    return counter.get_total_flops()


def test_an_old_backbone_of_der_costs_one_forward_pass(digits, tmp_path):
    learner, tasks = grown("der", 2, digits, tmp_path)
    two = step_flops(learner, images())
    grow_for(learner, tasks[2])
    three = step_flops(learner, images())
    with FlopCounterMode(display=False) as counter:
        learner.network.blocks[0](images())
    assert counter.get_total_flops() < three - two < 1.01 * counter.get_total_flops()


@pytest.mark.parametrize("aligned", [True, False])
def test_ders_head_is_aligned_after_a_task_as_in_pycil_or_not_as_in_pilot(aligned, tmp_path):
    learned = recorded("der", tmp_path, tasks=2, memory_per_class=2, align_head=aligned)
    norms = learned.learner.network.head.weight.norm(dim=1)
    before = learned.phases[1].after["head.weight"].norm(dim=1)
    factor = before[:2].mean() / before[2:].mean()
    assert abs(factor - 1) > 0.01
    torch.testing.assert_close(norms[2:], before[2:] * (factor if aligned else 1))
