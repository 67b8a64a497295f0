"""Batch norm of a batch in parts, against torch's own on each part."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batch_norm.parted import PartedBatchNorm


def network(kernel):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, kernel), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (7 - kernel) ** 2, 3)
    return nn.Sequential(*layers).double()


def batch(size):
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (size,), generator=generator)


def gradients(net, images, targets):
    return torch.autograd.grad(cross_entropy(net(images), targets), list(net.parameters()))


@pytest.mark.parametrize("size, sizes", [(8, (2, 2, 2, 2)), (7, (2, 2, 2, 1)), (5, (2, 2, 1)), (2, (1, 1))])
def test_each_part_is_normalised_like_a_batch_of_its_own(size, sizes):
    """Gradients and running statistics are the parts' own, weighted by their images."""
    net, (images, targets) = network(3), batch(size)
    alone = [copy.deepcopy(net) for _ in sizes]
    with PartedBatchNorm(4):
        found = gradients(net, images, targets)
    parts = zip(images.split(list(sizes)), targets.split(list(sizes)), strict=True)
    wanted = [gradients(copied, *part) for copied, part in zip(alone, parts, strict=True)]
    weights = torch.tensor(sizes, dtype=torch.float64) / size
    for each, *by_part in zip(found, *wanted, strict=True):
        torch.testing.assert_close(each, torch.stack(by_part, -1) @ weights)
    for name in ("running_mean", "running_var"):
        of_parts = torch.stack([getattr(copied[1], name) for copied in alone], -1)
        torch.testing.assert_close(getattr(net[1], name), of_parts @ weights)


def test_one_part_is_torchs_batch_norm():
    nets, (images, targets) = [network(3), network(3)], batch(6)
    plain = gradients(nets[0], images, targets)
    with PartedBatchNorm(1):
        found = gradients(nets[1], images, targets)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(nets[1].state_dict(), nets[0].state_dict())


def test_a_part_of_one_image_with_maps_of_one_pixel_has_the_running_statistics():
    net, (images, _) = network(6), batch(3)
    net[1].running_mean += 0.5
    last = copy.deepcopy(net).eval()
    with PartedBatchNorm(2):
        logits = net(images)
    torch.testing.assert_close(logits[2:], last(images[2:]))


def test_a_test_and_frozen_layers_are_not_divided():
    net, (images, _) = network(3).eval(), batch(8)
    wanted, before = net(images), copy.deepcopy(net.state_dict())
    with PartedBatchNorm(4):
        torch.testing.assert_close(net(images), wanted, rtol=0, atol=0)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_channels_last_activations_stay_so():
    net, (images, _) = network(3).to(memory_format=torch.channels_last)[:2], batch(8)
    with PartedBatchNorm(4):
        out = net(images.contiguous(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_batch_norm_parts_divides_the_training_of_a_run_and_nothing_else(settings):
    """The losses and accuracies are those of a run in whose every pass batches are divided."""

    def run(**keys):
        config = resolve(
            settings | {"model_name": "replay", "max_tasks": 2, "batch_size": 8, "cache_first_task": False} | keys
        )
        return Run(config, Datasets().of(config), lambda progress: None).execute()

    whole, found = run(prefix="whole"), run(batch_norm_parts=4)
    with PartedBatchNorm(4):
        wanted = run(prefix="divided")
    assert found["train_loss"] == wanted["train_loss"] != whole["train_loss"]
    assert found["curve"] == wanted["curve"]
