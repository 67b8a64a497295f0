"""Budgets in operations and in seconds: what a task spends, how its schedule is stretched, and what a resume keeps."""

import json

import numpy as np
import pytest
import torch
from support.small_runs import OF_TWO_BLOCKS, TRANSFORMER, killed_at, without_measurements, write

from main import main
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.replay.redo import ReDo
from pycil_wsc.runs import device_check
from pycil_wsc.runs.run import Run
from pycil_wsc.training import budget
from pycil_wsc.training.learner import grow_for

OPERATIONS = {"budget": {"flops_like": "replay"}, "init_epoch": 4, "epochs": 15}


def run(settings, **keys):
    config = resolve(settings | keys)
    return Run(config, Datasets().of(config), lambda progress: None)


def operations(folder):
    """Those of each task."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.diff([0, *(line["train_flops"] for line in lines)])


@pytest.fixture
def replay(undisturbed):
    """The folder and the result of Replay in its own schedule."""
    return undisturbed(model_name="replay", init_epoch=4, epochs=15, precision="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "icarl", "der", "gdumb", "gem", "cls_er", "derpp", "er_ace"])
def test_each_task_spends_replays_operations(name, settings, replay):
    """To half of one of its steps, and to 1 % where a task has 50 steps or more."""
    steps = {}

    class Counted(Run):
        def task_started(self, task):
            super().task_started(task)
            self.now = task.index

        def step(self, images):
            super().step(images)
            steps[self.now] = steps.get(self.now, 0) + 1

    config = resolve(
        settings | {"model_name": name, "precision": "fp32", "batch_size": 4, "fixed_memory": True} | OPERATIONS
    )
    finished = Counted(config, load_dataset(config.dataset, "."), lambda progress: None)
    finished.execute()
    for task in (1, 2):
        spent, allowed = operations(finished.folder)[task], operations(replay[0])[task]
        assert abs(spent - allowed) <= 0.51 * spent / steps[task] + 0.005 * allowed, (name, task)
        assert steps[task] < 50 or abs(spent / allowed - 1) < 0.01


def test_a_loss_that_needs_what_is_noted_before_a_step_fits_a_budget(settings):
    """ER-ACE masks classes that `before_step` notes, and stores nothing with its exemplars. To one of its steps."""
    keys = {
        "memory_size": 20,
        "fixed_memory": False,
        "batch_size": 4,
        "precision": "fp32",
        "init_epoch": 2,
        "epochs": 4,
    }
    replay = run(settings, model_name="replay", out=settings["out"] + "/replay", **keys)
    finished = run(settings, model_name="er_ace", budget={"flops_like": "replay"}, **keys)
    for started in (replay, finished):
        started.execute()
    assert operations(finished.folder)[1:] == pytest.approx(operations(replay.folder)[1:], rel=0.05)


@pytest.mark.parametrize("name", ["gdumb", "pass", "ssre"])
def test_smaller_batches_do_not_make_equal_operations_fewer_passes(name):
    """These have smaller batches than Replay by default, and as many epochs as it has within its operations."""
    own, replay = (resolve({"model_name": each, "budget": {"flops_like": "replay"}}) for each in (name, "replay"))
    of_first = getattr(own.options, "init_batch_size", own.batch_size)
    assert of_first < replay.batch_size
    assert (own.init_epoch, own.epochs) == (replay.init_epoch, replay.epochs)


@pytest.mark.slow
def test_phases_over_images_chosen_by_features_fit_a_budget(settings, replay):
    """PODNet counts the images of its balanced phase in advance, when there are no features to choose them by."""
    finished = run(settings, model_name="podnet", precision="fp32", batch_size=4, **OPERATIONS)
    finished.execute()
    assert operations(finished.folder) == pytest.approx(operations(replay[0]), rel=0.05)


@pytest.mark.parametrize("name, augmented", [("coda_prompt", True), ("coda_prompt", False), ("ease", True)])
def test_a_tuned_transformer_gets_the_operations_of_a_replay_that_trains_it(name, augmented, settings):
    """Also where features of images that stay the same are computed once, before the first step."""
    pytest.importorskip("timm")
    small = TRANSFORMER | {"max_tasks": 2, "precision": "fp32", "batch_size": 4, "memory_per_class": 0}
    if not augmented:
        small |= {"padding": 0, "flip": False, "brightness": 0.0}
    replay = run(settings, model_name="replay", out=settings["out"] + "/replay", epochs=4, init_epoch=4, **small)
    keys = small | OF_TWO_BLOCKS[name] | OPERATIONS | {"epochs": 4}
    tuned = run(settings, model_name=name, **keys)
    for started in (replay, tuned):
        started.execute()
    assert operations(tuned.folder) == pytest.approx(operations(replay.folder), rel=0.05)


@pytest.mark.slow
def test_mixed_images_fit_a_budget(settings, undisturbed):
    """IL2A's batches come from a source of its own; it has no memory."""
    keys = {"init_epoch": 4, "epochs": 15, "precision": "fp32"}
    folder, _ = undisturbed(model_name="replay", memory_per_class=0, **keys)
    finished = run(settings, model_name="il2a", batch_size=4, **keys | OPERATIONS)
    finished.execute()
    assert operations(finished.folder) == pytest.approx(operations(folder), rel=0.05)


def test_a_method_with_two_passes_has_half_the_steps_and_its_milestones_come_twice_as_early(settings):
    rates = {}

    class Watched(Run):
        def epoch_ended(self, task, run, epoch, loss, accuracy):
            super().epoch_ended(task, run, epoch, loss, accuracy)
            rates.setdefault(task.index, []).append(run.phase.optimizer.param_groups[0]["lr"])

    keys = {"model_name": "sam", "precision": "fp32", "milestones": [5, 10], "max_tasks": 2}
    config = resolve(settings | keys | OPERATIONS)
    Watched(config, load_dataset(config.dataset, "."), lambda progress: None).execute()
    assert rates[1] == pytest.approx([0.1] * 3 + [0.01] * 2 + [0.001] * 3), "7.5 epochs of 15, milestones at 2.5 and 5"


@pytest.mark.slow
def test_replay_itself_is_not_changed_by_its_own_operations(settings, replay):
    usual_folder, usual = replay
    finished = run(settings, model_name="replay", precision="fp32", **OPERATIONS)
    other = finished.execute()
    assert operations(finished.folder).tolist() == operations(usual_folder).tolist()
    assert other["train_loss"] == usual["train_loss"]
    assert other["images_trained"] == usual["images_trained"]


@pytest.mark.slow
def test_phases_over_stored_features_keep_their_epochs(settings):
    usual, finished = (
        run(settings, model_name="fetril", out=f"{settings['out']}{n}", **k)
        for n, k in enumerate(({"init_epoch": 4, "epochs": 3}, OPERATIONS | {"epochs": 3}))
    )
    assert [len(each) for each in finished.execute()["train_loss"]] == [len(e) for e in usual.execute()["train_loss"]]


class Polished(registry.learners["fetril"]):
    """FeTrIL, whose later tasks also train the network on their images."""

    class Plan(registry.learners["fetril"].Plan):
        def planned_epochs(self, task):
            return super().planned_epochs(task) * (2 if task.index else 1)

    def phases(self, task):
        yield from super().phases(task)
        if task.index:
            yield self.main_phase(task)


@pytest.mark.slow
def test_a_phase_over_images_after_one_over_stored_features_gets_the_budget(settings, monkeypatch):
    monkeypatch.setitem(registry.learners, "fetril", Polished)
    keys = {"epochs": 3, "init_epoch": 8, "max_tasks": 2, "precision": "fp32", "batch_size": 4}
    finished = run(settings, model_name="fetril", **OPERATIONS | keys)
    losses = finished.execute()["train_loss"][1]
    assert len(losses) > 3
    elsewhere = settings | {"out": f"{settings['out']}-replay"}
    theirs = run(elsewhere, model_name="replay", memory_per_class=0, **keys | {"epochs": 6})
    theirs.execute()
    assert operations(finished.folder)[1] == pytest.approx(operations(theirs.folder)[1], rel=0.05)


def test_an_alignment_on_drawn_features_keeps_its_epochs_under_a_budget(settings, monkeypatch):
    """The operations that the first phase leaves would be thousands of them."""
    lengths, started = [], Run.phase_started

    def remember(self, task, run):
        lengths.append((task.index, run.phase.name, run.epochs))
        started(self, task, run)

    monkeypatch.setattr(Run, "phase_started", remember)
    keys = {"epochs": 2, "init_epoch": 2, "max_tasks": 2, "precision": "fp32", "batch_size": 4, "ca_epochs": 3}
    run(settings, model_name="slca", **OPERATIONS | keys).execute()
    assert lengths == [(0, "train", 2), (1, "train", 2), (1, "alignment", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes",
    [
        ("sam", {}),
        ("foster", {}),
        ("wsc", {}),
        ("derpp", {}),
        ("gss", {"memory_update": "step", "memory_size": 20, "fixed_memory": False}),
        ("beef", {"epochs": 16, "langevin_noise": 0.1}),
        ("coil", {"reg_term": 1.0}),
    ],
)
def test_a_stopped_run_spends_what_an_undisturbed_one_does(name, changes, settings, tmp_path):
    keys = {"model_name": name, **OPERATIONS, "epochs": 6, "max_tasks": 2} | changes
    whole = run(settings | {"out": str(tmp_path / "whole")}, **keys).execute()
    for stop in (2, 3):
        with killed_at(lambda calls, stop=stop: sum(optimizer is not None for _, optimizer in calls) == stop):
            run(settings, **keys).execute()
    assert without_measurements(run(settings, **keys).execute()) == without_measurements(whole)


@pytest.mark.slow
def test_the_rate_of_bics_second_phase_drops_at_the_shares_of_its_own_milestones(settings, monkeypatch):
    """Those of the first phase are stretched by a budget of their own."""
    rates, ended = [], Run.epoch_ended

    def remember(self, task, run, *others):
        if task.index and run.number:
            rates.append(run.phase.optimizer.param_groups[0]["lr"])
        ended(self, task, run, *others)

    monkeypatch.setattr(Run, "epoch_ended", remember)
    keys = {"model_name": "bic", "milestones": [6, 12], "memory_size": 40, "validation": "pycil", "max_tasks": 2}
    run(settings, **OPERATIONS, **keys).execute()
    drops = [epoch for epoch in range(1, len(rates)) if rates[epoch] < rates[epoch - 1]]
    assert len(rates) > 15
    assert drops == pytest.approx([len(rates) * 6 / 15, len(rates) * 12 / 15], abs=1)


@pytest.mark.parametrize("keys", [{"model_name": "gem"}, {"model_name": "lwf", "wsc.warmup": 0.9}])
def test_the_warm_up_is_a_share_of_the_steps_that_a_budget_leaves(keys, settings):
    short = {"init_epoch": 1, "epochs": 1, "milestones": [], "init_milestones": [], "batch_size": 2, "max_tasks": 2}
    finished = run(settings, **OPERATIONS | short | keys, consolidate=True)
    begun, started = [], finished.phase_started

    def phase_started(task, run):
        if task.index:
            begun.append((finished.learner.consolidation.wsc.warmup_steps, run.steps))
        started(task, run)

    finished.phase_started = phase_started
    finished.execute()
    ((warmup, steps),) = begun
    assert warmup == pytest.approx(keys.get("wsc.warmup", 0.25) * steps, abs=1) and 0 < warmup < steps
    assert finished.learner.warmups[-1] is not None


def test_counting_the_operations_of_a_step_leaves_no_trace(settings):
    learner = run(settings, model_name="icarl", precision="fp32", **OPERATIONS).learner
    task = learner.manager.tasks[0]
    grow_for(learner, task)
    (phase,) = learner.phases(task)
    before = {name: value.clone() for name, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    generator = torch.get_rng_state()
    planned = budget.planned(learner, task, 0, phase)
    assert planned.steps == phase.epochs * learner.batches.number(len(phase.indices)), "the first task is plain"
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(learner.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in learner.parameters())


def test_the_device_check_recycles_units(settings, monkeypatch):
    recycled = []
    monkeypatch.setattr(ReDo, "_renew", lambda learner, *arguments: recycled.append(learner.steps))
    learner = run(settings, model_name="redo").learner
    device_check._learn(learner, torch.device("cpu"), ())
    assert recycled and learner.config.options.recycle_every == 1000


def test_a_budget_and_what_it_sets_are_not_both_given():
    with pytest.raises(UserError, match="^operations_like: is set by 'budget'; leave one of the two out"):
        resolve({"model_name": "sam", "operations_like": "replay"} | OPERATIONS)
    for given in ({"seconds": 60}, {"flops_like": 3}):
        with pytest.raises(UserError, match="^budget: expected "):
            resolve({"model_name": "sam", "budget": given})
    set_by_it = resolve({"model_name": "sam", "budget": {"flops_like": "replay"}})
    assert set_by_it.operations_like == "replay" and resolve(set_by_it.to_dict()) == set_by_it


def test_a_dry_run_says_what_decides_and_not_the_images_of_the_schedule(settings, tmp_path, capsys):
    budgets = [{"flops_like": "replay"}, {"epochs_times": 0.5}]
    images = []
    for given in budgets:
        assert main(["--config", write(tmp_path, settings | {"model_name": "sam", "budget": given}), "--dry-run"]) == 0
        line, sum_ = (line for line in capsys.readouterr().out.splitlines() if " in memory" in line or " to go" in line)
        images.append((line.split("  ")[1].rpartition(", ")[0], sum_))
    assert images[0] == (
        "the operations of replay in its schedule",
        "1 run, 0 training images to go, and 1 run limited by a budget",
    )
    planned = run(settings, model_name="sam", budget=budgets[1]).plan
    assert images[1] == (f"{sum(planned):,} images", f"1 run, {sum(planned):,} training images to go")
