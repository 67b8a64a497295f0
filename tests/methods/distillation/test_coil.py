"""COIL: optimal transport between classes, the rows that it moves, and when."""

import numpy as np
import pytest
import torch
from reference import transport as twin
from support.methods import BATCH, SILENT, SMALL, TARGETS, grown
from support.small_runs import assert_slopes, batch_of, killed_at

from pycil_wsc import Learner, registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.transport import transport
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner import grow_for

KEYS = {"convnet_options.width": 2, "init_milestones": [], "milestones": []}


def shares(size, total):
    return np.full(size, 1 / total)


@pytest.mark.parametrize("n, m, rows, columns", [(4, 4, 4, 4), (6, 3, 6, 6), (3, 6, 6, 6), (2, 6, 6, 6), (6, 2, 6, 2)])
def test_the_plan_is_that_of_the_slow_twin(n, m, rows, columns):
    """Sums of 1 and n / m or m / n, as in PyCIL: what is left of a third or less of the classes is nothing."""
    costs = np.random.default_rng(0).uniform(0.1, 1, (n, m))
    plan = transport(costs, shares(n, rows), shares(m, columns), 0.464)
    expected = np.array(twin.sinkhorn(costs.tolist(), [1 / rows] * n, [1 / columns] * m, 0.464))
    assert np.allclose(plan, expected, rtol=1e-6, atol=0)
    assert plan.any() == ((n, m) != (2, 6))
    if plan.any():
        assert np.allclose(plan.sum(1), 1 / rows) and np.allclose(plan.sum(0), n / rows / m)
        residue = np.log(plan) + costs / 0.464  # of the form f(row) + g(column) where the entropic cost is least
        assert np.allclose(residue - residue[:1] - residue[:, :1] + residue[0, 0], 0, atol=1e-7)


def test_the_loss_is_the_sum_written_out_and_its_gradient_is_the_slope(digits, tmp_path, monkeypatch):
    learner, _ = grown("coil", 2, digits, tmp_path, **KEYS)
    learner.double().eval()
    images, generator = BATCH.double(), torch.Generator().manual_seed(2)
    for rows in (learner.new_rows, learner.old_rows):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    learner.terms.copy_(torch.tensor([0.7, 0.4], dtype=torch.float64))
    assert learner.new_rows.shape == (3, 8) and learner.old_rows.shape == (4, 8)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # so that slopes can be measured

    @torch.no_grad()
    def expected():
        features, logits = learner.network.extract(images).tolist(), learner.network(images).tolist()
        of_images = zip(features, logits, learner.teacher(images).tolist(), TARGETS.tolist())
        rows = learner.new_rows.tolist(), learner.old_rows.tolist()
        return sum(twin.loss(*each, *rows, (0.7, 0.4)) for each in of_images) / len(images)

    loss, _ = learner.loss(batch_of(images, TARGETS))
    assert loss.item() == pytest.approx(expected(), rel=1e-10)
    loss.backward()
    names = ("head.scale", "head.weight", "backbone.stage3.0.conv2.weight", "backbone.stem.0.weight")
    assert_slopes(learner, expected, names)


def means(learner, indices, labels):
    targets = learner.manager.train_targets[indices]
    return [twin.mean(learner.outputs.features(indices[targets == label]).tolist()) for label in labels]


def moved(learner, samples, others, labels, new_labels, sums):
    """By the slow twin: the head's rows of ``labels`` as rows of ``new_labels``, by the means of their samples."""
    from_, to = means(learner, samples, labels), means(learner, others, new_labels)
    costs = [[twin.distance(one, other, 3) for other in to] for one in from_]
    marginals = ([1 / of] * len(side) for side, of in zip((from_, to), sums))
    plan = twin.sinkhorn(costs, *marginals, 0.464)
    rows = learner.network.head.weight.detach()[list(labels)].tolist()
    return torch.tensor(twin.moved(plan, rows))


def run_of(tmp_path, **keys):
    settings = SMALL | KEYS | {"model_name": "coil", "out": str(tmp_path), "images_per_class": 20, "batch_size": 16}
    config = resolve(settings | keys)
    return Run(config, Datasets().of(config))


@pytest.mark.parametrize("class_means", ["images", "exemplars"])
def test_rows_of_new_classes_are_those_of_old_ones_moved_and_scaled(class_means, tmp_path):
    run = run_of(tmp_path, class_means=class_means)
    learner, (first, task, *_) = run.learner, run.manager.tasks
    learner.learn(first, SILENT)
    grow_for(learner, task)
    learner.begin_task(task)
    samples = first.train_indices if class_means == "images" else learner.memory.indices
    rows = moved(learner, samples, task.train_indices, range(4), range(4, 7), (4, 3))
    weight = learner.network.head.weight.detach()
    expected = rows * (weight[:4].norm(dim=1).mean() / rows.norm(dim=1).mean())
    torch.testing.assert_close(weight[4:], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(learner.new_rows, weight[4:])
    assert learner.terms.tolist() == pytest.approx([1e-3, 0])


@pytest.mark.slow
@pytest.mark.parametrize("marginals, sums", [("pycil", (4, 4)), ("uniform", (3, 4))])
def test_rows_of_old_classes_are_renewed_when_they_are_due(marginals, sums, tmp_path, monkeypatch):
    """From the second epoch on: in its first step and every second one, after the forward pass of the step's batch."""
    run = run_of(tmp_path, marginals=marginals, transport_steps=2, epochs=3)
    learner, (first, task, *_) = run.learner, run.manager.tasks
    learner.learn(first, SILENT)
    renew, renewed, terms = learner.renew, [], []

    def checked():
        statistics = [buffer.clone() for buffer in learner.network.buffers()]
        assert learner.network.training
        renew()
        assert learner.network.training and not learner.teacher.training
        assert all(torch.equal(*each) for each in zip(statistics, learner.network.buffers()))
        rows = moved(learner, task.train_indices, learner.memory.indices, range(4, 7), range(4), sums)
        torch.testing.assert_close(learner.old_rows, rows, rtol=1e-4, atol=1e-6)
        learner.network.train()
        renewed.append((learner.epoch, learner.step))

    monkeypatch.setattr(learner, "renew", checked)
    after_step = learner.after_step
    monkeypatch.setattr(learner, "after_step", lambda: (terms.append(learner.terms.tolist()), after_step()))
    learner.learn(task, SILENT)
    steps = -(-(len(task.train_indices) + 40) // 16)
    assert renewed == [(epoch, step) for epoch in (1, 2) for step in range(0, steps, 2)]
    expected = [[1e-3, 0], [0, 1e-3 / 9], [0, 4e-3 / 9]]
    assert np.allclose(terms, np.repeat(expected, steps, 0))


def test_images_of_earlier_tasks_that_are_gone_are_missed_in_one_line(settings, months_of):
    learner = Learner("coil", convnet_type="tiny", epochs=1, device="cpu", quiet=True, memory_per_class=2)
    learner.learn(months_of[0])
    with pytest.raises(UserError, match="class_means: 'images' needs all images .*; set it to 'exemplars'"):
        learner.learn(months_of[1])
    assert len(learner.history) == 1


@pytest.fixture
def months_of(settings):
    """The images of two classes, then those of two others: arrays."""
    with np.load(settings["dataset"].removeprefix("npz:")) as arrays:
        images, names = arrays["train_x"], np.array([f"class {label}" for label in arrays["train_y"]])
    return [(images[:24], names[:24]), (images[24:48], names[24:48])]


def test_a_regularisation_that_is_too_small_is_refused_in_one_line(tmp_path):
    run = run_of(tmp_path, sinkhorn=1e-5)
    run.learner.learn(run.manager.tasks[0], SILENT)
    with pytest.raises(UserError, match="sinkhorn: the transport plan underflows to 0 at this value; use a larger one"):
        run.learner.learn(run.manager.tasks[1], SILENT)


@pytest.mark.slow
def test_a_resumed_task_has_no_need_of_the_transport_at_its_beginning(settings, monkeypatch):
    """Its weights are others by now, and the plan between them may underflow."""
    keys = {"model_name": "coil", "class_means": "exemplars", "max_tasks": 2}
    config = resolve(settings | keys)
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 0, "epoch": 1}):
        Run(config, Datasets().of(config)).execute()

    def underflows(learner, task):
        raise UserError("sinkhorn: the transport plan underflows to 0")

    monkeypatch.setattr(registry.learners["coil"], "images_before", underflows)
    result = Run(config, Datasets().of(config)).execute()
    monkeypatch.undo()
    whole = resolve(settings | keys | {"prefix": "whole"})
    assert result["curve"] == Run(whole, Datasets().of(whole)).execute()["curve"]
