"""What the methods that merge weights at the end of a task share; MagMax and TIES against slow twins."""

import pytest
import torch
from reference import merging as twins
from support.merging import assert_equal, merged_after, values

from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.learner import grow_for

MERGING = ["wise_ft", "cofima", "magmax", "ties"]
TWINS = {
    "magmax": (lambda start, states: twins.largest(start, states, 0.6), {"magmax_scale": 0.6}),
    "ties": (lambda start, states: twins.ties(start, states, 0.3, 0.8), {"ties_keep": 0.3, "ties_scale": 0.8}),
}


@pytest.mark.parametrize("name", TWINS)
def test_task_vectors_are_merged_in_the_backbone_from_the_weights_after_the_first_task(name, digits, tmp_path):
    twin, keys = TWINS[name]
    _, networks, merged = merged_after(name, digits, tmp_path, **keys)
    start, *states = (values(network, "backbone") for network in networks)
    assert_equal(merged[0], values(networks[0]))
    for task in (1, 2):
        assert_equal(merged[task], twin(start, states[:task]), "backbone")
        assert_equal(merged[task], values(networks[task], "head"), "head")


@pytest.mark.parametrize("name, starts_from", [("wise_ft", "merged"), ("magmax", "trained"), ("ties", "trained")])
def test_the_next_task_starts_from_the_merged_weights_or_from_those_that_were_trained(
    name, starts_from, digits, tmp_path
):
    learner, networks, merged = merged_after(name, digits, tmp_path)
    task = learner.manager.tasks[2]
    grow_for(learner, task)
    learner.begin_task(task)
    before = merged[2] if starts_from == "merged" else networks[2]
    assert_equal(learner.network, values(before, "backbone"), "backbone")
    for mine, theirs in zip(learner.network.backbone.buffers(), before.backbone.buffers(), strict=True):
        assert torch.equal(mine, theirs), "statistics belong to their weights"


@pytest.mark.parametrize("name", MERGING)
def test_statistics_of_batch_norm_are_those_of_the_merged_weights(name, digits, tmp_path):
    """One batch: its own mean and variance."""
    learner, _, merged = merged_after(name, digits, tmp_path, batch_size=4000)
    task = learner.manager.tasks[2]
    learner.memory.classes = {c: kept for c, kept in learner.memory.classes.items() if c < task.num_old}
    network = merged[2]
    (batch,) = learner.batches.of(Sampling(indices=learner.batches.indices(task)), 2, "batch norm")
    first = network.backbone.get_submodule("stem.0")
    norm = network.backbone.get_submodule("stem.1")
    outputs = first(batch.images)
    torch.testing.assert_close(norm.running_mean, outputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, outputs.transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-5)
