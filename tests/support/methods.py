"""Learners of each method on small data, and what their tests compare."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.learner import grow_for

SILENT = SimpleNamespace(
    **dict.fromkeys(("task_started", "phase_started", "step", "epoch_ended", "task_trained"), lambda *_: None)
)


SMALL = MappingProxyType(  # tests share it
    {
        "dataset": "digits",
        "init_cls": 4,
        "increment": 3,
        "convnet_type": "resnet8",
        "memory_per_class": 10,
        "init_epoch": 1,
        "epochs": 1,
        "batch_size": 64,
        "precision": "fp32",  # on every machine: what methods compute is compared
    }
)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", ".")


def one_of_each_family(names):
    """These methods as parameters, of which all but one of each family (their folder) are slow.

    For what a mechanism owes to every method, and a method by itself can hardly break.
    """
    parameters, families = [], set()
    for name in names:
        family = registry.learners[name].__module__.split(".")[-2]
        is_further = family in families
        families.add(family)
        parameters.append(pytest.param(name, marks=[pytest.mark.slow] if is_further else [], id=name))
    return parameters


def after(model_name, tasks, data, tmp_path, **keys):
    """A learner of ``model_name`` that has learned ``tasks`` tasks, and its task list."""
    run = Run(resolve(SMALL | {"model_name": model_name, "out": str(tmp_path)} | keys), data)
    for task in run.manager.tasks[:tasks]:
        run.learner.learn(task, SILENT)
    return run.learner, run.manager.tasks


def grown(model_name, tasks, data, tmp_path, **keys):
    """A learner whose networks have grown to ``tasks`` tasks, all of whose weights are random; and its task list."""
    run = Run(resolve(SMALL | {"model_name": model_name, "out": str(tmp_path)} | keys), data)
    for task in run.manager.tasks[:tasks]:
        grow_for(run.learner, task)
    perturb(run.learner)
    return run.learner, run.manager.tasks


@torch.no_grad()
def perturb(module):
    """Move every parameter, so that no two networks and no two parts are equal, and no bias is zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def images(count=8):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


BATCH, TARGETS = images(6), torch.tensor([0, 6, 2, 3, 5, 4])  # of the seven classes of two tasks


def negative_log_likelihood(logits, targets):
    return -logits.log_softmax(1)[range(len(targets)), targets].mean()


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(module, before):
    return sorted(name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name]))


def flat(weights):
    """{name: its values in a list} of parameters."""
    return {name: value.detach().flatten().tolist() for name, value in weights.items()}


def batches_of(learner, task, *address):
    """The batches that a pass with this address sees."""
    if address:
        samples = Sampling(indices=task.train_indices, mixed=False)
        return [(batch.images, batch.targets) for batch in learner.batches.of(samples, *address)]
    return list(learner.batches.source.batches(task.train_indices, learner.manager.train_targets, 64))
