"""What methods of other rooms do with a transformer in PILOT, against its arithmetic written out."""

import numpy as np
import pytest
import torch
from reference import tuning
from support.methods import SILENT
from support.recorded import adapters, images_of, part_of, recorded, without_dropout
from support.small_runs import batch_of
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError

pytest.importorskip("timm")

TUNED = {"tuning": "adapter", "ffn_num": 3}
PROJECTED = {"projection": 24}  # of RanPAC
HEADS = 2


def labelled(learner, label):
    """The features of a class's training images: float64 (n, d)."""
    indices = np.flatnonzero(learner.manager.train_targets == label)
    return learner.outputs.features(indices).astype(np.float64)


@pytest.mark.parametrize("trained", [False, True])
def test_memo_shares_all_blocks_but_the_last_of_which_each_task_has_its_own(trained, tmp_path):
    keys = {"convnet_type": "timm:vit_tiny_patch16_224", "memory_per_class": 2, "train_base": trained}
    made = recorded("memo", tmp_path, tasks=1, **keys)
    learner = made.learner
    first = {name: value.clone() for name, value in learner.network.state_dict().items()}
    learner.learn(learner.manager.tasks[1], SILENT)
    state = learner.eval().network.state_dict()
    trunk = part_of(state, "trunk.vit.")
    last = 1 + max(int(name.split(".")[1]) for name in trunk if name.startswith("blocks."))
    images, _ = images_of(made.run, "test", [0, 3])
    found = learner.extract(images)
    for number in range(2):
        block = part_of(state, f"blocks.{number}.")
        weights = trunk | {
            name.replace("block.", f"blocks.{last}.") if name.startswith("block.") else name: value
            for name, value in block.items()
        }
        expected = torch.stack([tuning.features(weights, HEADS, image) for image in images])
        torch.testing.assert_close(found[:, number * 12 : number * 12 + 12], expected, rtol=1e-4, atol=1e-5)
    moved = {name for name, value in first.items() if name in state and not torch.equal(state[name], value)}
    assert any(name.startswith("trunk.") for name in moved) is trained
    assert not any(name.startswith("blocks.0.") for name in moved)


def test_memos_last_block_begins_pre_trained_or_as_in_pilot_at_random(tmp_path):
    keys = {"convnet_type": "timm:vit_tiny_patch16_224", "memory_per_class": 2}
    states = [
        recorded("memo", tmp_path, tasks=1, pretrained_block=kept, **keys).phases[0].before for kept in (True, False)
    ]
    other = {name for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    last = {name for name in states[0] if name.startswith("blocks.0.block.") and "norm" not in name}
    assert other - {"head.weight", "aux_head.weight"} == last
    bound = 12**-0.5
    random = states[1]["blocks.0.block.attn.qkv.weight"]
    assert 0.9 * bound < random.abs().max() <= bound, "as torch's linear layers begin"
    with pytest.raises(UserError, match="^pretrained_block: is of a transformer"):
        resolve({"model_name": "memo", "pretrained_block": False})


@pytest.mark.parametrize("name", ["ranpac", "fecam"])
def test_adapters_learn_the_first_task_with_a_cosine_classifier(name, tmp_path):
    keys = TUNED | (PROJECTED if name == "ranpac" else {})
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


def test_ranpacs_scores_in_pilot_are_cosines_with_the_rows_of_the_regression(tmp_path):
    learner = recorded("ranpac", tmp_path, tasks=2, scores="cosine", **PROJECTED, **TUNED).learner
    head = learner.network.head
    rows = np.concatenate([labelled(learner, label) for label in range(4)])
    labels = np.repeat(range(4), 6)
    wide = np.maximum(rows @ head.projection.double().numpy(), 0)
    weight = np.linalg.solve(wide.T @ wide + head.ridge() * np.eye(24), wide.T @ np.eye(4)[labels]).T
    expected = wide @ weight.T / np.linalg.norm(wide, axis=1)[:, None] / np.linalg.norm(weight, axis=1)
    scores = learner.classify(torch.from_numpy(rows).float())
    np.testing.assert_allclose(scores.detach().numpy(), expected, atol=1e-4)


def test_fecams_distances_in_pilot_are_by_correlations_of_a_covariances_rows(tmp_path):
    keys = {"correlations": "covariances", "beta": 1.0, "shift": 3.0}
    learner = recorded("fecam", tmp_path, tasks=2, **keys, **TUNED).learner
    some = labelled(learner, 0)
    distances = []
    for label in range(4):
        own = labelled(learner, label)
        inverse = np.linalg.pinv(np.corrcoef(np.cov(own.T) + 3.0 * np.eye(12)))
        unit = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in (some, own.mean(0))]
        distances.append(np.einsum("nd,de,ne->n", unit[0] - unit[1], inverse, unit[0] - unit[1]))
    scores = learner.classify(torch.from_numpy(some).float())
    np.testing.assert_allclose(scores.detach().numpy(), -np.stack(distances, 1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("aligned", [True, False])
def test_ders_head_is_aligned_after_a_task_as_in_pycil_or_not_as_in_pilot(aligned, tmp_path):
    learned = recorded("der", tmp_path, tasks=2, memory_per_class=2, align_head=aligned)
    norms = learned.learner.network.head.weight.norm(dim=1)
    before = learned.phases[1].after["head.weight"].norm(dim=1)
    factor = before[:2].mean() / before[2:].mean()
    assert abs(factor - 1) > 0.01
    torch.testing.assert_close(norms[2:], before[2:] * (factor if aligned else 1))
