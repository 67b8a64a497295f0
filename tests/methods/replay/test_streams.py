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
from support.small_runs import SETTINGS, run_of, small_data, uncounted

from pycil_wsc import seeding
from pycil_wsc.data.memory.stream import NONE

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
            learner.grow_for(task)
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
        stored = learner.stored.of("logits", torch.arange(SIZE))
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
