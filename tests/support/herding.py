"""What several tests share: see ``test_memory.py``."""

import numpy as np


def herding_by_the_book(features, quota):
    """As PyCIL: re-sum the chosen at each pick, delete them from the candidates."""
    vectors = features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-8)
    mean, chosen, picks, left = vectors.mean(0), [], [], list(range(len(vectors)))
    for k in range(1, min(quota, len(vectors)) + 1):
        total = np.sum(chosen, axis=0) if chosen else np.zeros_like(mean)
        distances = [np.sqrt(np.sum((mean - (vectors[i] + total) / k) ** 2)) for i in left]
        pick = left.pop(int(np.argmin(distances)))
        chosen.append(vectors[pick])
        picks.append(pick)
    return picks


def features(indices):
    return np.random.default_rng(7).normal(size=(60, 5))[indices]
