"""Slow twin of EASE, class by class, written from PILOT's arithmetic. Prototypes: [class][adapter] -> (d,)."""

import torch


def completed(prototypes, sizes, recalc, first=0):
    """Fill in the prototypes of old classes for newer adapters, after the task with the last of ``sizes`` classes.

    ``first``: the number of columns before those of the adapters. Without ``recalc`` those of the newest alone.
    """
    newest = len(sizes) - 1
    starts = [sum(sizes[:task]) for task in range(len(sizes) + 1)]
    for old in range(newest):
        for adapter in range(old + 1, newest + 1):
            if not recalc and adapter != newest:
                continue
            new = range(starts[adapter], starts[-1])
            for label in range(starts[old], starts[old + 1]):
                own = prototypes[label][first + old]
                similar = torch.stack([cosine(own, prototypes[other][first + old]) for other in new]).softmax(0)
                total = 0
                for share, other in zip(similar, new):
                    total = total + share * prototypes[other][first + adapter]
                prototypes[label][first + adapter] = total


def scores(features, prototypes, sizes, alpha, beta=None):
    """The logits of one image, whose ``features`` are a list like a class's prototypes; with ``beta`` the first is of
    the transformer without adapters."""
    own = [task for task, size in enumerate(sizes) for _ in range(size)]
    found = []
    for label, rows in enumerate(prototypes):
        total = 0
        for place, (feature, row) in enumerate(zip(features, rows)):
            adapter = place if beta is None else place - 1
            if adapter == own[label]:
                total = total + cosine(feature, row)
            elif adapter < 0:
                total = total + beta * cosine(feature, row)
            else:
                total = total + alpha * cosine(feature, row) / (len(sizes) - 1)
        found.append(total)
    return torch.stack(found)


def cosine(one, other):
    return (one @ other) / (one.norm().clamp(min=1e-12) * other.norm().clamp(min=1e-12))
