"""The nearest class mean, against the solution for all images at once."""

import numpy as np
import pytest
from support.closed_form import joined, learned, logits_of


def test_ncm_is_the_nearest_mean(digits, tmp_path):
    learner, parts = learned("ncm", digits, tmp_path)
    features, labels = joined(parts)
    all_logits = logits_of(learner, features[:50])
    for x, logits in zip(features[:50], all_logits, strict=True):
        for label, logit in enumerate(logits):
            difference = x - features[labels == label].mean(0)
            assert (x @ x - difference @ difference) / 2 == pytest.approx(logit, abs=1e-4 * np.abs(all_logits).max())
