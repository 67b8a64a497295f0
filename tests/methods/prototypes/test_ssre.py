"""SSRE's adapters, schedule and backbones."""

import torch
from support.methods import SMALL
from torch import nn

from pycil_wsc.config.loading import resolve
from pycil_wsc.methods.prototypes.ssre import AdaptedConv2d, adapt, adapters_of
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner import grow_for

KEYS = {"init_cls": 4, "increment": 3, "batch_size": 32, "lrate": 1e-3, "init_lr": 1e-3}


@torch.no_grad()
def test_an_adapter_is_a_1x1_convolution_beside_and_is_folded_without_changing_the_output():
    torch.manual_seed(0)
    network = AdaptedConv2d(nn.Conv2d(4, 6, 3, 2, padding=1))
    images = torch.randn(2, 4, 9, 9)
    beside = nn.functional.conv2d(images, network.adapter.weight, network.adapter.bias, 2)
    expected = network.conv(images) + beside
    torch.testing.assert_close(network(images), expected)
    network.fold()
    torch.testing.assert_close(network(images), expected)
    torch.testing.assert_close(network.conv(images), expected)
    assert not any(parameter.any() for parameter in network.adapter.parameters())


def test_ssres_later_tasks_train_adapters_and_the_head_alone(digits, tmp_path):
    run = Run(resolve(SMALL | KEYS | {"model_name": "ssre", "out": str(tmp_path)}), digits)
    learner = run.learner
    for task in run.manager.tasks[:2]:
        grow_for(learner, task)
        trained = {name for name, parameter in learner.network.named_parameters() if parameter.requires_grad}
        assert all("adapter" in name or "head" in name for name in trained) == (task.index > 0)
    assert len(adapters_of(learner.network)) == 6, "all but the first of ResNet-8"
    assert not any(isinstance(module, AdaptedConv2d) for module in learner.network.backbone.stem)


def test_ssre_augments_the_second_task_alone_as_in_pycil(digits, tmp_path):
    seen = []
    run = Run(resolve(SMALL | KEYS | {"model_name": "ssre", "out": str(tmp_path), "init_batch_size": 16}), digits)
    for task in run.manager.tasks[:3]:
        grow_for(run.learner, task)
        for phase in run.learner.phases(task):
            seen.append((phase.augmentation, phase.batch_size))
    assert seen == [(None, 16), ("autoaugment", None), (None, None)]


def test_the_backbones_are_pycils():
    """By their numbers of parameters: of PyCIL's, without what it does not use."""
    biases, shortcuts = 4 * (64 + 128 + 256 + 512), 128 + 256 + 512  # a batch norm has two numbers for each bias
    counts = {"resnet18_cbam": 11_168_832, "resnet18_rep": 11_168_832 + biases + shortcuts - 2 * shortcuts}
    for name, count in counts.items():
        assert sum(parameter.numel() for parameter in make_backbone(name).parameters()) == count
    rep = adapt(make_backbone("resnet18_rep"))
    convolutions = [module for module in rep.modules() if isinstance(module, AdaptedConv2d)]
    assert len(convolutions) == 16 and all(each.conv.bias is not None for each in convolutions)
