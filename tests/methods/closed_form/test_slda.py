"""SLDA, against the solution for all images at once."""

import numpy as np
from sklearn.covariance import OAS
from support.closed_form import assert_near, joined, learned, logits_of


def test_slda_has_one_covariance_for_all_classes(digits, tmp_path):
    learner, parts = learned("slda", digits, tmp_path, shrinkage=0.01)
    features, labels = joined(parts)
    means = np.stack([features[labels == label].mean(0) for label in range(10)])
    estimate = OAS(assume_centered=True).fit(features - means[labels]).covariance_
    inverse = np.linalg.inv(0.99 * estimate + 0.01 * np.eye(len(estimate)))
    expected = features @ inverse @ means.T - np.einsum("cd,de,ce->c", means, inverse, means) / 2
    assert_near(logits_of(learner, features), expected)
