"""FeCAM: distances by a covariance of each class."""

import numpy as np
import torch
from support.closed_form import ADAPTERS, assert_near, features_of_class, joined, learned, logits_of
from support.recorded import recorded


def test_fecam_has_a_covariance_of_each_class(digits, tmp_path):
    learner, parts = learned("fecam", digits, tmp_path, beta=0.4, alpha1=0.7, alpha2=0.3)
    features, labels = joined(parts)
    some, distances = features[::40], []
    for label in range(10):
        of_class = features[labels == label]
        covariance = np.cov(of_class.T**0.4)
        beside = ~np.eye(len(covariance), dtype=bool)
        shrunk = covariance + 0.7 * covariance.diagonal().mean() * ~beside
        shrunk += 0.3 * covariance[beside & (covariance != 0)].mean() * beside
        scale = np.sqrt(shrunk.diagonal())
        inverse = np.linalg.pinv(shrunk / np.outer(scale, scale))
        vectors = some**0.4, of_class.mean(0) ** 0.4
        unit = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in vectors]
        difference = unit[0] - unit[1]
        distances.append(np.einsum("nd,de,ne->n", difference, inverse, difference))
    assert_near(logits_of(learner, some), -np.stack(distances, 1))


def test_fecams_distances_in_pilot_are_by_correlations_of_a_covariances_rows(tmp_path):
    keys = {"correlations": "covariances", "beta": 1.0, "shift": 3.0}
    learner = recorded("fecam", tmp_path, tasks=2, **keys, **ADAPTERS).learner
    some = features_of_class(learner, 0)
    distances = []
    for label in range(4):
        of_class = features_of_class(learner, label)
        inverse = np.linalg.pinv(np.corrcoef(np.cov(of_class.T) + 3.0 * np.eye(12)))
        unit = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in (some, of_class.mean(0))]
        distances.append(np.einsum("nd,de,ne->n", unit[0] - unit[1], inverse, unit[0] - unit[1]))
    scores = learner.classify(torch.from_numpy(some).float())
    np.testing.assert_allclose(scores.detach().numpy(), -np.stack(distances, 1), rtol=1e-3, atol=1e-5)
