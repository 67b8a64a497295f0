"""WA's weight alignment, which DER and MEMO use too. The loss is tested in ``test_distilling.py``."""

import math

import pytest
import torch
from support.methods import SILENT, after, perturb

from pycil_wsc.networks.heads import IncrementalHead


@pytest.mark.parametrize("name", ["wa", "der", "memo"])
def test_aligned_heads_have_equal_mean_norms_before_exemplars_are_chosen(name, digits, tmp_path):
    learner, tasks = after(name, 1, digits, tmp_path)
    seen = {}
    learner.memory.update = lambda *_: seen.update(norms=learner.network.head.weight.detach().norm(dim=1))
    learner.learn(tasks[1], SILENT)
    assert seen["norms"][:4].mean().item() == pytest.approx(seen["norms"][4:].mean().item(), rel=1e-5)


def test_alignment_scales_new_rows_alone_and_no_bias():
    head = IncrementalHead(5, 4)
    head.grow(7)
    perturb(head)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.align(4, factor=2.0)
    assert torch.equal(head.weight[:4], weight[:4]) and torch.equal(head.bias, bias) and bias.all()
    old, new = (sum(math.hypot(*row) for row in rows.tolist()) / len(rows) for rows in (weight[:4], weight[4:]))
    torch.testing.assert_close(head.weight[4:], 2 * old / new * weight[4:])
