"""Continual backpropagation: units are ranked by what they contribute,
and the mature ones with the lowest utility are reinitialised.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy, relu

from pycil_wsc.consolidation import ContinualBackprop
from pycil_wsc.networks.backbones.cifar_resnet import CifarResNet
from pycil_wsc.networks.backbones.resnet import ResNet18
from pycil_wsc.networks.nets import ExpandingNet, IncrementalNet, inner_units, make_backbone


def new_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 4, 2),
    ).double()


UNITS = [("0", "1", "3")]


def initial_values():
    torch.manual_seed(99)
    return dict(new_net().named_parameters())


def prepared(rate=0.04, maturity=6, decay=0.7, fresh=initial_values):
    torch.manual_seed(1)
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, optimizer, ContinualBackprop(net, UNITS, fresh, rate, maturity, decay).attach(optimizer)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 3, 4, 4, generator=generator).double(), torch.randint(2, (5,), generator=generator)


def train(net, optimizer, steps):
    for step in steps:
        images, targets = data(step)
        optimizer.zero_grad()
        cross_entropy(net(images), targets).backward()
        optimizer.step()


def reference(steps, rate, maturity, decay):
    """Algorithm 1 unit by unit: (network, momentum of the first and second convolution,
    steps and units of the replacements).
    """
    torch.manual_seed(1)
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    utility, age, owed, replaced = [0.0] * 6, [0] * 6, 0.0, []
    for step in steps:
        images, _ = data(step)
        with torch.no_grad():
            h = relu(batch_norm(net[0](images), None, None, net[1].weight, net[1].bias, training=True))
        train(net, optimizer, [step])
        for unit in range(6):
            contribution = h[:, unit].abs().mean().item() * net[3].weight[:, unit].abs().sum().item()
            utility[unit] = decay * utility[unit] + (1 - decay) * contribution
            age[unit] += 1
        mature = [unit for unit in range(6) if age[unit] > maturity]
        owed += rate * len(mature)
        while owed >= 1:
            owed -= 1
            worst = min(mature, key=lambda unit: utility[unit])
            mature.remove(worst)
            utility[worst], age[worst] = 0.0, 0
            replaced.append((step, worst))
            renew(net, optimizer, worst)
    return net, optimizer, replaced


@torch.no_grad()
def renew(net, optimizer, unit):
    fresh = initial_values()
    for name, param in (
        ("0.weight", net[0].weight),
        ("0.bias", net[0].bias),
        ("1.weight", net[1].weight),
        ("1.bias", net[1].bias),
    ):
        param[unit] = fresh[name][unit]
        optimizer.state[param]["momentum_buffer"][unit] = 0
    net[1].running_mean[unit], net[1].running_var[unit] = 0, 1
    net[3].weight[:, unit] = 0
    optimizer.state[net[3].weight]["momentum_buffer"][:, unit] = 0


@pytest.mark.parametrize("rate, maturity", [(0.04, 6), (0.5, 3), (0.3, 0)])
def test_units_are_replaced_as_in_the_algorithm_step_by_step(rate, maturity):
    net, optimizer, rule = prepared(rate, maturity)
    train(net, optimizer, range(40))
    slow, slow_optimizer, replaced = reference(range(40), rate, maturity, 0.7)
    assert rule.replaced == len(replaced) > 3
    for (name, ours), theirs in zip(net.state_dict().items(), slow.state_dict().values()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=name)
    for ours, theirs in zip(net.parameters(), slow.parameters()):
        torch.testing.assert_close(
            optimizer.state[ours]["momentum_buffer"],
            slow_optimizer.state[theirs]["momentum_buffer"],
            rtol=1e-6,
            atol=1e-9,
        )


def test_what_a_new_unit_leads_to_does_not_change_by_it():
    net, optimizer, rule = prepared(rate=0.2, maturity=2)
    train(net, optimizer, range(4))
    images, _ = data(0)
    before = net(images)
    newest = rule.state_dict()["layers"][0]["born"].argmax()
    with torch.no_grad():
        net[1].bias[newest] += 5.0  # a new unit's outgoing weights are zero: it has no effect yet
    assert rule.replaced and torch.equal(net(images), before)


def test_young_units_are_safe_and_a_rate_of_0_changes_nothing():
    for options in ({"maturity": 40, "rate": 1.0}, {"rate": 0.0}):
        net, optimizer, rule = prepared(**options)
        train(net, optimizer, range(40))
        torch.manual_seed(1)
        plain = new_net()
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), range(40))
        assert rule.replaced == 0
        assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values()))


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened():
    net, optimizer, rule = prepared()
    train(net, optimizer, range(15))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), rule.state_dict()))
    train(net, optimizer, range(15, 40))
    other, other_optimizer, other_rule = prepared()
    for part, state in zip((other, other_optimizer, other_rule), saved):
        part.load_state_dict(state)
    train(other, other_optimizer, range(15, 40))
    assert other_rule.replaced == rule.replaced > saved[2]["replaced"]
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values()))


def test_detached_it_does_nothing_more():
    net, optimizer, rule = prepared(rate=1.0, maturity=0)
    train(net, optimizer, range(2))
    rule.detach()
    before = rule.replaced
    train(net, optimizer, range(2, 5))
    assert rule.replaced == before > 0


def test_a_test_in_between_does_not_count():
    net, optimizer, rule = prepared()
    train(net, optimizer, range(20))
    tested, tested_optimizer, _ = prepared()
    for step in range(20):
        train(tested, tested_optimizer, [step])
        tested.eval()(torch.full((2, 3, 4, 4), 100.0).double())
        tested.train()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), tested.state_dict().values()))


@pytest.mark.parametrize(
    "units, message",
    [
        ([("1", None, "3")], "'1' is a BatchNorm2d"),
        ([("3", None, "6")], "'3' has 4 outputs, '6' takes 16"),
        ([("0", None, "0")], "'0' has 6 outputs, '0' takes 3"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        ContinualBackprop(new_net(), units, initial_values)


@pytest.mark.parametrize(
    "backbone, blocks, channels", [(CifarResNet(8), 3, 112), (CifarResNet(32), 15, 560), (ResNet18(), 8, 1920)]
)
def test_the_units_of_a_residual_network_are_the_channels_inside_its_blocks(backbone, blocks, channels):
    found = inner_units(backbone)
    assert len(found) == blocks and sum(len(backbone.get_submodule(first).weight) for first, _, _ in found) == channels
    for first, norm, then in found:
        assert (
            backbone.get_submodule(first).out_channels
            == backbone.get_submodule(norm).num_features
            == backbone.get_submodule(then).in_channels
        )


def test_units_of_all_networks_are_found():
    assert len(inner_units(IncrementalNet(make_backbone("resnet8")))) == 3
    net = ExpandingNet(make_backbone("resnet8"))
    net.grow(2, 3), net.grow(4, 3)
    assert len(inner_units(net)) == 6
