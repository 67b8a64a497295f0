"""Learners that prompt a transformer, and what a slow reference computes for them."""

import torch
from reference import prompts as twin
from reference import tuning
from support.small_runs import SETTINGS, batch_of, small_data, suited

from pycil_wsc.config.loading import resolve
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner import grow_for

HEADS = 2
SIMPLER = {"precision": "fp32", "memory_per_class": 0}
POOL = {"size": 4, "length": 2, "top_k": 2}  # of L2P and DualPrompt


def prompted(name, tmp_path, tasks=2, **keys):
    """A learner that has begun its ``tasks``-th task, with weights that are not small."""
    data = small_data(tmp_path / "data.npz", per_class=4)
    simpler = SIMPLER if name == "coda_prompt" else SIMPLER | POOL
    config = resolve(SETTINGS | {"dataset": f"npz:{data}", "model_name": name} | suited(name) | simpler | keys)
    learner = Run(config, Datasets().of(config)).learner
    generator = torch.Generator().manual_seed(1)
    for task in learner.manager.tasks[:tasks]:
        grow_for(learner, task)
    for parameter in learner.network.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    learner.begin_task(task)
    return learner.eval()


def random_batch(learner, count=5):
    """Random images of the two newest classes."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    newest = learner.network.head.out_features
    return batch_of(images, torch.arange(count) % 2 + newest - 2)


def queries(learner, images):
    """The weights of the transformer, and each image's features without prompts."""
    weights = dict(learner.network.backbone.vit.named_parameters())
    return weights, [tuning.features(weights, HEADS, image).detach() for image in images]


def expected_loss(learner, features, targets, first):
    """The logits, and the mean cross-entropy over the classes from ``first`` on."""
    head = learner.network.head
    logits = [head.weight @ vector + head.bias for vector in features]
    errors = [twin.cross_entropy(row[first:], target - first) for row, target in zip(logits, targets.tolist())]
    return torch.stack(logits), sum(errors) / len(errors)


def assert_same(learner, given, logits, loss):
    """Losses, logits and all gradients are those of the reference."""
    our_loss, our_logits = learner.loss(given)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_loss, loss, rtol=1e-4, atol=1e-5)
    trained = [parameter for parameter in learner.network.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(our_loss, trained, allow_unused=True)
    expected = torch.autograd.grad(loss, trained, allow_unused=True)
    assert any(gradient is not None for gradient in expected)
    for ours, theirs in zip(gradients, expected, strict=True):
        if theirs is not None or (ours is not None and ours.any()):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
