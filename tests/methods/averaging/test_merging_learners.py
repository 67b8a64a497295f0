"""Methods that merge weights at the end of a task, each against its formula."""

import copy

import pytest
import torch
from reference import merging as twins
from reference.penalties import fisher_of_batches
from support.methods import after

from pycil_wsc import registry
from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.learner import grow_for

MERGING = ["wise_ft", "cofima", "magmax", "ties"]


@pytest.fixture
def trained(digits, tmp_path, monkeypatch):
    """name -> a learner after three tasks, and its networks before and after each was merged."""

    def train(name, **keys):
        networks, merged = [], []
        end = registry.learners[name].end_task

        def watched(learner, task):
            networks.append(copy.deepcopy(learner.network))
            end(learner, task)
            merged.append(copy.deepcopy(learner.network))

        monkeypatch.setattr(registry.learners[name], "end_task", watched)
        learner, _ = after(name, 3, digits, tmp_path, **{"convnet_options.width": 4} | keys)
        monkeypatch.setattr(registry.learners[name], "end_task", end)
        return learner, networks, merged

    return train


def flat(network, part=""):
    return [value for name, p in network.named_parameters() if name.startswith(part) for value in p.flatten().tolist()]


def assert_equal(network, expected, part=""):
    torch.testing.assert_close(torch.tensor(flat(network, part)), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_wise_fts_weights_are_the_mean_of_those_before_and_after_the_task(trained):
    _, networks, merged = trained("wise_ft", new_share=0.3)
    assert_equal(merged[0], flat(networks[0]))
    for before, now, mean in zip(merged, networks[1:], merged[1:]):
        rows = len(before.head.weight)
        for name, value in mean.named_parameters():
            old, new = before.get_parameter(name), now.get_parameter(name)
            torch.testing.assert_close(value[: len(old)], 0.7 * old + 0.3 * new[: len(old)])
        assert torch.equal(mean.head.weight[rows:], now.head.weight[rows:]), "new rows stay as they were trained"


@pytest.mark.slow
def test_cofima_weighs_the_weights_before_and_after_by_the_fisher_information_of_their_tasks(trained):
    learner, networks, merged = trained("cofima", new_weight=0.4, fishermax=1e-3)
    fishers = []
    for task, network in zip(learner.manager.tasks, networks):
        learner.memory.classes, every = {}, learner.memory.classes
        learner.memory.classes = {c: kept for c, kept in every.items() if c < task.num_old}
        indices = learner.batches.indices(task)
        learner.memory.classes = every
        batches = [
            (b.images, b.targets)
            for b in learner.batches.of(Sampling(indices=indices, mixed=False), task.index, "fisher")
        ]
        fishers.append(fisher_of_batches(network, batches, 1e-3))
    for task in (1, 2):
        for name, value in merged[task].named_parameters():
            old, now = merged[task - 1].get_parameter(name).flatten().tolist(), networks[task].get_parameter(name)
            values = old, now.flatten().tolist(), 0.4, fishers[task - 1][name], fishers[task][name]
            expected = twins.weighted_by_fisher(*values)
            torch.testing.assert_close(value.flatten()[: len(old)], torch.tensor(expected), rtol=1e-3, atol=1e-5)


TWINS = {
    "magmax": (lambda start, states: twins.largest(start, states, 0.6), {"magmax_scale": 0.6}),
    "ties": (lambda start, states: twins.ties(start, states, 0.3, 0.8), {"ties_keep": 0.3, "ties_scale": 0.8}),
}


@pytest.mark.parametrize("name", TWINS)
def test_task_vectors_are_merged_in_the_backbone_from_the_weights_after_the_first_task(name, trained):
    twin, keys = TWINS[name]
    _, networks, merged = trained(name, **keys)
    start, *states = (flat(network, "backbone") for network in networks)
    assert_equal(merged[0], flat(networks[0]))
    for task in (1, 2):
        assert_equal(merged[task], twin(start, states[:task]), "backbone")
        assert_equal(merged[task], flat(networks[task], "head"), "head")


@pytest.mark.parametrize("name, starts_from", [("wise_ft", "merged"), ("magmax", "trained"), ("ties", "trained")])
def test_the_next_task_starts_from_the_merged_weights_or_from_those_that_were_trained(name, starts_from, trained):
    learner, networks, merged = trained(name)
    task = learner.manager.tasks[2]
    grow_for(learner, task)
    learner.begin_task(task)
    before = merged[2] if starts_from == "merged" else networks[2]
    assert_equal(learner.network, flat(before, "backbone"), "backbone")
    for mine, theirs in zip(learner.network.backbone.buffers(), before.backbone.buffers(), strict=True):
        assert torch.equal(mine, theirs), "statistics belong to their weights"


@pytest.mark.parametrize("name", MERGING)
def test_statistics_of_batch_norm_are_those_of_the_merged_weights(name, trained):
    """One batch: its own mean and variance."""
    learner, _, merged = trained(name, batch_size=4000)
    task = learner.manager.tasks[2]
    learner.memory.classes = {c: kept for c, kept in learner.memory.classes.items() if c < task.num_old}
    network = merged[2]
    (batch,) = learner.batches.of(Sampling(indices=learner.batches.indices(task)), 2, "batch norm")
    first = network.backbone.get_submodule("stem.0")
    norm = network.backbone.get_submodule("stem.1")
    outputs = first(batch.images)
    torch.testing.assert_close(norm.running_mean, outputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, outputs.transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-5)
