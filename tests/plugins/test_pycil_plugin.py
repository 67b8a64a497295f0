"""The consolidation inside PyCIL: in a stand-in checkout with PyCIL's interface,
and phase by phase against a plain loop.
"""

import copy
import hashlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support import fresh
from torch import nn

from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation, recompute_batch_norm
from pycil_wsc.methods.consolidation.wsc_keys import WSCKeys
from pycil_wsc.plugins import pycil
from pycil_wsc.training.optimizers.schedules import held_lr, step_lr

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).parents[1] / "pycil_standin"
CONFIG = {"model_name": "wsc", "init_cls": 2, "increment": 2, "memory_per_class": 5, "device": [-1], "seed": [1993]}

# The command.


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """-> function of changes to CONFIG that gives (exit code, standard output, standard error).
    Afterwards ``utils`` is ours again.
    """
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)

    def command(checkout=STANDIN, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in (CONFIG | changes).items() if value != "absent"}))
        code = pycil.main(["--pycil", str(checkout), "--config", str(path)])
        return code, *capsys.readouterr()

    yield command
    for name in [name for name in sys.modules if name.partition(".")[0] in pycil.MODULES]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in pycil.MODULES})


def tasks(out):
    """[(top-1, weights, weights that exemplars were chosen with)] of each task, as the stand-in prints them."""
    found = re.findall(r"top1 (\S+), weights (\S+), exemplars seen with (\S+)", out)
    assert len(found) == 3, out
    return [tuple(map(float, values)) for values in found]


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"seed": "absent"}, 'the file has no "seed", which PyCIL needs'),
        ({"init_cls": "absent"}, 'the file has no "init_cls", which PyCIL needs'),
        ({"model_name": "replay", "wsc.retain": 0.5}, "wsc: has no effect on 'replay'; use wsc or wsc_replay"),
    ],
)
def test_what_the_file_lacks_or_has_too_much_is_one_line(changes, line, run):
    code, _, error = run(**changes)
    assert code == 2 and error.startswith("error: ") and line in error and error.count("\n") == 1


AS_COMMAND = """
import runpy, sys

sys.dont_write_bytecode = False
sys.path.insert(0, "")  # as python -m does
runpy.run_module("pycil_wsc.plugins.pycil", run_name="__main__", alter_sys=True)
"""


def test_the_command_runs_three_tasks_where_our_own_utils_are_in_the_way_and_changes_nothing(tmp_path):
    path = tmp_path / "wsc.json"
    path.write_text(json.dumps(CONFIG))
    before = digest(STANDIN)
    printed = fresh.printed(AS_COMMAND, tmp_path / "command.py", "--pycil", STANDIN, "--config", path)
    accuracies = [top1 for top1, _, _ in tasks(printed)]
    assert len(accuracies) == 3 and min(accuracies) > 60
    assert digest(STANDIN) == before


def digest(folder):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_stock_names_run_as_they_are_and_wsc_departs_from_replay_after_the_first_task(run):
    replay, wsc = tasks(run(model_name="replay")[1]), tasks(run()[1])
    assert replay[0] == wsc[0]
    assert replay[1] != wsc[1]
    assert all(weights == at_exemplars for _, weights, at_exemplars in wsc)  # the average, when exemplars are chosen


@pytest.mark.parametrize("form", ["nested", "dotted"])
def test_options_that_leave_nothing_to_do_give_replay_to_the_bit(run, form):
    options = {"retain": 1, "average": False}
    options = {"wsc": options} if form == "nested" else {f"wsc.{name}": value for name, value in options.items()}
    assert tasks(run(**options)[1]) == tasks(run(model_name="replay")[1])


def test_the_ranking_can_be_chosen(run):
    assert tasks(run(wsc={"importance": "drift"})[1])[1] != tasks(run()[1])[1]


def test_the_first_task_is_consolidated_on_request(run):
    assert tasks(run(wsc={"first_task": True})[1])[0] != tasks(run()[1])[0]


def test_the_rate_is_held_after_the_warm_up_and_zero_rates_stay_zero(run):
    code, out, _ = run(model_name="wsc_bic", wsc={"average_lr": 0.04, "average_anneal": 2, "warmup": 0.5})
    assert code == 0
    stages = re.split(r"end of \w+", out)
    first_task, second_task, bias_correction = (
        [json.loads(rates) for rates in re.findall(r"rate (\[.*?\])", part)] for part in stages[:3]
    )
    assert [rate for rate, _ in first_task] == pytest.approx(5 * [0.1] + 3 * [0.01])
    assert [rate for rate, _ in second_task] == pytest.approx(
        3 * [0.1] + [0.07] + 4 * [0.04]
    )  # the decay at epoch 6 does not come
    assert all(bias == 0 for _, bias in first_task + second_task)
    assert [rate for (rate,) in bias_correction] == pytest.approx(
        5 * [0.1] + 3 * [0.01]
    )  # the second phase is PyCIL's own


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"model_name": "wsc_replai"}, "model_name: 'wsc_replai' is not a learner of this checkout"),
        ({"model_name": "icarl2"}, "model_name: 'icarl2' is not a learner of this checkout"),
        *(
            ({"model_name": f"wsc_{name}"}, f"model_name: 'wsc_{name}': PyCIL's {name} has no single network")
            for name in ("mixture", "beefiso", "der", "foster", "memo", "rmm-foster", "tagfex")
        ),
        ({"model_name": "wsc_fetril"}, "PyCIL's fetril trains only its head after the first task"),
        ({"model_name": "wsc_ssre"}, "PyCIL's ssre expands and compresses its network in each task"),
        (
            {"model_name": "wsc_simplecil"},
            "model_name: 'wsc_simplecil': PyCIL's simplecil does not train its network in each task",
        ),
        (
            {"model_name": "wsc_gem"},
            "cannot be loaded \\(No module named 'a_solver_of_quadratic_programs'\\); install what it needs",
        ),
        ({"memory_per_class": "absent"}, "model_name: 'wsc' needs the key 'memory_per_class' in the JSON file; add it"),
        ({"model_name": 5}, 'expected a JSON object with a "model_name"'),
        ({"seed": 1993}, "seed: is 1993; PyCIL takes a list, such as \\[1993\\]"),
        ({"device": "auto"}, "device: is 'auto'; PyCIL takes a list"),
        ({"wsc": 0.2}, '"wsc" must be an object of options'),
        ({"wsc": {"retian": 0.2}}, "wsc: unknown option 'retian'; did you mean 'retain'\\?"),
        ({"wsc.retain": 1.5}, "wsc: retain: 1.5 is above 1"),
        ({"wsc.retain": "most"}, "wsc: retain: expected float, got 'most'"),
        ({"wsc.warmup": 1}, "wsc: warmup: 1 leaves no step"),
        ({"wsc": {"retain": 0.1}, "wsc.retain": 0.2}, "wsc.retain: is given twice, in a group and with a dot"),
        ({"wsc.reset": "soft"}, "wsc: reset: 'soft' is not one of blend, revert, none"),
        ({"wsc.reset": "random"}, "wsc: reset: 'random' is not one of blend"),
        (
            {"wsc.importance": "fisher"},
            "wsc: importance: 'fisher' is not one of moment, first_moment, second_moment, drift",
        ),
        ({"wsc.reset_every": "step"}, "wsc: reset_every: 'step' is not once, epoch, iteration or a number of epochs"),
        ({"wsc.blend": 2}, "wsc: blend: 2.0 is above 1"),
        ({"wsc.average_every": 0}, "wsc: average_every: 0 is not above 0"),
        ({"wsc.average_lr": -1}, "wsc: average_lr: -1.0 is below 0"),
        ({"wsc.betas": [0.9]}, "wsc: betas: expected two numbers, got"),
        ({"wsc.average_lr": "high"}, "wsc: average_lr: 'high' is neither a number, null nor 'initial'"),
        ({"wsc.reset_new_rows": False}, "wsc: unknown option 'reset_new_rows'"),
        ({"checkout": ROOT}, "not a checkout of PyCIL, as it has no trainer.py"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(run, changes, line):
    code, _, error = run(**changes)
    assert code == 2
    assert re.search(line, error) and error.count("\n") == 1


@pytest.mark.parametrize(
    "text, line",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected a JSON object"),
        (None, "cannot be read"),
        ('{"model_name": "wsc", "wsc": {"betas": [0.9, 1%s]}}' % ("0" * 400), "wsc: int too large"),
    ],
    ids=lambda value: (value or "none")[:40],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, capsys, text, line):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert pycil.main(["--pycil", str(STANDIN), "--config", str(path)]) == 2
    assert line in capsys.readouterr().err


# One phase, against a plain loop.

epochs = 8  # where a learner of PyCIL's has it


class Learner:
    """The part that the plugin uses of a PyCIL learner in its second task: four old classes and two new ones."""

    def __init__(self):
        torch.manual_seed(0)
        self._network = nn.ModuleDict(
            {"convnet": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), "fc": nn.Linear(6, 6)}
        )
        self._network.forward = lambda x: {"logits": self._network["fc"](self._network["convnet"](x))}
        self._cur_task, self._known_classes, self._total_classes, self._device = 1, 4, 6, torch.device("cpu")

    def batches(self):
        generator = torch.Generator().manual_seed(1)
        return [
            (None, torch.randn(8, 4, generator=generator), torch.randint(6, (8,), generator=generator))
            for _ in range(3)
        ]

    def optimizer(self):
        return torch.optim.SGD(self._network.parameters(), lr=0.1, momentum=0.9)

    def _update_representation(self, train_loader, test_loader, optimizer, scheduler):
        for _ in range(epochs):
            plain_epoch(self._network, train_loader, optimizer)
            scheduler.step()


def plain_epoch(network, batches, optimizer):
    network.train()
    for _, inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs)["logits"], targets).backward()
        optimizer.step()


def through_the_plugin(**options):
    learner = Learner()
    learner.__class__ = pycil.consolidated(Learner, pycil.PyCILOptions(**options))
    optimizer = learner.optimizer()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)
    learner._update_representation(learner.batches(), None, optimizer, scheduler)
    return learner._network.state_dict()


@pytest.mark.parametrize("hold", [None, 0.05])
def test_the_phase_gives_the_weights_of_the_same_steps_in_a_plain_loop(hold):
    learner = Learner()
    network, optimizer = learner._network, learner.optimizer()
    rate = step_lr(0.1, [3, 6], 0.1)
    rate = rate if hold is None else held_lr(rate, 2, hold, 3)
    wsc = WeightSpaceConsolidation(
        network.named_parameters(),
        warmup_steps=6,
        average=Average(every=3),
        retain=0.3,
        reset=Blend(),
    ).attach(optimizer)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate(epoch)
        plain_epoch(network, learner.batches(), optimizer)
    wsc.finish()
    recompute_batch_norm(network, [inputs for _, inputs, _ in learner.batches()])
    result = through_the_plugin(average_every=1, retain=0.3, average_lr=hold, average_anneal=3)
    torch.testing.assert_close(result, network.state_dict())


def test_only_the_first_phase_of_a_task_is_consolidated():
    learner = Learner()
    learner.__class__ = pycil.consolidated(Learner, pycil.PyCILOptions(average_lr=None))
    optimizer = learner.optimizer()
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    learner._update_representation(learner.batches(), None, optimizer, constant)
    twin = copy.deepcopy(learner._network)
    twin.forward = lambda x: {"logits": twin["fc"](twin["convnet"](x))}
    learner._update_representation(learner.batches(), None, learner.optimizer(), constant)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        plain_epoch(twin, learner.batches(), twin_optimizer)
    torch.testing.assert_close(learner._network.state_dict(), twin.state_dict())


def test_options_have_the_names_and_defaults_of_our_own_keys():
    ours = {f.name: f.default for f in fields(WSCKeys)} | {"average_lr": "initial"}  # PyCIL's lrate
    assert {f.name: f.default for f in fields(pycil.PyCILOptions)}.items() <= ours.items()
