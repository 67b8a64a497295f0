"""ACIL and DS-AL, against the recursions of their papers."""

import numpy as np
import pytest
from support.closed_form import assert_near, learned, logits_of


class Recursive:
    """Ridge regression whose inverse autocorrelation is updated batch by batch (Zhuang et al., 2022, eq. 9 and 10)."""

    def __init__(self, size, gamma):
        self.inverse, self.weight = np.eye(size) / gamma, np.zeros((size, 10))

    def update(self, X, Y):
        gain = self.inverse @ X.T @ np.linalg.inv(np.eye(len(X)) + X @ self.inverse @ X.T)
        self.inverse = self.inverse - gain @ X @ self.inverse
        self.weight = self.weight + self.inverse @ X.T @ (Y - X @ self.weight)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", ["acil", "ds-al"])
def test_the_analytic_methods_are_their_recursions(name, repeats, digits, tmp_path):
    learner, parts = learned(name, digits, tmp_path, inplace_repeat=repeats)
    projection = learner.network.head.projection.double().numpy()
    main, compensation = Recursive(96, 0.1), Recursive(96, 0.2)
    for features, labels in parts:
        features, labels = features.repeat(repeats, 0), labels.repeat(repeats)
        first = labels.min()
        for start in range(0, len(labels), 100):
            Z, Y = features[start : start + 100] @ projection, np.eye(10)[labels[start : start + 100]]
            main.update(np.maximum(Z, 0), Y)
            residuals = Y - np.maximum(Z, 0) @ main.weight
            residuals[:, :first] = 0
            compensation.update(np.tanh(Z), residuals)
    Z = features @ projection
    expected = np.maximum(Z, 0) @ main.weight
    if name == "ds-al":
        expected = expected + 0.6 * np.tanh(Z) @ compensation.weight
    assert_near(logits_of(learner, features), expected)


@pytest.mark.parametrize("name", ["acil", "ds-al"])
def test_updates_of_few_images_are_those_of_many_parts(name, digits, tmp_path):
    """The recursion again, in parts of 6 images, of which 96 features take each as an update of the factor."""
    learner, parts = learned(name, digits, tmp_path, IL_batch_size=6)
    assert len(learner.network.head.sums.factor) == 96
    projection = learner.network.head.projection.double().numpy()
    main, compensation = Recursive(96, 0.1), Recursive(96, 0.2)
    for features, labels in parts:
        first = labels.min()
        for start in range(0, len(labels), 6):
            Z, Y = features[start : start + 6] @ projection, np.eye(10)[labels[start : start + 6]]
            main.update(np.maximum(Z, 0), Y)
            residuals = Y - np.maximum(Z, 0) @ main.weight
            residuals[:, :first] = 0
            compensation.update(np.tanh(Z), residuals)
    expected = np.maximum(Z, 0) @ main.weight
    if name == "ds-al":
        expected = expected + 0.6 * np.tanh(Z) @ compensation.weight
    assert_near(logits_of(learner, features[start:]), expected)
