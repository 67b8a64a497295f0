"""LwF and the methods that penalise changes of important weights, against slow twins."""

import numpy as np
import pytest
import torch
from reference import penalties
from support.methods import BATCH, SILENT, SMALL, after, grown, negative_log_likelihood
from support.small_learners import QUICK, learned
from support.small_runs import Tiny, batch_of
from torch.nn.functional import cross_entropy

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.tasks.subset import at_most
from pycil_wsc.errors import UnusableRun
from pycil_wsc.methods.penalties.ewc import EWC
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Sampling

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


def flat(weights):
    return {name: value.detach().flatten().tolist() for name, value in weights.items()}


def test_lwf_is_the_new_classes_cross_entropy_and_distillation(digits, tmp_path):
    learner, tasks = grown("lwf", 2, digits, tmp_path, lamda=1.5, T=3.0)
    learner.begin_task(tasks[1])
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, NEW))
    distilled = -((learner.teacher(BATCH) / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, negative_log_likelihood(logits[:, 4:], NEW - 4) + 1.5 * distilled)


def batches_of(learner, task, *address):
    """The batches that a pass with this address sees."""
    if address:
        return [
            (b.images, b.targets)
            for b in learner.batches.of(Sampling(indices=task.train_indices, mixed=False), *address)
        ]
    return list(learner.train_source.batches(task.train_indices, learner.manager.train_targets, 64))


@pytest.mark.parametrize("how, cut, parts", [("batches", 1e-2, 1), ("batches", 1e-2, 3), ("samples", 1e-4, 1)])
def test_ewcs_fisher_is_the_twins_and_its_mean_is_over_classes(how, cut, parts, digits, tmp_path):
    keys = {"fisher": how, "fishermax": cut, "batch_norm_parts": parts, "convnet_options.width": 4}
    data = at_most(digits, 30, 0) if how == "samples" else digits
    learner, tasks = after("ewc", 0, data, tmp_path, **keys)
    found = []
    for task in tasks[:2]:
        learner.learn(task, SILENT)
        if how == "batches":
            batches = batches_of(learner, task, task.index, "fisher")
            found.append(penalties.fisher_of_batches(learner.network, batches, cut))
        else:
            found.append(penalties.fisher_of_samples(learner.network, batches_of(learner, task), cut))
    assert learner.importance.keys() == found[1].keys() == learner.trained().keys()
    for name, ours in learner.importance.items():
        old, expected = found[0][name], list(found[1][name])
        for place, value in enumerate(old):
            expected[place] = 4 / 7 * value + 3 / 7 * expected[place]
        np.testing.assert_allclose(ours.flatten().numpy(), expected, rtol=2e-3, atol=1e-9)
    values = [value for each in found[1].values() for value in each]
    assert max(values) == pytest.approx(cut) and sum(0 < value < cut for value in values) > 100


def test_ewcs_mean_counts_the_classes_of_a_task_though_they_are_known(monkeypatch):
    """Two of cat and ant, then two of them again: half the weight each. PyCIL has no such tasks."""
    values = iter([1.0, 3.0])

    def constant(learner, task):
        value = next(values)
        return {name: torch.full_like(weight, value) for name, weight in learner.trained().items()}

    monkeypatch.setattr(EWC, "new_importance", constant)
    learner = learned(name="ewc", **QUICK)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 8, 8, 3), np.uint8)
    for images in pixels:
        learner.learn((images, ["cat", "ant"] * 8))
    means = learner._state["learner"]["_extra_state"]["importance"].values()
    assert means and all((value == 2).all() for value in means)


class Unvectorised(Tiny):
    """A backbone that ``torch.func.vmap`` refuses."""

    def forward(self, x):
        return super().forward(x) * (1 + 0 * x.mean().item())


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"model_name": "ewc", "fisher": "samples"}, "fisher: 'samples' cannot be computed for 'unvectorised'"),
        ({"model_name": "wsc", "wsc.importance": "fisher"}, "wsc.importance: 'fisher' cannot be computed for"),
    ],
)
def test_a_backbone_that_has_no_gradients_of_single_samples_is_one_line(keys, message, digits, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.backbones, "unvectorised", Unvectorised)
    run = Run(resolve(SMALL | {"convnet_type": "unvectorised", "out": str(tmp_path), "max_tasks": 2} | keys), digits)
    with pytest.raises(UnusableRun) as error:
        run.execute()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_mass_importance_is_the_twins_and_adds_up(digits, tmp_path):
    learner, tasks = after("mas", 0, digits, tmp_path, **{"convnet_options.width": 4})
    found = []
    for task in tasks[:2]:
        learner.learn(task, SILENT)
        found.append(penalties.sensitivity(learner.network, batches_of(learner, task)))
    assert learner.importance.keys() == found[1].keys() == learner.trained().keys()
    for name, ours in learner.importance.items():
        expected = np.array(found[1][name])
        expected[: len(found[0][name])] += found[0][name]
        np.testing.assert_allclose(ours.flatten().numpy(), expected, rtol=1e-3, atol=1e-6)


def test_sis_importance_is_the_sum_over_the_path_of_the_loss_without_the_penalty(digits, tmp_path):
    learner, tasks = after("si", 1, digits, tmp_path, c=5.0, **{"convnet_options.width": 4})
    earlier = flat(learner.importance)
    paths = {}
    remember, step = learner.after_backward, learner.after_step
    seen = {}

    def watched(batch, backward):
        remember(batch, backward)
        parameters = learner.trained()
        logits = learner.network(batch.images)
        loss = cross_entropy(logits[:, 4:], batch.targets - 4)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        seen["before"] = flat(parameters), flat(dict(zip(parameters, gradients)))

    def stepped():
        step()
        before, gradients = seen["before"]
        for name, values in flat(learner.trained()).items():
            for place, value in enumerate(values):
                record = gradients[name][place], before[name][place], value
                paths.setdefault((name, place), []).append(record)

    learner.after_backward, learner.after_step = watched, stepped
    learner.learn(tasks[1], SILENT)
    assert len(paths["head.bias", 0]) > 3
    for name, ours in flat(learner.importance).items():
        expected = [penalties.path_importance(paths[name, place], 0.1) for place in range(len(ours))]
        for place, value in enumerate(earlier[name]):
            expected[place] += value
        np.testing.assert_allclose(ours, expected, rtol=1e-2, atol=2e-6)


def test_a_path_that_increased_the_loss_takes_from_sis_importance_down_to_zero(digits, tmp_path):
    learner, tasks = grown("si", 2, digits, tmp_path, **{"convnet_options.width": 4})
    learner.begin_task(tasks[1])
    head = learner.network.head.bias
    learner.importance = {"head.bias": torch.tensor([2.0, 2.0, 2.0, 2.0])}
    learner.path["head.bias"] = torch.tensor([0.2, -0.2, -3.0, 0.0, -1.0, 1.0, 0.0])
    with torch.no_grad():
        head += 0.2
    learner.end_task(tasks[1])
    expected = [2 + 0.2 / 0.14, 2 - 0.2 / 0.14, 0, 2, 0, 1 / 0.14, 0]
    torch.testing.assert_close(learner.importance["head.bias"], torch.tensor(expected))


@pytest.mark.parametrize("name, strength", [("ewc", 0.5 * 7), ("mas", 7), ("si", 7)])
def test_the_penalty_is_the_twins(name, strength, digits, tmp_path):
    key = "c" if name == "si" else "lamda"
    learner, tasks = grown(name, 1, digits, tmp_path, **{key: 7.0, "convnet_options.width": 4})
    generator = torch.Generator().manual_seed(3)
    for part in (learner.importance, learner.anchor):
        for place, parameter in learner.trained().items():
            part[place] = torch.rand(parameter.shape, generator=generator)
    learner.grow_for(tasks[1])
    learner.begin_task(tasks[1])
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, NEW))
    importance, anchor = flat(learner.importance), flat(learner.anchor)
    columns = {place: len(values) for place, values in anchor.items()}
    twin = penalties.penalty(importance, anchor, flat(learner.trained()), columns)
    assert loss.item() - negative_log_likelihood(logits[:, 4:], NEW - 4).item() == pytest.approx(
        strength * twin, rel=1e-4
    )
