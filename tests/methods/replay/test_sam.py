"""SAM: the step is along the gradient at the steepest point."""

import copy

import torch
from support.at_task_end import after
from support.methods import SILENT
from torch.nn.functional import cross_entropy


def test_sam_steps_along_the_gradient_at_the_steepest_point(digits, tmp_path):
    """Against the two gradients written out, without momentum; batch norm's statistics move once a step."""
    learner, tasks = after("sam", 1, digits, tmp_path, rho=0.5, momentum=0.0, weight_decay=0.0, batch_size=1000)
    network, seen = copy.deepcopy(learner.network), []
    grow, loss = learner.grow, learner.loss

    def grown_too(task):
        grow(task)
        network.__dict__.update(copy.deepcopy(learner.network).__dict__)

    def remembered(batch):
        seen.append(batch)
        return loss(batch)

    learner.grow, learner.loss = grown_too, remembered
    learner.learn(tasks[1], SILENT)
    assert len(seen) == 2 and seen[0] is seen[1], "one step of two passes"
    images, targets = seen[0].images, seen[0].targets
    network.train()
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(cross_entropy(network(images), targets), parameters)
    statistics = [buffer.clone() for buffer in network.buffers()]
    norm = sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter += 0.5 * gradient / norm
    steepest = torch.autograd.grad(cross_entropy(network(images), targets), parameters)
    for parameter, gradient, second, ours in zip(parameters, gradients, steepest, learner.network.parameters()):
        start = parameter.detach() - 0.5 * gradient / norm
        torch.testing.assert_close(ours.detach(), start - 0.1 * second, rtol=1e-4, atol=1e-5)
    for expected, ours in zip(statistics, learner.network.buffers()):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
