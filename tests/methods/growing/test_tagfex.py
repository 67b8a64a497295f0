"""TagFex: its losses and their gradients against a slow twin, and what a new block starts from."""

import copy

import pytest
import torch
from reference import tagfex as twin
from support.methods import TARGETS, grown, images, moved, snapshot
from support.small_runs import batch_of
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc.config.loading import resolve
from pycil_wsc.config.pycil_files import our_names, our_values
from pycil_wsc.errors import UserError
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Batch

SMALL = {"proj_hidden_dim": 24, "proj_output_dim": 12, "attn_num_heads": 4}


def two_views():
    first, second = images(12).split(6)
    one = batch_of(first, TARGETS)
    return Batch(one.images, one.targets, one.indices, one.from_memory, (second,))


@pytest.fixture
def learner(digits, tmp_path):
    """With the classes of two tasks, 4 and 3, and random weights."""
    return grown("tagfex", 2, digits, tmp_path, aux_factor=1.5, contrast_kd_factor=2.5, **SMALL)[0]


def gradients(learner, loss):
    learner.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in learner.network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("guided", [True, False])
def test_loss_and_gradients_of_a_later_task_are_the_twins(guided, learner):
    """The merged head teaches the block only where it is better than the head over all features."""
    with torch.no_grad():  # one of the two heads is far worse
        (learner.network.head if guided else learner.network.merged_head).weight.mul_(5)
    learner.network.train()
    start, batch = copy.deepcopy(learner.state_dict()), two_views()
    loss, logits = learner.loss(batch)
    found = gradients(learner, loss)
    learner.load_state_dict(start)
    both, targets = torch.cat([batch.images, *batch.views]), TARGETS.repeat(2)
    expected = twin.loss(learner, both, targets, 4, 7, learner.config.options)
    wanted = gradients(learner, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.keys() == wanted.keys() and logits.shape == (6, 7)
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max()), name


def test_the_first_task_learns_by_its_labels_and_by_contrast(digits, tmp_path):
    learner = grown("tagfex", 1, digits, tmp_path, contrast_factor=0.5, **SMALL)[0]
    batch = two_views()
    both, targets = torch.cat([batch.images, *batch.views]), (TARGETS % 4).repeat(2)
    batch = Batch(batch.images, TARGETS % 4, batch.indices, batch.from_memory, batch.views)
    network = learner.network.eval()
    embedding = network.projector(twin.places(network.agnostic, both).mean(1))
    expected = torch.nn.functional.cross_entropy(network(both), targets) + 0.5 * twin.info_nce(
        embedding, embedding, 0.2
    )
    assert learner.loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_new_block_mixes_the_block_before_with_the_agnostic_one_and_counts_its_statistics_anew(learner, tmp_path):
    network = learner.network
    for statistics in network.buffers():
        statistics.fill_(3)
    before = {name: value.clone() for name, value in network.blocks[-1].named_parameters()}
    network.grow_from(9, 2, 0.95)
    agnostic = dict(network.agnostic.named_parameters())
    for name, value in network.blocks[-1].named_parameters():
        assert torch.allclose(value, 0.95 * before[name] + 0.05 * agnostic[name], atol=1e-6), name
    for module in network.blocks[-1].modules():
        if isinstance(module, _BatchNorm):
            assert (module.running_mean == 0).all() and (module.running_var == 1).all()
    assert network.merged_head.out_features == 2 and network.aux_head.out_features == 3


def test_old_blocks_and_the_teacher_stay_as_they_are(learner):
    learner.network.train()
    before, teacher = snapshot(learner.network), snapshot(learner.teacher)
    optimizer = learner.main_phase(learner.manager.tasks[1], weight_decay=0.0).optimizer
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    learner.loss(two_views())[0].backward()
    optimizer.step()
    changed = moved(learner.network, before)
    assert not moved(learner.teacher, teacher) and not [name for name in changed if name.startswith("blocks.0")]
    for part in ("blocks.1", "agnostic", "projector", "predictor", "attention", "merged_head", "head", "aux_head"):
        assert any(name.startswith(part) for name in changed), part


def test_pycils_file_has_autoaugment_and_the_stem_for_cifar():
    file = {"model_name": "tagfex", "dataset": "cifar100_aa", "convnet_type": "resnet18", "ta_convnet_type": "resnet18"}
    config = resolve(our_values(our_names(file | {"aug": 2, "init_cls": 10, "increment": 10})))
    assert (config.dataset, config.augmentation) == ("cifar100", "autoaugment")
    assert config.convnet_type == "resnet18_cifar"
    for wrong in {"aug": 3}, {"ta_convnet_type": "resnet32"}:
        with pytest.raises(UserError, match=f"unknown key '{next(iter(wrong))}'"):
            resolve(our_values(our_names(file | wrong)))


def test_heads_that_cannot_share_the_channels_are_refused_in_one_line(digits, tmp_path):
    config = resolve({"model_name": "tagfex", "dataset": "digits", "convnet_type": "resnet8", "attn_num_heads": 7})
    with pytest.raises(UserError, match="attn_num_heads: 7 heads cannot share the 64 channels"):
        Run(config, digits)
