"""Slow twins of SLCA, DGR and DUCT, number by number, from the arithmetic of PILOT's code."""

import math


def norm(vector):
    return math.sqrt(sum(value**2 for value in vector))


def log_softmax(logits):
    largest = max(logits)
    total = math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - largest - total for logit in logits]


def aligned_loss(logits, targets, sizes, temperature):
    """SLCA's: each image's logits are divided by the mean of the norms of its logits of each task."""
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        norms, start = [], 0
        for size in sizes:
            norms.append(norm(row[start : start + size]) + 1e-7)
            start += size
        scale = sum(norms) / len(norms) * temperature
        total -= log_softmax([logit / scale for logit in row])[target]
    return total / len(targets)


def mean_scale(label, sizes):
    """SLCA's factor of a class's mean, with tasks of equal size."""
    task = label // sizes[-1]
    return 0.9 + (task + 1) / len(sizes) * 0.1


def reweighted(ours, distilled, received, old, gamma):
    """DGR's gradient of the head's rows.

    ``ours``: rows of the cross-entropy's gradient, each with that of the bias last; ``distilled``: of the
    distillation's, of the ``old`` classes; ``received``: the norms of the rows in earlier steps, summed.
    """
    norms = [norm(row[:-1]) for row in ours]
    sums = [before + now for before, now in zip(received, norms, strict=True)]
    if not old:
        weights = [min(sums) / total for total in sums]
        return [[weight * value for value in row] for weight, row in zip(weights, ours, strict=True)], sums
    first, second = sums[:old], sums[old:]
    balance = (sum(second) / len(second)) / (sum(first) / len(first))
    weights = [min(first) / total * min(1, balance) for total in first]
    weights += [min(second) / total * min(1, balance * math.exp(-gamma * old / len(sums))) for total in second]
    length = norm([weight * length_of_row for weight, length_of_row in zip(weights, norms, strict=True)])
    ratio = length / norm([norm(row[:-1]) for row in distilled])
    gradient = [[weight * value for value in row] for weight, row in zip(weights, ours, strict=True)]
    for label, row in enumerate(distilled):
        gradient[label] = [value + ratio * other for value, other in zip(gradient[label], row, strict=True)]
    return gradient, sums


def transported(rows, plan, share):
    """DUCT's old rows, moved by ``share`` towards the new ``rows`` as ``plan`` (new, old) transports them."""
    old, new = rows
    moved_rows = []
    for number, row in enumerate(old):
        moved = [sum(plan[i][number] * new[i][d] for i in range(len(new))) for d in range(len(row))]
        moved_rows.append([(1 - share) * value + share * other for value, other in zip(row, moved, strict=True)])
    return moved_rows
