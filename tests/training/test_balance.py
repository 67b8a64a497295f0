"""Classes of unequal size: balanced batches, weights in the loss, and what is kept in the memory."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.months import NAMES, month
from support.small_runs import SETTINGS, executed, killed_at, run_of, suited
from torch.nn.functional import cross_entropy

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.epoch_order import epoch_order, mixed_order
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.subset import long_tailed
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.training.batches import Sampling, class_weights
from pycil_wsc.training.learner import grow_for

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


def is_trained(plan):
    """Whether a method trains on batches of a task, rather than of a stream."""
    return plan.epoch_keys and "task" in plan.memory_updates


TRAINED = sorted({name for name, learner in registry.learners.items() if is_trained(learner.Plan)} | {"acil"})
LABELS = np.repeat([0, 1, 2], [60, 5, 2])
INDICES = np.arange(67)


# ---- the long tail ---------------------------------------------------------------------------------------------------


def test_a_long_tail_has_the_exponential_profile_of_the_field(source):
    """As `int(number * (1 / factor) ** (k / (C - 1)))` of Cui et al.; a longer tail has a part of its images."""
    whole = load_dataset(source, ".")
    tails = [long_tailed(whole, factor, 1).train for factor in (10, 4)]
    expected = [int(12 * 0.1 ** (k / 5)) for k in range(5)] + [1]
    assert np.bincount(tails[0].targets).tolist() == expected == [12, 7, 4, 3, 1, 1]
    longer, shorter = ({image.tobytes() for image in tail.images} for tail in tails)
    assert longer <= shorter


@pytest.mark.parametrize("value", [0.5, "fifty", True])
def test_a_factor_that_is_none_is_one_line(value):
    with pytest.raises(UserError, match="^imbalance: ") as error:
        resolve(SETTINGS | {"imbalance": value})
    assert "\n" not in str(error.value)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_balanced_epoch_is_as_long_with_equally_many_of_each_class_and_each_image_equally_often():
    order = epoch_order(INDICES, True, 7, LABELS)
    assert len(order) == 67 and sorted(np.bincount(LABELS[order]).tolist()) == [22, 22, 23]
    for label in range(3):
        times = np.bincount(order, minlength=67)[LABELS == label]
        assert times.max() - times.min() <= 1
    assert np.array_equal(order, epoch_order(INDICES, True, 7, LABELS))
    assert not np.array_equal(order, epoch_order(INDICES, True, 8, LABELS))


def test_balanced_batches_of_a_replay_ratio_are_balanced_on_either_side():
    order = mixed_order(INDICES[:60], INDICES[60:], 0.5, 10, 3, LABELS)
    counts = np.bincount(LABELS[order])
    assert counts[0] == sum(order < 60) and abs(counts[1] - counts[2]) <= 1
    for start in range(0, 60, 10):
        assert sum(order[start : start + 10] < 60) == 5


def test_of_equal_classes_each_image_is_drawn_once():
    labels = np.repeat([0, 1], 6)
    assert sorted(epoch_order(np.arange(12), True, 0, labels)) == list(range(12))


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_inverse_to_class_sizes_and_their_mean_over_the_images_is_1():
    counts = np.array([60.0, 5, 0, 2])
    weights = class_weights(counts)
    assert weights[2] == 1 and (weights * counts)[[0, 1, 3]] == pytest.approx(67 / 3)
    assert (weights * counts).sum() / counts.sum() == pytest.approx(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Six classes of 12 images, as an npz file."""
    return month(tmp_path_factory.mktemp("images") / "six.npz", NAMES, 0, per_class=12)


@pytest.fixture
def settings(source, tmp_path):
    keys = {"dataset": source, "out": str(tmp_path), "model_name": "replay", "init_epoch": 1, "epochs": 1}
    return SETTINGS | keys | {"precision": "fp32", "max_tasks": 2, "imbalance": 4}


def test_the_loss_is_the_mean_of_weighted_errors(settings):
    run = run_of(settings, class_balance="weights", label_smoothing=0.1)
    learner, task = run.learner, run.manager.tasks[0]
    grow_for(learner, task)
    phase = Sampling(indices=task.train_indices)
    table = learner.batches.class_weights(phase, 0)
    targets = run.manager.train_targets[task.train_indices]
    counts = np.bincount(targets, minlength=len(table))
    assert table.tolist() == pytest.approx(class_weights(counts).tolist())
    (batch, *_) = learner.batches.of(phase, 0, 0, 0)
    learner.eval()
    learner.over.weights.begin(table)
    with learner.over.weights.within(batch):
        loss, logits = learner.loss(batch)
    rows = zip(logits.double(), batch.targets.tolist())
    errors = [table[y].double() * cross_entropy(z[None], torch.tensor([y]), label_smoothing=0.1) for z, y in rows]
    assert loss.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)
    assert learner.loss(batch)[0].item() != pytest.approx(loss.item(), rel=1e-3), "outside of a step there are none"


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_that_trains_uses_the_weights_in_its_loss(name, settings):
    """Of one class another weight: the loss of a batch of the first task changes."""
    own = suited(name)
    if name == "coil":
        own = own | {"class_means": "exemplars"}
    if name in ("derpp", "er_ace", "cls_er"):
        own = own | {"memory_update": "task"}
    if name == "beef":  # the images that it draws round differently in a smaller network
        own = own | {"convnet_type": "wider"}
    run = run_of(settings, **{"model_name": name, "class_balance": "weights"} | own)
    learner, task = run.learner, run.manager.tasks[0]
    grow_for(learner, task)
    if learner.plan.chooses_first:
        learner._choose_exemplars(task)
    learner.begin_task(task)
    phase = next(iter(learner.phases(task)))
    (drawn, *_) = learner.batches.of(phase, 0, 0, 0)
    batch = learner.before_step(drawn)
    loss = phase.loss
    learner.eval()
    table = torch.ones(10)
    values = []
    for weight in (1.0, 1.0, 3.0):
        table[batch.targets[0]] = weight
        learner.over.weights.begin(table)
        torch.manual_seed(0)
        with learner.over.weights.within(batch), learner.precision.autocast():
            values.append(loss(batch)[0].item())
    assert values[0] == pytest.approx(values[1], rel=1e-6) and values[2] != pytest.approx(values[0], rel=1e-4)
    assert learner.over.weights.used


def deaf(self, batch):
    logits = self.network(batch.images)
    return cross_entropy(logits.float(), batch.targets), logits


def test_a_loss_that_ignores_the_weights_is_refused_in_its_first_step(settings):
    run = run_of(settings, class_balance="weights")
    with patch.object(type(run.learner), "loss", deaf), pytest.raises(UnusableRun) as error:
        run.execute()
    assert str(error.value).startswith("class_balance: the loss of 'replay' does not use the images' weights; compute")


@pytest.mark.parametrize("balance", ["sampler", "weights"])
def test_a_phase_on_drawn_features_knows_their_classes(balance, settings):
    keys = suited("mos") | {"ca_storage_efficient_method": "variance"}
    run = run_of(settings, **{"model_name": "mos", "class_balance": balance} | keys)
    learner, task = run.learner, run.manager.tasks[1]
    grow_for(learner, task)
    phase = learner.alignment(task)
    table = learner.batches.class_weights(phase, 1)
    assert table is None or set(table[:4].tolist()) == {1.0}
    order, _ = learner.batches._order(phase, 8, 1, 0, 0)
    assert len(order) == len(phase.indices) and set(phase.targets[order].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("balance", ["sampler", "weights"])
def test_a_balanced_run_resumes_to_the_bit(balance, settings, tmp_path):
    keys = settings | {"class_balance": balance, "init_epoch": 2}
    whole, result = executed(keys | {"out": str(tmp_path / "whole")})
    with killed_at(1):
        executed(keys)
    folder, again = executed(keys)
    assert result["train_loss"] == again["train_loss"] and result["curve"] == again["curve"]


# ---- what is kept ----------------------------------------------------------------------------------------------------


def kept_of(sizes, capacity, seed=0, tasks=1):
    """Class -> the samples that are kept of classes of these sizes, which come in ``tasks`` parts."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    memory = ExemplarMemory(False, 0, capacity, "balanced")
    parts = np.array_split(np.random.default_rng(seed).permutation(len(labels)), tasks)
    for index, part in enumerate(parts):
        task = Task(index, len(sizes) * min(index, 1), len(sizes), np.sort(part), part[:0])
        memory.update(task, labels, None, np.random.default_rng([seed, index]))
    assert all(set(labels[kept].tolist()) <= {label} for label, kept in memory.classes.items())
    return memory.classes


@pytest.mark.parametrize("tasks", [1, 4])
def test_small_classes_are_kept_whole_and_the_others_share_what_is_left(tasks):
    kept = kept_of([400, 3, 200, 9], 40, tasks=tasks)
    assert [len(kept[label]) for label in range(4)] == [14, 3, 14, 9]


def test_of_a_large_class_a_uniform_sample_is_kept():
    """The mean number of a kept image of 300 is that of the middle, over 60 draws."""
    numbers = np.concatenate([kept_of([300, 30], 20, seed, tasks=2)[0] for seed in range(60)])
    assert abs(numbers.mean() - 149.5) < 4 * 300 / np.sqrt(12 * len(numbers))


def test_all_are_kept_while_there_is_room():
    assert [len(kept) for kept in kept_of([6, 2], 10).values()] == [6, 2]


def test_a_run_keeps_a_balanced_reservoir_of_a_long_tail(settings):
    run = run_of(settings, exemplars="balanced", fixed_memory=False, memory_size=20, class_balance="sampler")
    run.execute()
    counts = [len(kept) for kept in run.learner.memory.classes.values()]
    sizes = np.bincount(run.manager.train_targets)[: len(counts)]
    assert sum(counts) == 20
    assert all(count == size or count >= max(counts) - 1 for count, size in zip(counts, sizes, strict=True))


def test_the_accuracy_on_each_class_and_on_the_weakest_tenth_is_in_the_result(settings):
    run = run_of(settings, save_weights=True)
    result = run.execute()
    confusion = np.array(result["confusion"] or np.zeros((4, 4)))
    assert len(result["class_accuracies"]) == 4
    assert np.mean(result["class_accuracies"]) == pytest.approx(result["last_acc"]), "the test has as many of each"
    assert result["weakest_tenth"] == min(result["class_accuracies"]) and len(confusion) == 4
