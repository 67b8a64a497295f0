"""Learners whose exemplars are chosen at a task's end; ``test_streams.py`` has those whose memory each step fills."""

import torch
from support import methods
from support.methods import perturb

from pycil_wsc.training.learner import grow_for

OLD = torch.tensor([True, False, True, True, False, True])  # BATCH's exemplars: classes 0, 2, 3, 4
INDICES = torch.tensor([5, 60, 7, 30, 80, 12])


def after(name, tasks, data, tmp_path, **keys):
    return methods.after(name, tasks, data, tmp_path, memory_update="task", **keys)


def grown(name, tasks, data, tmp_path, **keys):
    return methods.grown(name, tasks, data, tmp_path, memory_update="task", **keys)


def second_task(name, digits, tmp_path, **keys):
    """A learner in its second task, in evaluation mode, with other weights than after the first."""
    learner, tasks = after(name, 1, digits, tmp_path, **keys)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    perturb(learner.network)
    return learner.eval(), tasks[1]
