"""A slow twin of RMM's numbers, task by task and class by class, written from PyCIL's arithmetic."""

import statistics


def sizes(rates, seen, usual, increment, per_class):
    """The size of the memory after each task; ``seen``: the classes seen after each."""
    size, found = usual, []
    for rate, classes in zip(rates, seen):
        if rate != 0:
            size = min(classes * per_class - 1, usual + int(rate * increment * per_class))
        found.append(size)
    return found


def exemplars(size, old, losses, rate, per_class):
    """The number of exemplars of each class, from the mean ``losses`` of the new ones."""
    of_each = size // (old + len(losses))
    found = [of_each] * old
    for loss in losses:
        factor = 1 - rate if loss > statistics.median(losses) else 1 + rate
        found.append(min(per_class, int(of_each * factor)))
    return found
