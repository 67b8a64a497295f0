"""Slow twin of MOS, image by image, written from PILOT's arithmetic."""

import torch
from torch.nn.functional import cross_entropy


def merge(adapters, earlier, momentum):
    """Move tensors by name towards their mean over the ``earlier`` tasks' adapters, in place."""
    for name, tensor in adapters.items():
        mean = sum(task[name] for task in earlier) / len(earlier)
        tensor.data = (1 - momentum) * tensor.data + momentum * mean


def orthogonality(features, means):
    """Each class mean and each feature is to be more similar to itself than to the others."""
    rows = [*means, *features]
    total = 0
    for number, row in enumerate(rows):
        similar = torch.stack([row @ other / 0.8 for other in rows])
        total = total + similar.logsumexp(0) - similar[number]
    return total / len(rows)


def refined(features, prototypes, weight, bias, task_of, ensemble):
    """The scores of one image: ``features`` (tasks, d), those with the adapters of each task.

    Adapters are chosen again until they are those of the predicted class's task, four times at most.
    """
    first = features[0]
    cosines = torch.stack([first @ row / (first.norm() * row.norm()) for row in prototypes])
    chosen = task_of[int(cosines.argmax())]
    for _ in range(4):
        logits = weight @ features[chosen] + bias
        predicted = task_of[int(logits.argmax())]
        if predicted == chosen:
            break
        chosen = predicted
    return logits.softmax(0) + (cosines * len(features)).softmax(0) if ensemble else logits


def covariance(rows):
    """The mean (d,) and covariance (d, d) of a class's features."""
    mean = sum(rows) / len(rows)
    products = sum(torch.outer(row - mean, row - mean) for row in rows)
    return mean, products / (len(rows) - 1) + 1e-4 * torch.eye(len(mean))


def aligned(weight, bias, batches, epochs, rate, decay):
    """Train a linear classifier on ``batches`` of (rows, labels), equally many in each epoch."""
    weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (weight, bias))
    optimizer = torch.optim.SGD([weight, bias], lr=rate, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    steps = len(batches) // epochs
    for number, (rows, labels) in enumerate(batches, 1):
        optimizer.zero_grad()
        cross_entropy(rows @ weight.T + bias, labels).backward()
        optimizer.step()
        if number % steps == 0:
            schedule.step()
    return weight.detach(), bias.detach()
