"""Joint training, from new weights in each task."""

import numpy as np
import torch
from support.methods import after, snapshot

from pycil_wsc.training.learner import grow_for


def test_joint_forgets_its_weights_and_not_its_memory(digits, tmp_path):
    learner, tasks = after("joint", 1, digits, tmp_path)
    before, memory = snapshot(learner.network), learner.memory.indices.copy()
    grow_for(learner, tasks[1])
    assert np.array_equal(learner.memory.indices, memory) and len(memory) == 40
    assert not torch.equal(learner.network.backbone.stem[0].weight, before["backbone.stem.0.weight"])
    fresh = learner.network.backbone.stem[1]
    assert torch.equal(fresh.running_mean, torch.zeros(16)) and torch.equal(fresh.weight, torch.ones(16))
    assert learner.network.head.out_features == 7
