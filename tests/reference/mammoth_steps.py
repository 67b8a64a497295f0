"""Slow twins of steps of Mammoth's methods at e75a491, written from its arithmetic; plain gradient descent.

``network``: a module with ``extract`` and ``classify``, which a step changes. A batch is (images, targets).
"""

import copy

import torch
from torch.nn.functional import cross_entropy


def descend(network, gradients, rate):
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter -= rate * gradient


def gradients_of(network, loss):
    found = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(network.parameters(), found)]


def joined(batch, drawn):
    return [torch.cat(pair) for pair in zip(batch, drawn)] if drawn else batch


def er(network, batch, drawn, rate):
    images, targets = joined(batch, drawn)
    descend(network, gradients_of(network, cross_entropy(network(images), targets)), rate)


def agem(network, batch, drawn, rate):
    own = gradients_of(network, cross_entropy(network(batch[0]), batch[1]))
    if drawn:
        theirs = gradients_of(network, cross_entropy(network(drawn[0]), drawn[1]))
        product = sum(float((a * b).sum()) for a, b in zip(own, theirs))
        if product < 0:
            factor = product / sum(float((b * b).sum()) for b in theirs)
            own = [a - factor * b for a, b in zip(own, theirs)]
    descend(network, own, rate)


def fdr(network, batch, drawn, rate, alpha=1.0):
    """``drawn``: (images, logits of then)."""
    descend(network, gradients_of(network, cross_entropy(network(batch[0]), batch[1])), rate)
    if drawn:
        apart = network(drawn[0]).softmax(1) - drawn[1].softmax(1)
        distance = (apart**2).sum(1).sqrt().mean()
        descend(network, gradients_of(network, alpha * distance), rate)


def interpolated(network, before, share):
    with torch.no_grad():
        for parameter, old in zip(network.parameters(), before, strict=True):
            parameter.copy_(old + share * (parameter - old))


def mer(network, steps, rate, beta, gamma):
    """``steps``: for each step on the batch, the batch and what it draws."""
    first = [parameter.detach().clone() for parameter in network.parameters()]
    for batch, drawn in steps:
        before = [parameter.detach().clone() for parameter in network.parameters()]
        er(network, batch, drawn, rate)
        interpolated(network, before, beta)
    interpolated(network, first, gamma)


def hal(network, batch, drawn, anchors, features, rate, weight, decay):
    """Returns the new mean features."""
    before = [parameter.detach().clone() for parameter in network.parameters()]
    images, targets = joined(batch, drawn)
    own = gradients_of(network, cross_entropy(network(images), targets))
    descend(network, own, rate)
    if anchors is not None:
        after = network(anchors).detach()
        interpolated(network, before, 0.0)
        distance = weight * ((after - network(anchors)) ** 2).mean()
        descend(network, [a + b for a, b in zip(own, gradients_of(network, distance))], rate)
    with torch.no_grad():
        return decay * features + (1 - decay) * network.extract(batch[0]).mean(0)


def hal_anchor(before, after, start, label, features, rate, weight, steps):
    """``before`` and ``after``: the networks; in Mammoth, one."""
    anchor = start.clone()
    label = torch.tensor([label])
    for _ in range(steps):
        anchor.requires_grad_()
        loss = -cross_entropy(after(anchor[None]), label) + cross_entropy(before(anchor[None]), label)
        loss = loss + (weight * (before.extract(anchor[None]) - features) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, anchor)
        anchor = (anchor - rate * gradient).detach()
    return anchor


def likeness(gradient, references):
    """Of gradients as flat lists."""
    best = 0.0
    for reference in references:
        product = sum(a * b for a, b in zip(gradient, reference))
        lengths = sum(a * a for a in gradient) ** 0.5 * sum(b * b for b in reference) ** 0.5
        best = max(best, product / lengths + 1)
    return best


def gss(scores, size, likeness_of_batch, likenesses, pick, uniform):
    """The slot of each image, or None; changes ``scores``. ``pick(shares)`` draws a slot, ``uniform()`` a number."""
    places = []
    for own in likenesses:
        place = None
        if len(scores) < size:
            place = len(scores)
            scores.append(likeness_of_batch)
        elif likeness_of_batch < 1:
            slot = pick([score / sum(scores) for score in scores])
            if uniform() < scores[slot] / (scores[slot] + own):
                place = slot
                scores[slot] = own
        places.append(place)
    return places


def copied(network):
    return copy.deepcopy(network)
