"""Sums of a ridge regression, updated by few images and solved for many."""

import numpy as np
import pytest
import torch

from pycil_wsc.networks.closed_form_nets import RidgeSums


@pytest.mark.parametrize("rows", [1, 12])
def test_few_images_update_a_factor_as_accurately_as_all_are_solved_at_once(rows):
    """Over 20 updates, as accurately as the full inverse in double precision: errors against a least-squares solution
    of the rows themselves, whose condition number is the square root of that of their squares (up to 1e7).
    """
    generator = torch.Generator().manual_seed(0)
    sums = RidgeSums(200, 0.1, torch.float64)
    sums.grow(7)
    features = torch.randn(20 * rows, 200, generator=generator).relu().double() * 30
    labels = torch.randint(7, (len(features),), generator=generator)
    for few, theirs in zip(features.split(rows), labels.split(rows), strict=True):
        sums.add(few, theirs)
    assert len(sums.factor) == 200 and not len(sums.gram), "updated, never made from scratch"
    X, Y = features.numpy(), np.eye(7)[labels]
    rows_of_ridge = np.concatenate([X, 0.1**0.5 * np.eye(200)]), np.concatenate([Y, np.zeros((200, 7))])
    expected = np.linalg.lstsq(*rows_of_ridge, rcond=None)[0]
    inverted = np.linalg.inv(X.T @ X + 0.1 * np.eye(200)) @ X.T @ Y
    solutions = sums.solution().numpy(), inverted
    errors = [np.abs(solution - expected).max() / np.abs(expected).max() for solution in solutions]
    assert errors[0] < errors[1] < 1e-6


@pytest.mark.parametrize("order", [(5, 300, 5), (300, 5, 300), (5, 5, 300)])
def test_few_and_many_images_may_alternate_and_be_taken_out_again(order):
    generator = torch.Generator().manual_seed(0)
    sums = RidgeSums(100, 0.1, torch.float64)
    sums.grow(4)
    features = torch.randn(sum(order), 100, generator=generator).relu().double()
    labels = torch.randint(4, (len(features),), generator=generator)
    for few, theirs in zip(features.split(order), labels.split(order), strict=True):
        sums.add(few, theirs)
    sums.remove(features[:3], labels[:3])
    X, Y = features[3:].numpy(), np.eye(4)[labels[3:]]
    expected = np.linalg.solve(X.T @ X + 0.1 * np.eye(100), X.T @ Y)
    assert np.abs(sums.solution().numpy() - expected).max() < 1e-9 * np.abs(expected).max()
    assert sums.counts.tolist() == np.bincount(labels[3:], minlength=4).tolist()
