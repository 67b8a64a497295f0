"""EWC's Fisher information, against slow twins."""

import numpy as np
import pytest
import torch
from reference import penalties
from support.methods import SILENT, SMALL, after, batches_of
from support.small_learners import QUICK, learned
from support.small_runs import Tiny

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.tasks.subset import at_most
from pycil_wsc.errors import UnusableRun
from pycil_wsc.methods.penalties.ewc import EWC
from pycil_wsc.runs.run import Run

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


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
