"""Slow twins of BEEF's losses and of its fused classifier, class by class, written from PyCIL's arithmetic."""

import math

import torch
from torch.nn.functional import cross_entropy, linear


def fused(older, own_head, scales, shifts, sizes):
    """Rows of the classifier over all blocks: (weights, bias) of each class; ``sizes``: classes of the tasks."""
    rows = []
    for task, size in enumerate(sizes[:-1]):
        for _ in range(size):
            weight = (scales[task] + 1) * own_head.weight[task]
            bias = (scales[task] + 1) * own_head.bias[task] + shifts[task]
            rows.append((torch.cat([older[len(rows)], weight]), bias))
    for number in range(sizes[-1]):
        place = len(sizes) - 1 + number
        rows.append((torch.cat([torch.zeros(older.shape[1]), own_head.weight[place]]), own_head.bias[place]))
    return rows


def pseudo_targets(targets, sizes):
    """An earlier task is one class; the new classes follow."""
    labels = []
    for target in targets.tolist():
        end = 0
        for task, size in enumerate(sizes):
            first, end = end, end + size
            if first <= target < end:
                labels.append(task if task < len(sizes) - 1 else len(sizes) - 1 + target - first)
    return torch.tensor(labels)


def logits_of(block, head, energy, images):
    features = block(images)
    return torch.cat([linear(features, head.weight, head.bias), linear(features, energy.weight, energy.bias)], 1)


def samples(block, head, energy, images, noise):
    """Three steps that lower the energy of the upside-down images, all of a batch at once."""
    training = block.training
    block.eval()
    points = images.flip(2).flip(3)
    for step in range(3):
        points = points.detach().requires_grad_(True)
        probabilities = logits_of(block, head, energy, points).softmax(1)
        objective = torch.log(probabilities[:, head.out_features :].sum())
        (gradient,) = torch.autograd.grad(objective, points)
        points = points - 0.01 * gradient + 0.001 * noise[step]
    block.train(training)
    return points.detach()


def energy_loss(block, head, energy, points, targets, own_targets):
    """No sample is compared with the classes of the whole batch, whose logits are all but zero."""
    logits = logits_of(block, head, energy, points)
    total = 0.0
    for row, target in enumerate(targets.tolist()):
        values = []
        for column in range(logits.shape[1]):
            values.append(torch.tensor(1e-9) if column in own_targets.tolist() else logits[row, column])
        wanted = values[head.out_features + target]
        total = total - wanted + torch.stack(values).logsumexp(0)
    return total / len(targets)


def loss(block, head, energy, images, targets, sizes, noise, alignment, weight):
    """The loss of the newest block, whose forward passes come in this order: batch norm counts both."""
    own_targets = pseudo_targets(targets, sizes)
    features = block(images)
    logits = linear(features, head.weight, head.bias)
    if len(sizes) > 1:
        aligned = [logits[:, task] / alignment for task in range(len(sizes) - 1)]
        logits = torch.stack([*aligned, *logits[:, len(sizes) - 1 :].unbind(1)], 1)
    classification = cross_entropy(logits, own_targets)
    points = samples(block, head, energy, images, noise)
    return classification + weight * energy_loss(block, head, energy, points, targets, own_targets)


def cosine(first, epochs):
    """torch's CosineAnnealingLR, epoch by epoch."""
    return [first * (1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(epochs)]
