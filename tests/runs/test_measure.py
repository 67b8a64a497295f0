"""--dry-run --measure: hours of training from a few steps of each method and phase."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.methods import one_of_each_family
from support.small_runs import results, suited, write
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from main import main
from pycil_wsc import registry
from pycil_wsc.config.kinds import kinds
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.growing.der import DER
from pycil_wsc.methods.growing.foster import FOSTER
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.runs import speed
from pycil_wsc.runs.planning import plan_of
from pycil_wsc.runs.run import Run
from pycil_wsc.training import budget
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.step.cost import StepCost


@pytest.fixture
def clock(monkeypatch):
    """A clock for measurements that advances only when a test adds to ``now``."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(speed, "time", clock)
    return clock


def slow(monkeypatch, clock, cls, loss, seconds_per_image):
    """Let the loss ``cls.loss`` take ``seconds_per_image(learner)``."""
    original = getattr(cls, loss)

    def computed(self, batch):
        clock.now += len(batch) * seconds_per_image(self)
        return original(self, batch)

    monkeypatch.setattr(cls, loss, computed)


def seconds_of(tmp_path, settings):
    (config,) = load(write(tmp_path, settings))
    return kinds["class_incremental"].measurer()(config, Datasets().of(config))


def test_the_estimate_is_each_phases_images_times_its_measured_seconds(settings, tmp_path, clock, monkeypatch):
    slow(monkeypatch, clock, FOSTER, "loss", lambda learner: 0.001)
    slow(monkeypatch, clock, FOSTER, "compression_loss", lambda learner: 0.003)
    counted = StepCost.measured

    def first_step(self, images):  # is longer than the others
        clock.now += 100
        return counted(self, images)

    monkeypatch.setattr(StepCost, "measured", first_step)
    seconds = seconds_of(tmp_path, settings | {"model_name": "foster", "compression_epochs": 5})
    # 24 images of a task and 4 exemplars of each class; 3 epochs of the first task, then 4 and 5
    first, later = 24 * 3, (24 + 8) + (24 + 16)
    assert seconds == pytest.approx(0.001 * (first + 4 * later) + 0.003 * 5 * later)


def test_between_measured_tasks_the_time_is_on_a_straight_line(settings, tmp_path, clock, monkeypatch):
    slow(monkeypatch, clock, DER, "loss", lambda learner: 0.001 * len(learner.network.blocks))
    settings |= {"model_name": "der", "init_cls": 1, "increment": 1, "batch_size": 4}
    images = [12 * 3] + [4 * (12 + 4 * task) for task in range(1, 6)]
    expected = sum(0.001 * (task + 1) * count for task, count in enumerate(images))
    assert seconds_of(tmp_path, settings) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "sam", "foster", "wsc"])
def test_with_a_budget_in_operations_the_estimate_is_that_of_the_steps_it_allows(
    name, settings, tmp_path, clock, monkeypatch
):
    """As much time as the whole run takes, by a clock that only losses move."""
    slow(monkeypatch, clock, Replay, "loss", lambda learner: 0.001)
    slow(monkeypatch, clock, FOSTER, "loss", lambda learner: 0.002)
    slow(monkeypatch, clock, FOSTER, "compression_loss", lambda learner: 0.003)
    keys = {"model_name": name, "budget": {"flops_like": "replay"}, "epochs": 6, "cache_first_task": False}
    settings |= keys | {"precision": "fp32", "max_tasks": 2}
    estimate = seconds_of(tmp_path, settings)
    (config,) = load(write(tmp_path, settings))
    clock.now, dataset = 0.0, Datasets().of(config)
    monkeypatch.setattr(budget, "costs_of_step", still(clock, budget.costs_of_step))
    Run(config, for_training(dataset, config), lambda progress: None).execute()
    assert estimate == pytest.approx(clock.now, rel=1e-6)


def still(clock, function):
    """``function``, for which the clock stands still."""

    def call(*arguments):
        now = clock.now
        result = function(*arguments)
        clock.now = now
        return result

    return call


OTHERS = [
    {"consolidate": True, "model_name": "icarl"},
    {"model_name": "wsc", "wsc.trigger": "held_out"},
    {"model_name": "wsc", "wsc.reset": "continual_backprop", "exemplars": "reservoir"},
    {"model_name": "replay", "replay_ratio": 0.5},
]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name", one_of_each_family(sorted(registry.learners)))
def test_a_few_steps_of_every_method_tell_what_its_phases_would_train_on(name, settings, monkeypatch):
    assert_planned({"model_name": name}, settings, monkeypatch)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("keys", OTHERS, ids=str)
def test_so_do_those_of_methods_with_other_options(keys, settings, monkeypatch):
    assert_planned(keys, settings, monkeypatch)


def assert_planned(keys, settings, monkeypatch):
    """What is measured of a run with these keys is the plan of its images."""
    steps = []
    monkeypatch.setattr(speed, "WARM_UP", 2)
    monkeypatch.setattr(speed, "TIMED", 2)
    monkeypatch.setattr(BaseLearner, "after_step", lambda learner: steps.append(learner.config.seed))
    config = resolve(
        settings
        | {"init_cls": 1, "increment": 1, "max_tasks": 4, "batch_size": 2, "nme": False}
        | suited(keys["model_name"])
        | keys
    )
    dataset = Datasets().of(config)
    watch = speed.measure(config, dataset)
    plan = plan_of(config, tasks_of(dataset, config))
    assert [sum(images) for images in watch.learner.planned.values()] == plan
    assert [seconds > 0 for seconds in watch.seconds_per_image()] == [images > 0 for images in plan]
    measured = {task for task, _ in watch.speeds}
    assert measured == {task for task in (0, 1, 3) if plan[task]}
    assert len(steps) <= len(watch.speeds) * 2 * (speed.WARM_UP + speed.TIMED)
    assert not any(module._forward_pre_hooks for module in watch.learner.modules()), "a rule of a task watches no other"


def test_a_run_that_will_fail_is_said_to_and_the_others_are_measured(settings, tmp_path, capsys):
    settings |= {"runs": [{"wsc.reset": "continual_backprop"}, {"seed": 2}]}
    with patch("pycil_wsc.methods.consolidation.wsc.inner_units", lambda network: []):
        assert main(["--config", write(tmp_path, settings), "--dry-run", "--measure"]) == 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if "images" in line and "/seed" in line)
    assert "will fail: wsc.reset: 'continual_backprop' finds no units" in first and second.endswith(" of training")


def test_a_dry_run_measures_each_method_once_and_writes_nothing(settings, tmp_path, capsys):
    path = write(tmp_path, settings | {"model_name": ["replay", "wsc"], "seed": [1, 2], "memory_per_class": [2, 4]})
    assert main(["--config", path, "--dry-run", "--measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "images/s" in line] == ["measured replay", "measured wsc"]
    assert sum(line.endswith(" of training") for line in lines) == 8 and lines[-1].endswith("one run after another")
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == [] and not results(settings)


def test_what_cannot_be_measured_is_said_in_a_line(settings, tmp_path, capsys, monkeypatch):
    path = write(tmp_path, settings)
    for arguments in (["--measure"], ["--dry-run", "--measure", "--ray"]):
        with pytest.raises(SystemExit) as stopped:
            main(["--config", path, *arguments])
        assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: --measure ")
    with pytest.raises(UserError, match="--measure: training on tokens cannot be measured"):
        kinds["llm"].measurer()

    def fail(*arguments):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr("pycil_wsc.runs.speed.measure", fail)
    assert main(["--config", path, "--dry-run", "--measure"]) == 2
    assert capsys.readouterr().err == "error: --measure: wsc cannot be trained here (RuntimeError: out of memory)\n"


class Step(nn.Module):
    """A convolution, batch norm, attention, a matrix product by indices, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def forward(self, images):
        maps = self.features(images)
        maps = functional.scaled_dot_product_attention(maps, maps, maps)
        return self.head(torch.einsum("bcij,bcjk->bcik", maps, maps).flatten(1))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operations_are_those_that_torchs_counter_counts(mode):
    network, images = Step(), torch.randn(6, 3, 4, 4)

    def step():
        with mode():
            logits = network(images)
        functional.cross_entropy(network(images) + logits.clone(), torch.zeros(6, dtype=torch.int64)).backward()

    cost = StepCost()
    with cost.measured(2):
        step()
    formulas = {  # which torch has for GPUs alone, of the shapes of the tensors
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    assert cost.per_image == counter.get_total_flops() // 2 > 10_000
