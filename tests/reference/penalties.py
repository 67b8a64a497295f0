"""Slow twins of the penalties, weight by weight, written from the papers' equations and PyCIL's arithmetic."""

import copy

import torch
from torch.nn.functional import cross_entropy


def fisher_of_batches(network, batches, cut):
    """PyCIL's Fisher: the mean over batches of the squared gradient of a batch's mean loss, in training mode."""
    network = copy.deepcopy(network).train()
    names, parameters = zip(*network.named_parameters())
    sums = [[0.0] * parameter.numel() for parameter in parameters]
    for images, targets in batches:
        gradients = torch.autograd.grad(cross_entropy(network(images), targets), parameters)
        for total, gradient in zip(sums, gradients):
            for place, value in enumerate(gradient.flatten().tolist()):
                total[place] += value**2
    return {name: [min(value / len(batches), cut) for value in total] for name, total in zip(names, sums)}


def fisher_of_samples(network, batches, cut):
    """The mean over samples of the squared gradient of each one's loss, in evaluation mode."""
    network = copy.deepcopy(network).eval()
    names, parameters = zip(*network.named_parameters())
    sums, count = [torch.zeros_like(parameter) for parameter in parameters], 0
    for images, targets in batches:
        for image, target in zip(images, targets):
            loss = cross_entropy(network(image[None]), target[None])
            for total, gradient in zip(sums, torch.autograd.grad(loss, parameters)):
                total += gradient**2
            count += 1
    return {name: (total / count).clamp(max=cut).flatten().tolist() for name, total in zip(names, sums)}


def sensitivity(network, batches):
    """MAS: the absolute gradient of the summed squared norm of a batch's logits, over the number of samples."""
    network = copy.deepcopy(network).eval()
    names, parameters = zip(*network.named_parameters())
    sums, count = [0.0] * len(names), 0
    for images, _ in batches:
        gradients = torch.autograd.grad((network(images) ** 2).sum(), parameters)
        sums = [total + gradient.abs() for total, gradient in zip(sums, gradients)]
        count += len(images)
    return {name: (total / count).flatten().tolist() for name, total in zip(names, sums)}


def path_importance(steps, xi):
    """Synaptic Intelligence of one weight in a task: ``steps`` are (gradient of the loss, weight before, weight after).

    Of several tasks, the sum counts, and 0 if it is negative.
    """
    path = sum(-gradient * (after - before) for gradient, before, after in steps)
    return path / ((steps[-1][2] - steps[0][1]) ** 2 + xi)


def penalty(importance, anchor, weights, columns):
    """Sum over weights, of which those of new rows have no anchor. All are {name: flat list}."""
    total = 0.0
    for name, values in importance.items():
        assert len(values) == len(anchor[name]) == columns[name]
        for value, before, now in zip(values, anchor[name], weights[name]):
            total += value * (now - before) ** 2
    return total
