"""Methods with a memory that each step fills, beside Mammoth's arithmetic (``reference/mammoth.py``): at equal weights
and draws, whole trainings of two tasks are equal to rounding."""

import copy
import functools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from reference import mammoth
from support.methods import SILENT
from support.small_runs import SETTINGS, killed_at, run_of, small_data, uncounted, without_measurements

from pycil_wsc import seeding
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.memory.stream_memory import NONE
from pycil_wsc.data.tasks.tasks import blurred
from pycil_wsc.training.learner import grow_for

SIZE = 10
RATE = {"momentum": 0.9, "weight_decay": 1e-3}
KEYS = {"memory_size": SIZE, "replay_batch_size": 5, "batch_size": 3, "precision": "fp32"}
KEYS |= {"init_epoch": 2, "epochs": 2, "init_lr": 0.05, "lrate": 0.05, "init_milestones": [], "milestones": []}
KEYS |= {"momentum": 0.9, "weight_decay": 1e-3, "init_weight_decay": 1e-3, "convnet_options.width": 4}
CLS_ER = {"consistency": 0.5, "plastic_rate": 0.9, "stable_rate": 0.5, "plastic_decay": 0.8, "stable_decay": 0.9}
METHODS = {
    "er": (mammoth.Er, {}),
    "dark_er": (mammoth.Der, {"alpha": 0.3}),
    "derpp": (mammoth.Derpp, {"alpha": 0.3, "beta": 0.7}),
    "er_ace": (mammoth.ErAce, {}),
    "cls_er": (mammoth.ClsEr, CLS_ER),
}
MISTAKES = {
    "er": ["two means", "two passes"],
    "dark_er": ["stores after the step", "sums over classes"],
    "derpp": ["one draw"],
    "er_ace": ["newer classes masked", "first task masked"],
    "cls_er": ["evaluation mode", "sees them once", "statistics averaged"],
}


@functools.cache
def trained(name, folder):
    """The network before, the batches of each task, and the learner after two tasks."""
    _, options = METHODS[name]
    data = small_data(folder / "data.npz", per_class=6)
    settings = SETTINGS | KEYS | options | {"dataset": f"npz:{data}", "out": str(folder), "model_name": name}
    run = run_of(settings)
    learner = run.learner
    before, batches = None, []
    plain = learner.before_step

    def noted(batch):
        batches[-1].append(plain(batch))
        return batches[-1][-1]

    with uncounted(), patch.object(learner, "before_step", noted):
        for task in run.manager.tasks[:2]:  # of three: there are logits of classes to come
            grow_for(learner, task)
            before = before or copy.deepcopy(learner.network)
            batches.append([])
            learner.learn(task, SILENT)
    return before, batches, learner


def twin_of(name, folder, mistakes=()):
    """The twin after the same steps; it looks up itself what is in the slots."""
    kind, options = METHODS[name]
    before, batches, learner = trained(name, folder)
    twin = kind(copy.deepcopy(before), SIZE, mistakes, **options)
    steps = 0
    for of_task in batches:
        twin.begin_task(lr=0.05, **RATE)
        for batch in of_task:
            steps += 1
            replays = []
            for each in batch.replay:
                slots = each.slots.tolist()
                assert twin.samples_of(slots) == each.indices.tolist() and len(set(slots)) == len(slots)
                assert len(slots) == min(5, twin.buffer.seen)
                replays.append((each.images, slots))
            drawn = np.where(batch.entering.places == NONE, SIZE, batch.entering.places).tolist()
            coins = np.random.default_rng(seeding.derived_seed(1993, "averages", steps)).random(2)
            twin.observe(batch.images, batch.targets, batch.indices.tolist(), replays, drawn, coins)
    return twin


def difference(name, folder, mistakes=()):
    """The largest one of any weight, statistic or stored logit after two tasks."""
    twin = twin_of(name, folder, mistakes)
    learner = trained(name, folder)[2]
    pairs = [(learner.network, twin.network)]
    if name == "cls_er":  # the tested network has the weights of the stable average
        pairs = [(learner.network, twin.stable), (learner.plastic, twin.plastic), (learner.stable, twin.stable)]
    largest = 0.0
    for ours, theirs in pairs:
        for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            if mine.is_floating_point():
                largest = max(largest, (mine - other).abs().max().item())
    assert learner.memory.slots.tolist() == [twin.buffer.content[slot][0] for slot in range(SIZE)]
    if twin.stores_logits:
        stored = learner.memory.stored.of("logits", torch.arange(SIZE))
        largest = max(largest, (stored - twin.logits_of(range(SIZE))).abs().max().item())
    return largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streams")


@pytest.mark.parametrize("name", METHODS)
def test_two_tasks_are_mammoths_at_equal_draws(name, folder):
    largest = difference(name, folder)
    print(f"{name}: {largest:.1e}")
    assert largest < 1e-5


@pytest.mark.parametrize("name, mistake", [(name, each) for name, some in MISTAKES.items() for each in some])
def test_the_comparison_notices_a_slip(name, mistake, folder):
    assert difference(name, folder, (mistake,)) > 1e-3


# ---- protocols -------------------------------------------------------------------------------------------------------

ONLINE = {"model_name": "er", "online": True, "batch_size": 5, "memory_size": 8, "precision": "fp32"}


def executed(settings, **keys):
    run = run_of(settings | {"init_epoch": 1, "epochs": 1} | ONLINE | keys)
    return run, run.execute()


def test_names_are_understood_as_they_are_spelled():
    assert [resolve({"model_name": name}).model_name for name in ("der++", "ER-ACE", "cls-er")] == [
        "derpp",
        "er_ace",
        "cls_er",
    ]


def test_one_pass_shows_each_image_once_in_small_batches_at_a_constant_rate(settings):
    config = resolve({"model_name": "er", "online": True})
    assert (config.batch_size, config.init_epoch, config.epochs, config.momentum) == (10, 1, 1, 0)
    assert not config.milestones and not config.weight_decay
    run = run_of(settings | {"init_epoch": 1, "epochs": 1} | ONLINE)
    shown, tested = [], []
    before_step, classify = run.learner.before_step, run.learner.classify

    def noted(batch):
        shown.extend(batch.indices.tolist())
        return before_step(batch)

    def classified(features):
        tested.append(len(features))
        return classify(features)

    with patch.object(run.learner, "before_step", noted), patch.object(run.learner, "classify", classified):
        result = run.execute()
    assert tested == [len(task.test_indices) for task in run.manager.tasks], "in one batch, unlike the training images"
    assert sorted(shown) == list(range(72))
    assert result["images_trained"] == 72 + 4 * 5 + 2 * 5 * 5, "and five exemplars in each step but the first"


def test_the_memory_may_be_replayed_several_times_a_step(settings):
    _, result = executed(settings, steps_per_batch=3)
    assert result["images_trained"] == 3 * (72 + 4 * 5 + 2 * 5 * 5)


@pytest.mark.slow
def test_tests_within_a_task_change_nothing_and_their_mean_is_the_area_under_the_curve(settings):
    run, plain = executed(settings, prefix="plain")
    other, result = executed(settings, evaluate_every=5)  # each task has five steps
    for ours, theirs in zip(run.learner.parameters(), other.learner.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert plain["anytime_auc"] is None and plain["anytime_curve"] is None
    assert result["anytime_curve"] == [[5 * (task + 1), accuracy] for task, accuracy in enumerate(plain["curve"])]
    assert result["anytime_auc"] == pytest.approx(np.mean(plain["curve"]))
    finer = executed(settings, evaluate_every=2, prefix="finer")[1]["anytime_curve"]
    assert [steps for steps, _ in finer] == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.slow
def test_a_stream_that_was_killed_ends_like_an_undisturbed_one(settings):
    keys = {"model_name": "derpp", "evaluate_every": 2, "online": False, "init_epoch": 2, "epochs": 2}
    _, expected = executed(settings, **keys, prefix="whole")
    for checkpoint in (1, 3):
        with killed_at(checkpoint):
            executed(settings, **keys, prefix=f"killed{checkpoint}")
        _, result = executed(settings, **keys, prefix=f"killed{checkpoint}")
        assert without_measurements(result) == without_measurements(expected) | {"config": result["config"]}


def test_blurry_tasks_give_a_share_of_their_images_to_each_other_in_equal_parts():
    tasks = np.repeat([0, 1, 2], [20, 30, 40])
    changed = blurred(tasks, 0.2, 7)
    moves = {(task, other): ((tasks == task) & (changed == other)).sum() for task in range(3) for other in range(3)}
    assert [moves[task, task] for task in range(3)] == [16, 24, 32]
    assert sorted([moves[0, 1], moves[0, 2]]) == [2, 2] and sorted([moves[2, 0], moves[2, 1]]) == [4, 4]
    assert not (blurred(tasks, 0.2, 8) == changed).all() and (blurred(tasks, 0.0, 7) == tasks).all()


def test_a_method_that_needs_no_task_learns_blurry_ones_and_is_tested_on_the_classes_so_far(settings):
    run, result = executed(settings, blurry=0.25)
    first = run.manager.tasks[0]
    labels = run.manager.train_targets[first.train_indices]
    assert (labels < 2).sum() == 18 and (labels >= 2).sum() == 6
    assert set(run.manager.test_targets[first.test_indices].tolist()) == {0, 1}
    assert len(result["curve"]) == 3 and run.learner.network.head.out_features == 6


def test_the_consolidation_works_on_a_stream(settings):
    keys = {"wsc.warmup": 0.5, "wsc.average_every": 0.2, "consolidate": True}
    _, result = executed(settings, **keys)
    _, plain = executed(settings)
    assert result["train_loss"][0] == plain["train_loss"][0] and result["curve"][1:] != plain["curve"][1:]
