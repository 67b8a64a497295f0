"""What PILOT's methods for prompts compute, image by image, with the slow transformer of :mod:`reference.tuning`."""

import math

import torch
from reference import tuning


def unit(vector):
    return vector / max(vector.norm().item(), 1e-6)


def nearest(pool_keys, query, count):
    """The numbers of the ``count`` keys with the largest cosine."""
    cosines = [float(unit(query) @ unit(key.detach())) for key in pool_keys]
    return sorted(range(len(cosines)), key=lambda number: -cosines[number])[:count]


def elected(choices, count):
    """The numbers that most images chose; there is no tie in the tests."""
    votes = {}
    for number in (number for chosen in choices for number in chosen):
        votes[number] = votes.get(number, 0) + 1
    ordered = sorted(votes, key=lambda number: -votes[number])
    assert len(ordered) == count or votes[ordered[count - 1]] > votes[ordered[count]], "a tie"
    return ordered[:count]


def l2p_features(weights, heads, image, prompts):
    """The mean over prompts (p, d), which have the class token's position."""
    tokens = tuning.features(weights, heads, image, prompts=prompts + weights["pos_embed"][0, :1])
    return tokens[1 : 1 + len(prompts)].mean(0)


def prefixes_of(pairs):
    """{block: (keys, values)} as the slow transformer takes them."""
    return {index: {"keys": keys, "values": values, "calibrated": False} for index, (keys, values) in pairs.items()}


def coda_prompt(query, prompts, keys, attention):
    """The sum of components, each weighted by the cosine of its key and the attended query."""
    total = 0
    for prompt, key, focus in zip(prompts, keys, attention):
        attended = query * focus
        total = total + (attended @ key) / (attended.norm() * key.norm()) * prompt
    return total


def coda_rates(base, epochs):
    """CODA's schedule with its off-by-one: after the first epoch it takes its first value once more."""
    rates, position = [], -1
    rate = base
    for _ in range(epochs):
        rates.append(rate)
        position += 1
        rate = base * math.cos(99 * math.pi * position / (200 * (epochs - 1)))
    return rates


def pull(pool_keys, query, chosen):
    """The cosines of the chosen keys, added up."""
    return sum(unit(query) @ (pool_keys[number] / pool_keys[number].norm()) for number in chosen)


def cross_entropy(logits, target):
    return torch.logsumexp(logits, 0) - logits[target]
