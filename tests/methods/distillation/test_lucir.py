"""LUCIR as Mammoth has it: cosine logits, distilled features, a ranking loss, imprinted prototypes, a second phase."""

import numpy as np
import pytest
import torch
from reference import lucir as twin
from support.methods import BATCH, SILENT, SMALL, grown, moved, snapshot
from support.small_runs import assert_slopes, batch_of, killed_at, without_measurements

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.memory.exemplar_selection import nearest_to_mean
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Sampling

KEYS = {"convnet_type": "resnet8", "convnet_options.width": 2, "milestones": [], "init_milestones": []}


def prototypes(head):
    return torch.cat([head.old, head.weight, head.coming]).tolist()


def twins_loss(learner, images, targets, lamda, **options):
    with torch.no_grad():
        now = learner.network.extract(images).tolist()
        before = learner.teacher.extract(images).tolist() if learner.teacher else [None] * len(images)
    head = learner.network.head
    pairs = list(zip(now, before))
    return twin.loss(pairs, prototypes(head), targets.tolist(), learner.num_old, head.scale.item(), lamda, **options)


@pytest.mark.parametrize("tasks, targets", [(1, [0, 1, 2, 3, 1, 0]), (2, [0, 6, 2, 3, 5, 4]), (3, [0, 9, 7, 3, 5, 8])])
def test_the_loss_is_mammoths_written_out_and_its_gradient_is_the_slope(tasks, targets, digits, tmp_path, monkeypatch):
    """The second task has classes to come; the third is the first whose distillation has a weight."""
    learner, _ = grown("lucir", tasks, digits, tmp_path, **KEYS)
    learner.double().eval()
    images, targets = BATCH.double(), torch.tensor(targets)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # so that slopes can be measured
    lamda = twin.lamda(tasks - 1) if tasks > 1 else 0.0
    loss, logits = learner.loss(batch_of(images, targets))
    assert loss.item() == pytest.approx(twins_loss(learner, images, targets, lamda), rel=1e-10)
    assert logits.shape == (6, 10), "prototypes of classes to come compete"
    loss.backward()
    names = ("head.scale", "head.weight", "backbone.stage3.0.conv2.weight", "backbone.stem.0.weight")
    assert_slopes(learner, lambda: twins_loss(learner, images, targets, lamda), names)
    assert learner.network.head.old.grad is None and learner.network.head.coming.grad is None


def test_the_weight_of_the_distillation_is_zero_in_the_second_task_and_the_papers_on_request(digits, tmp_path):
    learner, _ = grown("lucir", 2, digits, tmp_path, **KEYS)
    assert learner.lamda() == 0
    learner, _ = grown("lucir", 3, digits, tmp_path, **KEYS, lamda_rule="paper")
    assert learner.lamda() == pytest.approx(5 * (7 / 3) ** 0.5)


def test_options_of_the_ranking_loss(digits, tmp_path):
    options = {"lamda_mr": 2.0, "k_mr": 1, "mr_margin": 1.5}
    learner, _ = grown("lucir", 2, digits, tmp_path, **KEYS, **options)
    learner.eval()
    targets = torch.tensor([0, 6, 2, 3, 5, 4])
    loss, _ = learner.loss(batch_of(BATCH, targets))
    expected = twins_loss(learner, BATCH, targets, 0.0, lamda_mr=2.0, k=1, margin=1.5)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_classes_to_come_only_those_seen_compete(digits, tmp_path):
    learner, _ = grown("lucir", 2, digits, tmp_path, **KEYS, head="seen")
    assert learner.network.head.out_features == 7
    learner, _ = grown("lucir", 2, digits, tmp_path, **KEYS)
    learner.eval()
    assert learner.predict(BATCH).shape == (6, 7), "an answer is one of the classes seen"


def test_new_prototypes_are_imprinted_from_augmented_images(digits, tmp_path):
    learner, tasks = grown("lucir", 2, digits, tmp_path, **KEYS)
    learner.begin_task(tasks[1])
    head = learner.network.head
    batches = [*learner.batches.of(Sampling(indices=tasks[1].train_indices, mixed=False), 1, "imprint")]
    images, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("images", "targets"))
    with torch.no_grad():
        features = learner.network.eval().extract(images)
    for row, label in enumerate((4, 5, 6)):
        expected = twin.imprinted(features[targets == label].tolist(), head.old.tolist())
        assert head.weight[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """A learner that has learned two tasks of the digits, and what each phase began with."""
    keys = {"model_name": "lucir", "out": str(tmp_path_factory.mktemp("runs")), "memory_per_class": 9, "ft_epochs": 3}
    run = Run(resolve(SMALL | KEYS | keys | {"batch_size": 16}), load_dataset("digits", "."))
    learner, seen = run.learner, []

    def started(task, run):
        rates = [run.lr(step / run.batches) for step in range(run.steps)]
        seen.append((run.phase.indices, rates, run.by_step, snapshot(learner.network)))

    monitor = type("Monitor", (), dict(vars(SILENT)) | {"phase_started": staticmethod(started)})
    for task in run.manager.tasks[:2]:
        learner.learn(task, monitor)
    return run, seen


@pytest.mark.slow
def test_the_second_phase_trains_the_newest_prototypes_on_the_exemplars_of_the_task_that_ends(phases):
    run, (_, first, _, second) = phases
    learner = run.learner
    assert sorted(second[0]) == sorted(learner.memory.indices), "those that are chosen afterwards"
    assert len(first[0]) == 36
    assert moved(learner.network, second[3]) == ["head.scale", "head.weight"]


def test_its_rate_falls_after_ten_batches_as_mammoths(phases):
    _, (_, _, _, (indices, rates, by_step, _)) = phases
    assert len(indices) == 63 and len(rates) == 12 and by_step
    assert rates == pytest.approx([0.01] * 10 + [0.001] * 2)


def test_exemplars_are_herded_by_features_that_are_not_normalised(phases):
    run, _ = phases
    learner, task = run.learner, run.manager.tasks[1]
    targets = run.manager.train_targets
    for label in (4, 5, 6):
        candidates = task.train_indices[targets[task.train_indices] == label]
        features = learner.outputs.features(candidates).astype(np.float64)
        total, expected = np.zeros(features.shape[1]), []
        for number in range(1, 10):
            distances = np.linalg.norm(features.mean(0) - (features + total) / number, axis=1)
            distances[expected] = np.inf
            expected.append(int(distances.argmin()))
            total += features[expected[-1]]
        assert learner.memory.classes[label].tolist() == candidates[expected].tolist()
        assert nearest_to_mean(features / np.abs(features).sum(), 9).tolist() == expected


@pytest.mark.slow
def test_a_run_stopped_in_the_second_phase_ends_like_one_never_stopped(settings, undrawn):
    settings |= KEYS | {"model_name": "lucir", "ft_epochs": 3, "checkpoint_seconds": 0, "max_tasks": 2}
    data = load_dataset(settings["dataset"], ".")
    expected = Run(resolve(settings | {"prefix": "whole"}), data).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 1, "epoch": 2}):
        Run(resolve(settings), data).execute()
    result = Run(resolve(settings), data).execute()
    different = {name for name, value in without_measurements(expected).items() if value != result[name]}
    assert different <= {"config"}
