"""The steps of a learner whose steps fill its memory, to be repeated by a slow twin."""

import copy
from types import SimpleNamespace

import torch
from support.methods import SILENT, SMALL

from pycil_wsc.config.loading import resolve
from pycil_wsc.runs.run import Run

RATE = 0.05
PLAIN = SMALL | {"convnet_type": "mlp", "convnet_options.side": 8, "convnet_options.width": 12, "precision": "fp32"}
PLAIN |= {"momentum": 0.0, "weight_decay": 0.0, "init_weight_decay": 0.0, "init_lr": RATE, "lrate": RATE}
PLAIN |= {"memory_size": 40, "replay_batch_size": 24, "milestones": [], "init_milestones": []}


def run_of(name, digits, tmp_path, **keys):
    """``keys``: None leaves a key out."""
    settings = PLAIN | {"model_name": name, "out": str(tmp_path)} | keys
    return Run(resolve({key: value for key, value in settings.items() if value is not None}), digits)


def recorded(run, tasks=2):
    """Learn some tasks: for each step its ``batch``, and the network ``before`` and ``after`` it."""
    learner, steps = run.learner, []
    before_step, into = learner.before_step, learner.after_step

    def begun(batch):
        steps.append(SimpleNamespace(before=copy.deepcopy(learner.network)))
        steps[-1].batch = before_step(batch)
        return steps[-1].batch

    def ended():
        into()
        steps[-1].after = copy.deepcopy(learner.network)

    learner.before_step, learner.after_step = begun, ended
    for task in run.manager.tasks[:tasks]:
        learner.learn(task, SILENT)
    return steps


def pair(batch):
    return batch.images, batch.targets


def drawn(step):
    """What the step drew, or None."""
    return pair(step.batch.replay[0]) if step.batch.replay else None


def assert_same(network, other):
    for name, weights in network.named_parameters():
        torch.testing.assert_close(weights, other.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)
