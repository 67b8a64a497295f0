"""A slow twin of LUCIR's loss, image by image and number by number, written from Mammoth's arithmetic."""

import math


def cosine(a, b):
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b)) / lengths


def loss(images, prototypes, targets, known, scale, lamda, lamda_mr=1.0, k=2, margin=0.5):
    """``images``: for each (features, features before, or None in the first task); ``known``: the old classes."""
    classification = distances = 0.0
    rankings = []
    for (features, before), target in zip(images, targets):
        cosines = [cosine(features, prototype) for prototype in prototypes]
        total = sum(math.exp(scale * each) for each in cosines)
        classification -= scale * cosines[target] - math.log(total)
        if before is None:
            continue
        distances += 1 - cosine(features, before)
        if target < known:
            nearest = sorted(cosines[known:])[-k:]
            rankings.append(sum(max(0.0, each - cosines[target] + margin) for each in nearest) / len(nearest))
    ranking = sum(rankings) / max(1, len(rankings))
    return (classification + lamda * distances) / len(targets) + lamda_mr * ranking


def lamda(task, base=5.0):
    """Mammoth's weight of the distillation in ``task``, counted from 0."""
    return base * math.sqrt(task - 1)


def imprinted(features, old):
    """The prototype of a class: ``features`` of its images, and the prototypes of the old classes."""
    directions = [[value / math.hypot(*each) for value in each] for each in features]
    mean = [sum(column) / len(directions) for column in zip(*directions)]
    length = sum(math.hypot(*prototype) for prototype in old) / len(old)
    return [length * value / math.hypot(*mean) for value in mean]
