"""When the warm-up ends: after a fraction of the epochs, or at a plateau of the loss."""

import json
import warnings

import numpy as np
import pytest
import torch
from structure import ROOT
from support.methods import SILENT
from support.plain_loop import snapshot, start, train
from support.small_runs import killed_at, without_measurements, write
from torch.nn.functional import cross_entropy

from main import main
from pycil_wsc.config.loading import resolve
from pycil_wsc.consolidation import Average, Blend, drift_score
from pycil_wsc.consolidation.batch_norm import restored_modes
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.consolidation.triggers import Plateau, held_out_counts, held_out_exemplars
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Batches, Sampling
from pycil_wsc.training.learner import BaseLearner, grow_for

# ---- in any loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance": drift_score()},
        {"reset": None},
        {"average": Average(every=2, start="first")},
        {"reset": Blend(every=2)},
        {"reset": Blend(momentum=True)},
        {"reset": Blend(min_warmup=6)},
        {"reset": Blend(min_warmup=6, every=2)},
        {"average": Average(every=2, count="absolute")},
    ],
)
@pytest.mark.filterwarnings("ignore:WSC averages but does not reset")
def test_a_warmup_ended_by_hand_is_one_of_as_many_steps(options):
    options = {"average": Average(every=2)} | options
    net, optimizer, wsc = start(warmup_steps=None, **options)
    train(net, optimizer, range(5))
    assert wsc.phase == "warm-up"
    wsc.end_warmup()
    assert wsc.phase == "averaging"
    train(net, optimizer, range(5, 11))
    wsc.finish()
    fixed, fixed_optimizer, fixed_wsc = start(warmup_steps=5, **options)
    train(fixed, fixed_optimizer, range(11))
    fixed_wsc.finish()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), fixed.state_dict().values()))


@pytest.mark.parametrize("least, resets", [(5, 1), (6, 0)])
def test_a_warmup_ended_before_min_warmup_has_no_reset_and_says_so(least, resets):
    net, optimizer, wsc = start(warmup_steps=None, reset=Blend(min_warmup=least))
    train(net, optimizer, range(5))
    before = snapshot(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wsc.end_warmup()
    kept = all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert wsc.resets == resets and kept == (not resets)
    assert [str(w.message).split(":")[0] for w in said] == ["WSC averages but does not reset"] * (not resets)
    assert all("to reset nevertheless, pass a reset such as Blend(min_warmup=0)" in str(w.message) for w in said)
    assert wsc.state_dict()["previous"] == {} and wsc.state_dict()["tracker"] is None, "nothing is kept in vain"


@pytest.mark.parametrize("reset", [Blend(), Blend(min_warmup=6)])
@pytest.mark.parametrize("saved_at", [3, 8])
@pytest.mark.filterwarnings("ignore:WSC averages but does not reset")
def test_such_a_warmup_is_saved_and_loaded(saved_at, reset):
    def go(net, optimizer, wsc, steps):
        for step in steps:
            train(net, optimizer, [step])
            if step == 4:
                wsc.end_warmup()

    whole, stopped, other = (start(warmup_steps=None, reset=reset, average=Average(every=2)) for _ in range(3))
    go(*whole, range(11))
    go(*stopped, range(saved_at))
    for part, before in zip(other, stopped):
        part.load_state_dict(before.state_dict())
    go(*other, range(saved_at, 11))
    for _, _, wsc in (whole, other):
        wsc.finish()
    assert all(torch.equal(a, b) for a, b in zip(whole[0].state_dict().values(), other[0].state_dict().values()))


def test_what_makes_no_sense_is_refused():
    _, _, fixed = start(warmup_steps=3)
    with pytest.raises(RuntimeError, match="ends after 3 steps"):
        fixed.end_warmup()
    net, optimizer, wsc = start(warmup_steps=None)
    with pytest.raises(RuntimeError, match="before any step"):
        wsc.end_warmup()
    train(net, optimizer, range(2))
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="finish\\(\\) before end_warmup\\(\\)"):
        wsc.finish()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    wsc.end_warmup()
    with pytest.raises(RuntimeError, match="ends after 2 steps"):
        wsc.end_warmup()


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patience, losses, end",
    [(1, [3, 2, 2, 1], 2), (2, [3, 2, 2.5, 2.4, 1], 3), (2, [3, 3, 2, 2.1, 1.9], None), (3, [1, 2, 3, 4], 3)],
)
def test_a_plateau_is_as_many_epochs_without_a_new_least_loss(patience, losses, end):
    plateau = Plateau(patience)
    assert next((epoch for epoch, loss in enumerate(losses) if plateau.reached(loss)), None) == end


def run(settings, **keys):
    config = resolve(settings | {"epochs": 6, "milestones": [4]} | keys)
    return Run(config, load_dataset(config.dataset, "."))


def first_plateau(losses, patience):
    """Epochs until ``patience`` of them have passed without a new minimum, from the whole curve."""
    for epoch in range(len(losses) - 1):
        if int(np.argmin(losses[: epoch + 1])) <= epoch - patience:
            return epoch + 1
    return None


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_the_reset_comes_at_the_plateau_of_the_training_loss(rate, settings):
    keys = {"wsc.trigger": "training_loss", "wsc.patience": 1, "lrate": rate, "wsc.average_lr": rate}
    result = run(settings, **keys).execute()
    assert result["warmup_epochs"] == [first_plateau(losses, 1) for losses in result["train_loss"][1:]]
    if not rate:
        assert all(result["warmup_epochs"]), "without learning the loss goes up and down by augmentation alone"


@pytest.mark.slow
def test_a_task_without_a_plateau_ends_as_replay(settings):
    ours = run(settings, **{"wsc.trigger": "training_loss", "wsc.patience": 6}).execute()
    replay = run(settings, model_name="replay").execute()
    assert ours["warmup_epochs"] == [None, None]
    assert ours["train_loss"] == replay["train_loss"] and ours["matrix"] == replay["matrix"]


@pytest.mark.slow
def test_a_plateau_is_the_fixed_warmup_of_as_many_epochs(settings, monkeypatch):
    """Reset, average and learning rate after it:
    all as if the warm-up had been set to the epochs that the plateau took.
    """
    monkeypatch.setattr(Plateau, "reached", lambda self, loss: True)
    ours = run(settings, **{"wsc.trigger": "training_loss"}).execute()
    fixed = run(settings, **{"wsc.warmup": 1 / 6}).execute()
    assert ours["warmup_epochs"] == [1, 1]
    assert ours["train_loss"] == fixed["train_loss"] and ours["matrix"] == fixed["matrix"]


def test_a_plateau_needs_a_gain_of_more_than_the_least_one():
    """0.5 and 0.25 are exact: a gain of exactly ``min_delta`` is none."""
    plateau = Plateau(2, min_delta=0.25)
    assert [plateau.reached(loss) for loss in (2.0, 1.5, 1.25, 1.0, 1.0, 0.9)] == [False] * 5 + [True]


RELEASED = ROOT / "exps/paper/released_code.json"


@pytest.mark.parametrize("reset", ["blend", "none"])
def test_the_file_of_the_released_code_is_its_schedule_of_torchs_own_classes(reset, settings, monkeypatch):
    """A slow twin: replay by hand, a trim per tensor, and torch's ``SWALR`` and ``AveragedModel`` from then on."""
    released = json.loads(RELEASED.read_text())
    keys = {f"wsc.{name}": value for name, value in released["wsc"].items()} | {"wsc.reset": reset, "wsc.patience": 1}
    short = {
        "epochs": 9,
        "milestones": [1],
        "lrate_decay": 0.1,
        "lrate": 0.1,
        "memory_per_class": 4,
        "precision": "fp32",
    }
    ours, twin = (run(settings, **short, **keys).learner for _ in range(2))
    first, second, _ = ours.manager.tasks
    for learner in (ours, twin):
        learner.learn(first, SILENT)
    losses = iter([3.0, 2.0, 1.99995, 1.0, 0.5, 0.25, 0.1, 0.05])  # the third is no gain of more than 1e-4
    monkeypatch.setattr("pycil_wsc.methods.consolidation.wsc.mean_loss", lambda *_: next(losses))
    ours.learn(second, SILENT)
    assert ours.warmups == [None] * (len(ours.warmups) - 1) + [3]

    grow_for(twin, second)
    network = twin.network
    before = snapshot(network)
    held = held_out_exemplars(twin, second)
    indices = np.setdiff1d(np.concatenate([second.train_indices, twin.memory.indices]), held)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=twin.config.momentum, weight_decay=twin.config.weight_decay
    )
    first_moment = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    second_moment = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    mean = None
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    for epoch in range(9):
        network.train()
        for batch in twin.batches.of(Sampling(indices=indices), 1, 0, epoch):
            optimizer.zero_grad()
            cross_entropy(network(batch.images), batch.targets).backward()
            if mean is None:
                for name, p in network.named_parameters():
                    first_moment[name] = 0.9 * first_moment[name] + 0.1 * p.grad
                    second_moment[name] = 0.999 * second_moment[name] + 0.001 * p.grad**2
            optimizer.step()
        if epoch == 2:  # the plateau
            if reset == "blend":
                trim(network, before, first_moment, second_moment)
            mean = torch.optim.swa_utils.AveragedModel(network)
            scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_epochs=5, anneal_strategy="cos")
        if mean is not None:
            mean.update_parameters(network)
        scheduler.step()
    for name, p in mean.module.named_parameters():
        torch.testing.assert_close(dict(ours.network.named_parameters())[name], p, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def trim(network, before, first_moment, second_moment):
    """theta <- (theta + its value before the task) / 2, but for the fifth of each tensor with the highest scores."""
    for name, p in network.named_parameters():
        score = (first_moment[name].abs() * second_moment[name]).flatten()  # bias corrections are common factors
        kept = score.argsort(descending=True, stable=True)[: round(0.2 * p.numel())]
        blended = (p + before[name]) / 2
        flat = blended.flatten()
        flat[kept] = p.flatten()[kept]
        p.copy_(flat.view_as(p))


def test_held_out_exemplars_are_watched_and_never_trained_on(settings, monkeypatch):
    trained, watched = [], []
    batches, after_epoch, reached = Batches.of, BaseLearner.after_epoch, Plateau.reached

    def of(self, samples, *address):
        if address[-1] != "batch norm" and address[0]:
            trained.append((address[0], set(samples.indices.tolist())))
        return batches(self, samples, *address)

    def remember(self, task, run, epoch, loss):
        after_epoch(self, task, run, epoch, loss)
        held = self.batches.held_out
        if held is None:
            return
        targets = torch.from_numpy(self.manager.train_targets[held]).long()
        with torch.no_grad(), restored_modes(self):
            images = torch.cat([images for images, _ in self.batches.plain(held, 1000)])
            expected = cross_entropy(self.eval().predict(images).float(), targets).item()
        watched.append((task.index, held, dict(self.memory.classes), expected))

    seen = []
    monkeypatch.setattr(Batches, "of", of)
    monkeypatch.setattr(BaseLearner, "after_epoch", remember)
    monkeypatch.setattr(Plateau, "reached", lambda self, loss: seen.append(loss) or reached(self, loss))
    run(settings, **{"wsc.trigger": "held_out", "wsc.held_out": 0.5, "wsc.patience": 9, "precision": "fp32"}).execute()
    assert [task for task, *_ in watched] == [1] * 6 + [2] * 6
    assert {number for number, _ in trained} == {1, 2}
    for task, held, classes, _ in watched:
        assert all(len(np.intersect1d(held, kept)) == 2 for kept in classes.values()) and len(held) == 2 * len(classes)
        assert all(not indices & set(held.tolist()) for number, indices in trained if number == task)
    expected = [loss for task, _, _, loss in watched]
    assert np.allclose(seen, expected[:5] + expected[6:11], rtol=1e-5), "the last epoch of a task has nothing to decide"


def test_of_two_exemplars_one_is_held_out(settings):
    learner = run(settings, **{"wsc.trigger": "held_out", "memory_per_class": 2}).learner
    first, second, _ = learner.manager.tasks
    learner.learn(first, SILENT)
    assert held_out_counts(learner.config, learner.memory, second) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    "keys", [{"model_name": "gdumb", "consolidate": True}, {"budget": {"flops_like": "replay"}, "wsc.held_out": 0.5}]
)
def test_held_out_exemplars_leave_the_learners_own_samples_and_the_budget(keys, settings, monkeypatch):
    trained, batches = [], Batches.of

    def of(self, samples, *address):
        learner = self.learner
        if address[0] == 1 and address[-1] != "batch norm":
            held = held_out_exemplars(learner, learner.manager.tasks[1])
            own = learner.memory.indices
            if learner.config.model_name != "gdumb":
                own = np.concatenate([learner.manager.tasks[1].train_indices, own])
            trained.append((sorted(samples.indices), sorted(set(own) - set(held))))
        return batches(self, samples, *address)

    monkeypatch.setattr(Batches, "of", of)
    ours = run(settings, **{"wsc.trigger": "held_out", "max_tasks": 2, "precision": "fp32"} | keys)
    result = ours.execute()
    assert trained and all(indices == wanted for indices, wanted in trained)
    if "budget" in keys:
        whole = run(settings, model_name="replay", max_tasks=2, precision="fp32", prefix="replay").execute()
        assert result["train_flops"] == pytest.approx(whole["train_flops"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("trigger", ["training_loss", "held_out"])
def test_a_stopped_run_goes_on_to_the_same_numbers(trigger, settings, tmp_path):
    keys = {"wsc.trigger": trigger, "wsc.patience": 1, "lrate": 1.0, "wsc.average_lr": 0.5}
    whole = run(settings | {"out": str(tmp_path / "whole")}, **keys).execute()
    assert any(whole["warmup_epochs"])
    for stop in (6, 1, 1):  # after the second task's second, third and fourth epoch
        with killed_at(stop):
            run(settings | {"out": str(tmp_path / "stopped")}, **keys).execute()
    assert without_measurements(
        run(settings | {"out": str(tmp_path / "stopped")}, **keys).execute()
    ) == without_measurements(whole)


@pytest.mark.parametrize(
    "keys",
    [
        {"memory_per_class": 1},
        {"memory_per_class": 0},
        {"fixed_memory": False, "memory_size": 3},
        {"wsc.first_task": True},
    ],
)
def test_no_two_exemplars_of_a_class_is_one_clear_line_before_training(keys, settings, tmp_path, capsys):
    with pytest.raises(UserError, match="wsc.trigger: 'held_out' "):
        run(settings, **{"wsc.trigger": "held_out"} | keys).execute()
    assert main(["--config", write(tmp_path, settings | {"wsc.trigger": "held_out"} | keys), "--dry-run"]) == 2
    assert "wsc.trigger: 'held_out' " in capsys.readouterr().err
    assert not list(tmp_path.rglob("metrics.jsonl"))
