"""SLCA with CoFiMA: the average of the backbone, against a slow twin."""

import copy

import pytest
import torch
from reference import merging, penalties
from support.methods import after

from pycil_wsc.methods.pretrained.slca_cofima import SLCACoFiMA
from pycil_wsc.training.batches import Sampling

KEYS = {"init_cls": 3, "increment": 3, "precision": "fp32"}


@pytest.mark.parametrize("weighted", [True, False])
def test_slca_cofima_averages_the_backbone_alone_and_aligns_the_head_on_it(weighted, digits, tmp_path, monkeypatch):
    networks, kept, fishers = [], [], []
    average = SLCACoFiMA.average

    def watched(learner, task):
        network = copy.deepcopy(learner.network).requires_grad_(True)
        sampling = Sampling(indices=task.train_indices, mixed=False)
        batches = [(batch.images, batch.targets) for batch in learner.batches.of(sampling, task.index, "fisher")]
        networks.append(network)
        fishers.append(penalties.fisher_of_batches(network, batches, 1e-3))
        average(learner, task)
        kept.append(copy.deepcopy(learner.network))

    monkeypatch.setattr(SLCACoFiMA, "average", watched)
    keys = {"fishermax": 1e-3, "fisher_weighting": weighted, "init_lr": 0.1, "lrate": 0.1, "backbone_lr_factor": 1.0}
    learner, _ = after("slca_cofima", 2, digits, tmp_path, **KEYS | keys)
    torch.testing.assert_close(dict(kept[0].named_parameters()), dict(networks[0].named_parameters()))
    for name, value in kept[1].backbone.named_parameters():
        place = f"backbone.{name}"
        old, new = (each.get_parameter(place).flatten().tolist() for each in (kept[0], networks[1]))
        expected = [0.6 * before + 0.4 * now for before, now in zip(old, new, strict=True)]
        if weighted:
            expected = merging.weighted_by_fisher(old, new, 0.4, fishers[0][place], fishers[1][place])
        torch.testing.assert_close(value.flatten(), torch.tensor(expected), rtol=1e-3, atol=1e-5)
        assert torch.equal(value, learner.network.get_parameter(place)), "the next task starts from it"
    torch.testing.assert_close(kept[1].head.state_dict(), networks[1].head.state_dict())
    torch.testing.assert_close(learner.unaligned, networks[1].head.state_dict())
