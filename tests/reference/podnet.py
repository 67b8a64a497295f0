"""A slow twin of PODNet's loss, image by image and number by number, written from the paper and PyCIL's arithmetic."""

import math


def unit(vector):
    length = math.sqrt(sum(value**2 for value in vector))
    return [value / max(length, 1e-12) for value in vector]


def logit(features, proxies, scale):
    """The scaled sum of the cosines to a class's proxies, weighted by their softmax."""
    direction = unit(features)
    cosines = [sum(a * b for a, b in zip(direction, unit(proxy))) for proxy in proxies]
    total = sum(math.exp(cosine) for cosine in cosines)
    return scale * sum(math.exp(cosine) / total * cosine for cosine in cosines)


def pycil_nca(logits, target, margin=0.6):
    """The margin is subtracted from every logit; the target's own term of the denominator is exp(0)."""
    shifted = [logit - margin for logit in logits]
    shifted = [logit - max(shifted) for logit in shifted]
    terms = [math.exp(0.0 if label == target else logit) for label, logit in enumerate(shifted)]
    return -(shifted[target] - math.log(sum(terms)))


def paper_nca(logits, target, scale, margin):
    """Equation 8 of the paper, whose scores are cosines: the scale multiplies the margin, too."""
    others = sum(math.exp(logit) for label, logit in enumerate(logits) if label != target)
    return max(0.0, -math.log(math.exp(logits[target] - scale * margin) / others))


def pod_spatial(stages, before):
    """Of one image: the mean over stages, nested lists of (c, H, W), of the distance of their pooled squares."""
    distances = [math.dist(pooled(new), pooled(old)) for new, old in zip(stages, before)]
    return sum(distances) / len(distances)


def pooled(stage):
    """The sums of squares of each row, then of each column, of all channels, as one unit vector."""
    rows = [sum(value**2 for value in row) for channel in stage for row in channel]
    columns = [sum(value**2 for value in column) for channel in stage for column in zip(*channel)]
    return unit(rows + columns)


def pod_flat(features, before):
    """One minus the cosine."""
    return 1 - sum(a * b for a, b in zip(unit(features), unit(before)))


def loss(images, targets, known, seen, lambda_c=5.0, lambda_f=1.0):
    """``images``: for each (features, stages, logits, features before, stages before), of a task after the first."""
    factor = math.sqrt(seen / (seen - known))
    total = 0.0
    for (features, stages, logits, old_features, old_stages), target in zip(images, targets):
        total += pycil_nca(logits, target) + factor * lambda_f * pod_flat(features, old_features)
        total += factor * lambda_c * pod_spatial(stages, old_stages)
    return total / len(images)
