"""RanPAC: a ridge regression on random features, and the choice of its parameter."""

import numpy as np
import pytest
import torch
from support.closed_form import ADAPTERS, PROJECTED, assert_near, features_of_class, joined, learned, logits_of
from support.recorded import recorded

from pycil_wsc.methods.closed_form.ranpac import RIDGES, RandomProjection


def test_ranpac_is_a_ridge_regression_whose_parameter_suits_images_held_out(digits, tmp_path):
    learner, parts = learned("ranpac", digits, tmp_path)
    projection = learner.network.head.projection.double().numpy()
    features, labels = joined(parts)
    cosines = features @ projection[:, 0] / np.linalg.norm(features, axis=1) / np.linalg.norm(projection[:, 0])
    held_out = 64 * np.sqrt(features.shape[1]) * cosines % 1 < 1 / 5
    assert 0.1 < held_out.mean() < 0.3
    X, Y = np.maximum(features @ projection, 0), np.eye(10)[labels]

    def solved(ridge, rows):
        return np.linalg.solve(X[rows].T @ X[rows] + ridge * np.eye(X.shape[1]), X[rows].T @ Y[rows])

    errors = [np.square(X[held_out] @ solved(ridge, ~held_out) - Y[held_out]).mean() for ridge in RIDGES]
    best = RIDGES[int(np.argmin(errors))]
    assert learner.network.head.ridge() == best and RIDGES[0] < best < RIDGES[-1]
    assert_near(logits_of(learner, features), X @ solved(best, slice(None)))


@pytest.mark.parametrize("per_class", [1, 2])
def test_ranpac_learns_from_one_image_of_each_class(per_class):
    """Every class is in the regression, whether or not the only image of one is held out for the ridge parameter."""
    head = RandomProjection(4, 64, torch.float64)
    head.grow(6)
    features = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(per_class, 0)
    labels = torch.arange(6).repeat_interleave(per_class)
    head.add(features, labels)
    head.solve()
    assert head(features).argmax(1).tolist() == labels.tolist()
    assert head.ridge() == 1.0, "no class has images on both sides, which tell nothing about the ridge then"


def test_ranpac_chooses_its_ridge_again_only_when_that_may_matter():
    """After a class, a tenth more images, or one that is taken out or moved; in between it is the regression of all."""
    head = RandomProjection(6, 16, torch.float64)
    head.grow(4)
    features = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(130) % 3
    head.add(features[:100], labels[:100])

    def chosen_again():
        """Whether solving replaces another parameter by the chosen one."""
        head.chosen[0] = 3e-3
        head.solve()
        return head.chosen[0].item() != 3e-3

    assert chosen_again(), "there was no choice before"
    head.add(features[100:109], labels[100:109])
    assert not chosen_again()
    X, Y = (features[:109].double() @ head.projection.double()).relu().numpy(), np.eye(4)[labels[:109]]
    assert_near(head.weight.numpy(), np.linalg.solve(X.T @ X + 3e-3 * np.eye(16), X.T @ Y).T)
    again = RandomProjection(6, 16, torch.float64)
    again.grow(4)
    again.load_state_dict(head.state_dict())
    assert torch.equal(again.chosen, head.chosen), "a saved learner goes on with the same choice"
    head.add(features[109:110], labels[109:110])
    assert chosen_again(), "110 images are a tenth more than 100"
    head.relabel(features[:1], labels[:1], torch.ones(1, dtype=torch.int64))
    assert chosen_again()
    head.remove(features[1:2], labels[1:2])
    assert chosen_again()
    head.add(features[:1], torch.full((1,), 3))
    assert chosen_again(), "a fourth class has come"
    head.merge(3, 0)
    assert chosen_again() and not chosen_again()


def test_ranpacs_scores_in_pilot_are_cosines_with_the_rows_of_the_regression(tmp_path):
    learner = recorded("ranpac", tmp_path, tasks=2, scores="cosine", **PROJECTED, **ADAPTERS).learner
    head = learner.network.head
    rows = np.concatenate([features_of_class(learner, label) for label in range(4)])
    labels = np.repeat(range(4), 6)
    wide = np.maximum(rows @ head.projection.double().numpy(), 0)
    weight = np.linalg.solve(wide.T @ wide + head.ridge() * np.eye(24), wide.T @ np.eye(4)[labels]).T
    expected = wide @ weight.T / np.linalg.norm(wide, axis=1)[:, None] / np.linalg.norm(weight, axis=1)
    scores = learner.classify(torch.from_numpy(rows).float())
    np.testing.assert_allclose(scores.detach().numpy(), expected, atol=1e-4)
