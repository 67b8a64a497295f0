"""Slow twins of COIL, number by number: Sinkhorn's algorithm as PyCIL runs it, rows that it moves, and the loss."""

import math


def sinkhorn(costs, rows, columns, regularisation, steps=1000):
    """With lists of numbers; ``steps`` of them, or until one leaves the range of floats: then the step before."""
    n, m = len(rows), len(columns)
    kernel = [[math.exp(-cost / regularisation) for cost in line] for line in costs]
    u, v = [1 / n] * n, [1 / m] * m
    for _ in range(steps):
        try:
            reached = [sum(kernel[i][j] * u[i] for i in range(n)) for j in range(m)]
            new_v = [columns[j] / reached[j] for j in range(m)]
            sums = [sum(kernel[i][j] / rows[i] * new_v[j] for j in range(m)) for i in range(n)]
        except ZeroDivisionError:
            break
        if not all(map(math.isfinite, new_v)):
            break
        u, v = [1 / each for each in sums], new_v
    return [[u[i] * kernel[i][j] * v[j] for j in range(m)] for i in range(n)]


def unit(vector):
    length = math.sqrt(sum(each**2 for each in vector))
    return [each / length if length else 0.0 for each in vector]


def mean(features):
    """The unit mean of the unit vectors of a class."""
    units = [unit(each) for each in features]
    return unit([sum(column) / len(units) for column in zip(*units)])


def distance(one, other, power):
    return sum(abs(a - b) ** power for a, b in zip(one, other)) ** (1 / power)


def moved(plan, rows):
    """The head's unit ``rows`` of the plan's rows, summed for each of its columns."""
    units = [unit(row) for row in rows]
    return [
        [sum(plan[i][j] * units[i][k] for i in range(len(units))) for k in range(len(units[0]))]
        for j in range(len(plan[0]))
    ]


def softmax(scores, temperature):
    powers = [math.exp(each / temperature) for each in scores]
    return [each / sum(powers) for each in powers]


def crossed(soft, scores, temperature):
    """Minus the sum of p log q."""
    return -sum(p * math.log(q) for p, q in zip(softmax(soft, temperature), softmax(scores, temperature)))


def loss(features, logits, old_logits, target, new_rows, old_rows, terms, T=2.0):
    """Of one image, in a task after the first; ``terms`` are the weights of the two branches in this epoch."""
    known, direction = len(old_logits), unit(features)
    of_new = [sum(a * b for a, b in zip(direction, unit(row))) for row in new_rows]
    of_old = [sum(a * b for a, b in zip(direction, unit(row))) for row in old_rows]
    share = known / len(logits)
    total = share * crossed(old_logits, logits[:known], T) - (1 - share) * math.log(softmax(logits, 1.0)[target])
    return total + terms[0] * crossed(of_new, logits[known:], T) + terms[1] * crossed(old_logits, of_old, T)
