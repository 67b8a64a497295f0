"""CoFiMA, against its formula by a slow twin."""

import pytest
import torch
from reference import merging as twins
from reference.penalties import fisher_of_batches
from support.merging import merged_after

from pycil_wsc.training.batches import Sampling


@pytest.mark.slow
def test_cofima_weighs_the_weights_before_and_after_by_the_fisher_information_of_their_tasks(digits, tmp_path):
    learner, networks, merged = merged_after("cofima", digits, tmp_path, new_weight=0.4, fishermax=1e-3)
    fishers = []
    for task, network in zip(learner.manager.tasks, networks):
        learner.memory.classes, every = {}, learner.memory.classes
        learner.memory.classes = {c: kept for c, kept in every.items() if c < task.num_old}
        indices = learner.batches.indices(task)
        learner.memory.classes = every
        sampling = Sampling(indices=indices, mixed=False)
        batches = [(b.images, b.targets) for b in learner.batches.of(sampling, task.index, "fisher")]
        fishers.append(fisher_of_batches(network, batches, 1e-3))
    for task in (1, 2):
        for name, value in merged[task].named_parameters():
            old, now = merged[task - 1].get_parameter(name).flatten().tolist(), networks[task].get_parameter(name)
            values = old, now.flatten().tolist(), 0.4, fishers[task - 1][name], fishers[task][name]
            expected = twins.weighted_by_fisher(*values)
            torch.testing.assert_close(value.flatten()[: len(old)], torch.tensor(expected), rtol=1e-3, atol=1e-5)
