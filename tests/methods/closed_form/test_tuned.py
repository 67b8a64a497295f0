"""RanPAC and FeCAM with a transformer that learns the first task, as in PILOT, against slow twins."""

import pytest
import torch
from reference import tuning
from support.closed_form import ADAPTERS, PROJECTED
from support.recorded import adapters, part_of, recorded, without_dropout
from support.small_runs import batch_of
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.runs.planning import check_backbone

HEADS = 2


@pytest.mark.parametrize("name", ["ranpac", "fecam"])
def test_tuning_another_architecture_is_refused_before_anything_is_trained(name):
    keys = {"model_name": name, "convnet_type": "resnet8"}
    with pytest.raises(
        UserError, match="^convnet_type: 'resnet8' is not a plain vision transformer; .*set convnet_type"
    ):
        check_backbone(resolve(keys | {"tuning": "adapter"}), 8)
    check_backbone(resolve(keys), 8)


@pytest.mark.parametrize("name", ["ranpac", "fecam"])
def test_adapters_learn_the_first_task_with_a_cosine_classifier(name, tmp_path):
    keys = ADAPTERS | (PROJECTED if name == "ranpac" else {})
    learned = recorded(name, tmp_path, tasks=2, prepare=without_dropout, adapt=True, **keys)
    (phase,) = learned.phases
    moved = {place for place, value in phase.after.items() if not torch.equal(value, phase.before[place])}
    assert any(place.startswith("backbone.sets.0.") for place in moved)
    assert all(place.startswith(("backbone.sets.0.", "first_head.")) for place in moved)
    images, targets = phase.batches[-1]
    twin = adapters(part_of(phase.after, "backbone.sets.0."))
    weights = part_of(phase.after, "backbone.vit.")
    features = torch.stack([tuning.features(weights, HEADS, image, adapters=twin) for image in images])
    rows, scale = phase.after["first_head.weight"], phase.after["first_head.scale"]
    expected = scale * torch.stack([features @ row / features.norm(dim=1) / row.norm() for row in rows], 1)
    learned.learner.network.first_head = head = learned.learner.first_head(12, 2)
    head.load_state_dict({"weight": rows, "scale": scale})
    loss, logits = learned.learner.loss(batch_of(images, targets))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, cross_entropy(expected, targets), rtol=1e-4, atol=1e-5)
