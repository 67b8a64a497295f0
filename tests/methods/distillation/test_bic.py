"""BiC's bias correction, and the images that it holds out. The loss is tested in ``test_distilling.py``."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.methods import (
    BATCH,
    SILENT,
    SMALL,
    TARGETS,
    after,
    grown,
    images,
    moved,
    negative_log_likelihood,
    snapshot,
)
from support.small_runs import batch_of

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split
from pycil_wsc.runs.run import Run
from pycil_wsc.training import budget, loop
from pycil_wsc.training.learner import grow_for


def test_bics_second_phase_changes_the_newest_logits_alone(digits, tmp_path):
    learner, tasks = after("bic", 2, digits, tmp_path)
    task = tasks[2]
    grow_for(learner, task)
    _, correction = learner.phases(task)
    before = snapshot(learner.network)
    with torch.no_grad():
        features = learner.network.extract(images())
        old = learner.network.classify(features)
    loop.fit(learner, task, budget.planned(learner, task, 1, correction), SILENT)
    changed = [name for name in moved(learner.network, before) if "running" not in name and "num_batches" not in name]
    assert changed == ["corrections.2"], (
        "batch norm's statistics drift, as in PyCIL; of the weights only the newest pair moves"
    )
    with torch.no_grad():
        new = learner.network.classify(features)
    assert torch.equal(new[:, :7], old[:, :7]) and not torch.equal(new[:, 7:], old[:, 7:])
    scale, shift = learner.network.corrections[2].detach()
    torch.testing.assert_close(new[:, 7:], scale * old[:, 7:] + shift)


def test_bics_correction_loss_is_cross_entropy_of_the_softmax_of_corrected_logits(digits, tmp_path):
    """The softmax is applied twice, as in PyCIL."""
    learner, _ = grown("bic", 2, digits, tmp_path)
    learner.eval()
    network = learner.network
    loss, logits = learner.correction_loss(batch_of(BATCH, TARGETS))
    raw = network.head(network.backbone(BATCH)).split([4, 3], 1)
    parts = [scale * part + shift for part, (scale, shift) in zip(raw, network.corrections, strict=True)]
    torch.testing.assert_close(logits, torch.cat(parts, 1))
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    torch.testing.assert_close(loss, negative_log_likelihood(probabilities, TARGETS))
    loss.backward()
    assert all(parameter.grad is None for parameter in network.backbone.parameters())
    assert network.corrections[1].grad.all()


def test_bics_correction_sees_as_many_images_of_each_class_whatever_the_replay_ratio(digits, tmp_path):
    learner, tasks = after("bic", 1, digits, tmp_path, replay_ratio=0.9, memory_per_class=20, memory_size=200)
    seen = {"train": [], "bias correction": []}
    phases = learner.phases

    def watched(task):
        for phase in phases(task):
            loss, name = phase.loss, phase.name
            yield replace(phase, loss=lambda batch: seen[name].append(batch.targets) or loss(batch))

    learner.phases = watched
    learner.learn(tasks[1], SILENT)
    mixed, balanced = (torch.bincount(torch.cat(targets)) for targets in seen.values())
    assert len(set(balanced.tolist())) == 1 and balanced[0] > 0 and len(set(mixed.tolist())) > 1


def hundred_classes():
    """CIFAR-100's numbers, with images of a pixel."""
    info = DatasetInfo("hundred", tuple(map(str, range(100))), 1, (0.5,) * 3, (0.5,) * 3, "pad", 0, False, 0.0)
    split = Split(np.zeros((50_000, 1, 1, 3), np.uint8), np.repeat(np.arange(100), 500))
    return Dataset(info, split, split)


@pytest.mark.parametrize(
    "keys, sizes",
    [
        ({"memory_per_class": 20}, [20, 10, 6, 5, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 500}, [20, 10, 6, 5, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 200, "validation": "per_class"}, [20] * 9),
        ({"memory_per_class": "all", "validation": "per_class"}, [50] * 9),
        ({"memory_per_class": 4, "validation": "per_class"}, [1] * 9),
        ({"memory_per_class": 2, "validation": "per_class"}, [1] * 9),
        ({"memory_per_class": 1, "validation": "per_class"}, [0] * 9),
        ({"memory_per_class": 4}, [4, 4, 4, 4, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 0}, [0] * 9),
    ],
)
def test_bic_holds_out_as_pycil_does_and_no_more_than_there_is(keys, sizes, tmp_path):
    ten_tasks = {"init_cls": 10, "increment": 10, "exemplars": "random", "device": "cpu"}
    run = Run(resolve(SMALL | ten_tasks | {"model_name": "bic", "out": str(tmp_path)} | keys), hundred_classes())
    learner = run.learner
    targets = run.manager.train_targets
    held_out_per_class = []
    for task in run.manager.tasks:
        held_out = learner.validation_samples(task)
        counts = np.bincount(targets[held_out], minlength=task.num_seen)
        assert len(set(held_out)) == len(held_out) and (counts == counts[0]).all()
        assert set(held_out) <= set(learner.batches.indices(task))
        held_out_per_class.append(int(counts[0]))
        learner.memory.update(task, targets, None, np.random.default_rng(0))
    assert held_out_per_class == [0, *sizes]
