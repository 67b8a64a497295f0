"""MAS's importance, against a slow twin."""

import numpy as np
import torch
from reference import penalties
from support.methods import SILENT, after, batches_of

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


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
