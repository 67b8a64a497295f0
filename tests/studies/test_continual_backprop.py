"""Continual backpropagation: units are ranked by what they contribute,
and the mature ones with the lowest utility are reinitialised.
"""

import copy
import doctest
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.small_runs import results, write
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy, relu

from main import main
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.methods.consolidation.wsc import reset_rule
from pycil_wsc.networks.backbones.cifar_resnet import CifarResNet
from pycil_wsc.networks.backbones.resnet import ResNet18
from pycil_wsc.networks.nets import ExpandingNet, IncrementalNet, inner_units, make_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.studies.continual_backprop import ContinualBackprop


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


def new_mlp():
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 3, 4, 4, generator=generator).double(), torch.randint(2, (5,), generator=generator)


def sequences(step):
    """As for a language model: five sequences of four vectors, and a target of each vector."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, 3, generator=generator).double(), torch.randint(2, (5, 4), generator=generator)


def channels(net, images):
    h = relu(batch_norm(net[0](images), None, None, net[1].weight, net[1].bias, training=True))
    return [h.transpose(0, 1).flatten(1)]


def features(net, vectors):
    return [net[:depth](vectors).flatten(0, 1).T for depth in (2, 4)]


@dataclass
class Kind:
    """A network with layers of units, and how it is trained."""

    new: Callable = new_net
    units: tuple = (("0", "1", "3"),)
    data: Callable = data
    activations: Callable = channels  # (network, inputs) -> (units, n) of each layer
    optimizer: Callable = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    def initial_values(self):
        torch.manual_seed(99)
        return dict(self.new().named_parameters())

    def start(self):
        torch.manual_seed(1)
        net = self.new()
        return net, self.optimizer(net.parameters())


ADAM = partial(torch.optim.Adam, lr=0.01)
MLP = {"new": new_mlp, "units": (("0", None, "2"), ("2", None, "4")), "data": sequences, "activations": features}
KINDS = {
    "convolutions": Kind(),
    "convolutions, Adam": Kind(optimizer=ADAM),
    "MLP": Kind(**MLP),
    "MLP, Adam": Kind(**MLP, optimizer=ADAM),
}
UNITS, initial_values = Kind().units, Kind().initial_values


def prepared(rate=0.04, maturity=6, decay=0.7, kind=Kind()):
    net, optimizer = kind.start()
    rule = ContinualBackprop(net, kind.units, kind.initial_values, rate, maturity, decay)
    return net, optimizer, rule.attach(optimizer)


def train(net, optimizer, steps, data=data):
    for step in steps:
        inputs, targets = data(step)
        optimizer.zero_grad()
        cross_entropy(net(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()


@pytest.mark.slow
def test_a_model_that_was_compiled_and_trained_before_has_its_activations_seen():
    utilities = []
    for compiled in False, True:
        net, optimizer = Kind(**MLP).start()
        model = torch.compile(net, backend="eager") if compiled else net
        train(model, optimizer, range(2), sequences)
        rule = ContinualBackprop(net, MLP["units"], Kind(**MLP).initial_values, 0.04, 6, 0.7).attach(optimizer)
        train(model, optimizer, range(2, 4), sequences)
        utilities.append([layer["utility"] for layer in rule.state_dict()["layers"]])
    torch.testing.assert_close(utilities[1], utilities[0])
    assert all(utility.any() for utility in utilities[0])


class Layer:
    """A layer of units in algorithm 1, unit by unit."""

    def __init__(self, net, kind, index):
        incoming, norm, outgoing = kind.units[index]
        self.net, self.kind, self.index = net, kind, index
        self.incoming, self.norm, self.outgoing = [incoming, *filter(None, [norm])], norm, net.get_submodule(outgoing)
        number = self.outgoing.weight.shape[1]
        self.utility, self.age, self.owed = [0.0] * number, [0] * number, 0.0

    def step(self, h, optimizer, rate, maturity, decay):
        """After an optimiser step; ``h``: the activations in it, (units, n). Returns the units replaced."""
        replaced = []
        for unit, activations in enumerate(h):
            contribution = activations.abs().mean().item() * self.outgoing.weight[:, unit].abs().sum().item()
            self.utility[unit] = decay * self.utility[unit] + (1 - decay) * contribution
            self.age[unit] += 1
        mature = [unit for unit, age in enumerate(self.age) if age > maturity]
        self.owed += rate * len(mature)
        while self.owed >= 1:
            self.owed -= 1
            worst = min(mature, key=lambda unit: self.utility[unit])
            mature.remove(worst)
            self.utility[worst], self.age[worst] = 0.0, 0
            replaced.append(worst)
            self.renew(worst, optimizer)
        return replaced

    @torch.no_grad()
    def renew(self, unit, optimizer):
        fresh = self.kind.initial_values()
        for name in [f"{layer}.{part}" for layer in self.incoming for part in ("weight", "bias")]:
            param = self.net.get_parameter(name)
            param[unit] = fresh[name][unit]
            for moment in moments(optimizer, param):
                moment[unit] = 0
        if self.norm:
            norm = self.net.get_submodule(self.norm)
            norm.running_mean[unit], norm.running_var[unit] = 0, 1
        self.outgoing.weight[:, unit] = 0
        for moment in moments(optimizer, self.outgoing.weight):
            moment[:, unit] = 0


def moments(optimizer, param):
    """The momentum, or both of Adam's moments."""
    state = optimizer.state[param]
    return [state[name] for name in ("momentum_buffer", "exp_avg", "exp_avg_sq") if name in state]


def reference(steps, rate, maturity, decay, kind):
    """(network, optimiser, the layer, the step and the unit of every replacement) by algorithm 1."""
    net, optimizer = kind.start()
    layers, replaced = [Layer(net, kind, index) for index in range(len(kind.units))], []
    for step in steps:
        with torch.no_grad():
            activations = kind.activations(net, kind.data(step)[0])
        train(net, optimizer, [step], kind.data)
        for layer, h in zip(layers, activations, strict=True):
            replaced += [(layer.index, step, unit) for unit in layer.step(h, optimizer, rate, maturity, decay)]
    return net, optimizer, replaced


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rate, maturity", [(0.04, 6), (0.5, 3), (0.3, 0)])
def test_units_are_replaced_as_in_the_algorithm_step_by_step(rate, maturity, kind):
    net, optimizer, rule = prepared(rate, maturity, kind=kind)
    train(net, optimizer, range(40), kind.data)
    slow, slow_optimizer, replaced = reference(range(40), rate, maturity, 0.7, kind)
    assert rule.replaced == len(replaced) > 3
    assert {layer for layer, _, _ in replaced} == set(range(len(kind.units)))
    for (name, ours), theirs in zip(net.state_dict().items(), slow.state_dict().values()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=name)
    for ours, theirs in zip(net.parameters(), slow.parameters()):
        pairs = list(zip(moments(optimizer, ours), moments(slow_optimizer, theirs), strict=True))
        assert len(pairs) == (2 if isinstance(optimizer, torch.optim.Adam) else 1)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_the_example_in_the_docstring_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(ContinualBackprop)
    ran = doctest.DocTestRunner().run(example)
    assert ran.failed == 0 and ran.attempted > 5


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


def test_a_state_of_other_layers_is_refused_and_changes_nothing():
    net, optimizer, rule = prepared()
    train(net, optimizer, range(3))
    before = copy.deepcopy(rule.state_dict())
    saved = copy.deepcopy(rule.state_dict()) | {"steps": 9}
    more = saved | {"layers": saved["layers"] * 2}
    other = saved | {"layers": [saved["layers"][0] | {"utility": torch.ones(1)}]}
    for state, units in ((more, [6, 6]), (other, [1])):
        with pytest.raises(ValueError, match=re.escape(f"the state has layers of {units} units, this object has")):
            rule.load_state_dict(state)
    assert rule.steps == before["steps"] == 3
    assert torch.equal(rule.state_dict()["layers"][0]["utility"], before["layers"][0]["utility"])


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


def test_blocks_that_normalise_their_input_have_no_such_units():
    """Of a pre-activation block, ``bn1`` belongs to the input's channels and not to those of ``conv1``."""
    names = "bn1", "conv1", "bn2", "conv2"
    parts = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    network = nn.Sequential(nn.Sequential(OrderedDict(zip(names, parts, strict=True))))
    assert inner_units(network) == []
    assert not ContinualBackprop.supports(network, "0.conv1", "0.bn1", "0.conv2")
    assert ContinualBackprop.supports(network, "0.conv1", "0.bn2", "0.conv2")


class Block(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=groups)

    def forward(self, images):
        return relu(images + self.conv2(relu(self.bn1(self.conv1(images)))))


class Blocks(nn.Sequential):
    """A backbone of blocks whose second convolutions have these numbers of groups, as in a ResNeXt."""

    def __init__(self, *groups):
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(nn.Conv2d(3, 8, 3), *(Block(number) for number in groups), *pool)
        self.out_dim = 8


def test_units_before_a_grouped_convolution_are_left_out(settings, monkeypatch):
    monkeypatch.setitem(registry.backbones, "grouped", lambda: Blocks(1, 4))
    keys = {"convnet_type": "grouped", "wsc.reset": "continual_backprop", "wsc.replacement_rate": 0.5}
    config = resolve(settings | keys | {"wsc.maturity": 2, "max_tasks": 2, "epochs": 2, "milestones": [1]})
    run = Run(config, load_dataset(config.dataset, "."))
    rule = reset_rule(config, run.learner.network, 1, fresh=dict)
    assert [layer.names[0] for layer in rule._layers] == ["backbone.1.conv1"]
    assert run.execute()["units_replaced"][0] > 0


def test_a_backbone_without_units_is_refused_before_anything_is_trained(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.backbones, "grouped", lambda: Blocks(4, 4))
    keys = {"convnet_type": "grouped", "wsc.reset": "continual_backprop"}
    assert main(["--config", write(tmp_path, settings | keys)]) == 1
    shown = capsys.readouterr()
    assert "wsc.reset: 'continual_backprop' finds no units in this backbone; its blocks need conv1, bn1" in shown.out
    assert not results(settings) and "Traceback" not in shown.out + shown.err
    assert not list(tmp_path.rglob("checkpoint.pt")) and "task 1" not in shown.out


def test_units_of_all_networks_are_found():
    assert len(inner_units(IncrementalNet(make_backbone("resnet8")))) == 3
    net = ExpandingNet(make_backbone("resnet8"))
    net.grow(2, 3), net.grow(4, 3)
    assert len(inner_units(net)) == 6
