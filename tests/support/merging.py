"""Learners that merge weights at the end of a task, and their weights."""

import copy
from unittest.mock import patch

import torch
from support.methods import after

from pycil_wsc import registry


def merged_after(name, digits, tmp_path, **keys):
    """A learner after three tasks, and its networks before and after each was merged."""
    networks, merged = [], []
    end = registry.learners[name].end_task

    def watched(learner, task):
        networks.append(copy.deepcopy(learner.network))
        end(learner, task)
        merged.append(copy.deepcopy(learner.network))

    with patch.object(registry.learners[name], "end_task", watched):
        learner, _ = after(name, 3, digits, tmp_path, **{"convnet_options.width": 4} | keys)
    return learner, networks, merged


def values(network, part=""):
    """All weights of a part of the network, in a list."""
    return [value for name, p in network.named_parameters() if name.startswith(part) for value in p.flatten().tolist()]


def assert_equal(network, expected, part=""):
    torch.testing.assert_close(torch.tensor(values(network, part)), torch.tensor(expected), rtol=1e-4, atol=1e-6)
