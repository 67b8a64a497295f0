"""GEM: gradients projected so that no step increases the loss of an earlier task, to first order."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.methods import SILENT, SMALL
from support.small_runs import Tiny
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.methods.replay.gem import projected
from pycil_wsc.runs.run import Run


def nearest(gradients):
    """By trying every set of constraints that hold with equality (Karush, Kuhn and Tucker): one fits."""
    *others, g = gradients.astype(float)
    for number in range(len(others) + 1):
        for active in itertools.combinations(range(len(others)), number):
            rows = np.array([others[each] for each in active]).reshape(number, len(g))
            weights = -np.linalg.solve(rows @ rows.T, rows @ g) if number else np.empty(0)
            found = g + weights @ rows
            if (weights >= -1e-9).all() and all(other @ found >= -1e-9 for other in others):
                return found
    raise AssertionError("no set of constraints fits")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_projection_solves_the_quadratic_program(count):
    rng = np.random.default_rng(count)
    changed = 0
    for _ in range(30):
        gradients = rng.normal(size=(count + 1, 8)).astype(np.float32)
        found = projected(torch.from_numpy(gradients)).numpy()
        assert np.allclose(found, nearest(gradients), atol=1e-5)
        changed += not np.array_equal(found, gradients[-1])
    assert changed > 10


def test_equal_and_opposed_gradients_have_a_projection_too():
    """There the products of the gradients are a singular matrix."""
    g = torch.tensor([1.0, 2.0])
    assert torch.allclose(projected(torch.stack([-g, -g, g])), torch.zeros(2), atol=1e-6)
    kept = projected(torch.tensor([[-1.0, 0.0], [-1.0, 0.0], [1.0, 2.0]]))
    assert torch.allclose(kept, torch.tensor([0.0, 2.0]), atol=1e-6)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """The run, and each step of its third task: [state before, batch, gradients, state after]."""
    keys = {"model_name": "gem", "out": str(tmp_path_factory.mktemp("runs")), "milestones": [], "lrate": 0.05}
    run = Run(resolve(SMALL | keys), load_dataset("digits", "."))
    learner, seen = run.learner, []
    for task in run.manager.tasks[:2]:
        learner.learn(task, SILENT)
    after_backward, after_step = learner.after_backward, learner.after_step
    start = {}

    def backward_done(batch, backward):
        after_backward(batch, backward)
        gradients = [parameter.grad.clone() for parameter in learner.network.parameters()]
        seen.append([start.pop("state"), batch, gradients])

    def stepped():
        seen[-1].append(copied(learner.network))
        start["state"] = seen[-1][-1]
        after_step()

    learner.after_backward, learner.after_step = backward_done, stepped
    monitor = SimpleNamespace(
        **vars(SILENT) | {"phase_started": lambda *_: start.update(state=copied(learner.network))}
    )
    learner.learn(run.manager.tasks[2], monitor)
    return run, seen


def copied(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def gradient(network, images, targets, first, end):
    """Of the cross-entropy over the classes from ``first`` to ``end``, all others masked as in PyCIL."""
    network.zero_grad()
    logits = network(images)
    masked = torch.full_like(logits, -10e10)
    masked[:, first:end] = logits[:, first:end]
    cross_entropy(masked, targets).backward()
    return np.concatenate([parameter.grad.flatten().numpy() for parameter in network.parameters()])


@pytest.mark.slow
def test_a_step_is_the_projected_one_and_batch_norm_sees_the_exemplars_first(stepped):
    run, seen = stepped
    network = run.learner.network.train()
    bounds, projections = run.manager.boundaries, 0
    for before, batch, gradients, after in seen:
        network.load_state_dict(before)
        wanted = []
        for (reference, _), (first, end) in zip(run.learner.references, itertools.pairwise(bounds[:3]), strict=True):
            held = [len(run.learner.memory.classes[label]) for label in range(first, end)]
            assert torch.bincount(reference.targets)[first:end].tolist() == [10] * (end - first) == held
            wanted.append(gradient(network, reference.images, reference.targets, first, end))
        wanted.append(gradient(network, batch.images, batch.targets, bounds[2], bounds[3]))
        expected = nearest(np.stack(wanted))
        found = np.concatenate([each.flatten().numpy() for each in gradients])
        assert np.allclose(found, expected, atol=1e-4 * np.abs(expected).max())
        projections += not np.allclose(expected, wanted[-1])
        for name, statistics in network.named_buffers():
            assert torch.allclose(statistics.float(), after[name].float(), atol=1e-5), name
        assert not batch.from_memory.any()
    assert projections, "no step was projected"


class Spare(Tiny):
    """A backbone with a layer that it does not use."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


def test_a_layer_without_a_gradient_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.backbones, "spare", Spare)
    keys = {"model_name": "gem", "convnet_type": "spare", "out": str(tmp_path), "max_tasks": 2}
    run = Run(resolve(SMALL | keys), load_dataset("digits", "."))
    before = copied(run.learner.network.backbone)
    run.execute()
    after = copied(run.learner.network.backbone)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"spare.weight", "spare.bias"}
