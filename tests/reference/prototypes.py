"""Slow twins of the methods that keep mean features, written from PyCIL's arithmetic, number by number."""

import math

import torch


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def moved_to(old_mean, features_of_new):
    """FeTrIL: the features of the most similar new class, with ``old_mean`` for their mean.

    ``features_of_new``: {class: its rows}.
    """
    means = {label: mean(rows) for label, rows in features_of_new.items()}
    nearest = max(means, key=lambda label: cosine(old_mean, means[label]))
    return [
        [value - its + ours for value, its, ours in zip(row, means[nearest], old_mean)]
        for row in features_of_new[nearest]
    ]


def linear(row, weight, bias):
    return [dot(row, column) + shift for column, shift in zip(weight, bias)]


def errors(logits, targets, temperature):
    """The cross-entropy of each row."""
    found = []
    for row, target in zip(logits, targets, strict=True):
        scaled = [value / temperature for value in row]
        largest = max(scaled)
        found.append(largest + math.log(sum(math.exp(value - largest) for value in scaled)) - scaled[target])
    return found


def distance(new, old):
    """The norm of the difference of all features of a batch together."""
    return math.sqrt(sum((a - b) ** 2 for row, before in zip(new, old) for a, b in zip(row, before)))


def turned(images, targets):
    """PASS: the four quarter turns of each image; class c turned k times is 4 c + k."""
    rows, labels = [], []
    for image, target in zip(images, targets):
        for turns in range(4):
            rows.append(image)
            labels.append(4 * target + turns)
            image = image.flip(2).transpose(1, 2)  # counter-clockwise
    return torch.stack(rows), labels


def noisy(prototypes, chosen, noise, radius):
    return [[p + radius * n for p, n in zip(prototypes[label], row)] for label, row in zip(chosen, noise)]


def upper_bound(prototype, covariance, label, weight, bias, ratio):
    """IL2A: the logits of a prototype, each with half of ratio times the variance of its distance to the own one."""
    logits = linear(prototype, weight, bias)
    for other, row in enumerate(weight):
        v = [a - b for a, b in zip(row, weight[label])]
        logits[other] += ratio / 2 * dot(v, [dot(line, v) for line in covariance])
    return logits


def weighted(errors, new, old, prototypes, strength):
    """SSRE: the mean error, and the sum of the distances of features, weighed by the similarity to a prototype."""
    total = 0.0
    for error, row, before in zip(errors, new, old):
        similarity = max(cosine(row, prototype) for prototype in prototypes)
        total += error * (1 - similarity) / len(errors) + strength * distance([row], [before]) * similarity
    return total
