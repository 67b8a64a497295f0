"""Slow twin of MOS, image by image, written from PILOT's arithmetic. An adapter set: a list of tensors per block."""

import torch
from torch.nn.functional import cross_entropy


def merge(blocks, earlier, momentum):
    """Move the tensors of all blocks towards their mean over the ``earlier`` sets, in place."""
    for number, tensors in enumerate(blocks):
        for place, tensor in enumerate(tensors):
            mean = sum(blocks_then[number][place].detach() for blocks_then in earlier) / len(earlier)
            tensor.data = (1 - momentum) * tensor.data + momentum * mean


def orthogonality(features, means, reg):
    """Each row of the class means and the features is to be most similar to itself."""
    rows = torch.stack([*means, *features])
    total = 0
    for number, row in enumerate(rows):
        similar = torch.stack([row @ other / 0.8 for other in rows])
        total = total + similar.logsumexp(0) - similar[number]
    return reg * total / len(rows)


def refined(features, cosines, head, task_of, ensemble):
    """The scores of one image: ``features`` of each task's adapters, ``cosines`` with the prototypes of all classes.

    Adapters are chosen again until they are those of the predicted class's task, at most four times.
    """
    chosen = task_of[int(cosines.argmax())]
    for _ in range(4):
        logits = head(features[chosen])
        predicted = task_of[int(logits.argmax())]
        if predicted == chosen:
            break
        chosen = predicted
    if not ensemble:
        return logits
    return logits.softmax(0) + (cosines * len(features)).softmax(0)


def statistics(rows, kind):
    """The mean (d,) and covariance (d, d) of a class, from its features."""
    mean = sum(rows) / len(rows)
    covariance = sum(torch.outer(row - mean, row - mean) for row in rows) / (len(rows) - 1)
    covariance = covariance + 1e-4 * torch.eye(len(mean))
    return mean, covariance if kind == "covariance" else torch.diag(covariance.diag())


def aligned(weight, bias, epochs, rate, decay):
    """Train a linear classifier on the batches of each of ``epochs``, lists of (rows, labels)."""
    weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (weight, bias))
    optimizer = torch.optim.SGD([weight, bias], lr=rate, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(epochs))
    for batches in epochs:
        for rows, labels in batches:
            optimizer.zero_grad()
            cross_entropy(rows @ weight.T + bias, labels).backward()
            optimizer.step()
        schedule.step()
    return weight.detach(), bias.detach()
