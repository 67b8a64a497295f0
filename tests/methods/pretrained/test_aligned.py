"""SLCA, DGR and DUCT against slow twins of PILOT's arithmetic."""

import copy
import math

import numpy as np
import pytest
import torch
from reference import merging, penalties, pilot
from reference.transport import sinkhorn
from support.methods import after, digits, grown  # noqa: F401  # a fixture
from support.small_runs import batch_of

from pycil_wsc.methods.pretrained.slca_cofima import SLCACoFiMA
from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.step.backward import Backward

KEYS = {"init_cls": 3, "increment": 3, "precision": "fp32"}
BATCH = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pass_backward(learner, phase, batch):
    learner.zero_grad(set_to_none=True)
    backward = Backward(learner, phase)
    backward(batch)
    return backward


def test_slcas_alignment_is_the_twins_loss_of_the_drawn_features(digits, tmp_path):  # noqa: F811
    learner, tasks = after("slca", 2, digits, tmp_path, **KEYS)
    phase = learner.alignment(tasks[1])
    assert phase.network is learner.network.head
    rows, targets = next(phase.source.batches(phase.indices, phase.targets, 256, train=True, seed=3, shuffle=False))
    loss, logits = learner.alignment_loss(batch_of(rows[:4], targets[:4]))
    expected = pilot.aligned_loss(logits.tolist(), targets[:4].tolist(), [3, 3], 0.1)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_slca_draws_each_class_from_the_distribution_of_its_features(digits, tmp_path):  # noqa: F811
    learner, tasks = after("slca", 2, digits, tmp_path, **KEYS)
    indices = np.flatnonzero(learner.manager.train_targets == 4)
    features = learner.outputs.features(indices).astype(float)
    covariance = learner.factors[4] @ learner.factors[4].T
    expected = np.cov(features.T) + 1e-4 * np.eye(features.shape[1])
    np.testing.assert_allclose(covariance.numpy(), expected, atol=1e-5)
    scaled = learner.scaled_means(tasks[1])
    for label in (1, 4):
        ours = scaled[label] / learner.means[label]
        assert ours.mean().item() == pytest.approx(pilot.mean_scale(label, [3, 3]), abs=1e-6)
    source = learner.alignment(tasks[1]).source
    source.rows = 20_000
    drawn, labels = source.drawn(torch.Generator().manual_seed(0))
    many = drawn[labels == 4].double()
    np.testing.assert_allclose(many.mean(0).numpy(), scaled[4].double().numpy(), atol=0.05)
    np.testing.assert_allclose(np.cov(many.numpy().T), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("kept", [False, True])
def test_the_next_task_begins_with_slcas_head_as_it_was_before_the_alignment_unless_asked(kept, digits, tmp_path):  # noqa: F811
    learner, tasks = after("slca", 2, digits, tmp_path, keep_alignment=kept, **KEYS)
    aligned = learner.network.head.parts[0].weight.clone()
    before = learner.unaligned["parts.0.weight"].clone()
    assert not torch.equal(aligned, before)
    grow_for(learner, tasks[2])
    learner.begin_task(tasks[2])
    assert torch.equal(learner.network.head.parts[0].weight, aligned if kept else before)
    assert not learner.network.head.parts[0].weight.requires_grad


@pytest.mark.parametrize("weighted", [True, False])
def test_slca_cofima_averages_the_backbone_alone_and_aligns_the_head_on_it(weighted, digits, tmp_path, monkeypatch):  # noqa: F811
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


@pytest.mark.parametrize("task", [0, 1])
def test_dgrs_gradient_of_the_head_is_the_twins(task, digits, tmp_path):  # noqa: F811
    learner, tasks = after("dgr", task, digits, tmp_path, **KEYS)
    grow_for(learner, tasks[task])
    learner.begin_task(tasks[task])
    old = tasks[task].num_old
    with torch.no_grad():  # otherwise the student is the teacher
        learner.network.head.weight[:old] += 0.1 * torch.randn(old, learner.network.head.in_features)
        learner.network.head.renew()
    targets = torch.tensor([0, 1, 2, 0, 1, 2]) + (torch.tensor([0, 3, 0, 3, 0, 3]) if task else 0)
    (phase,) = learner.phases(tasks[task])
    learner.received.copy_(torch.linspace(0.1, 0.6, len(learner.received)))
    received = learner.received.tolist()
    batch = batch_of(BATCH, targets)
    backward = pass_backward(learner, phase, batch)
    head = learner.network.head
    ours = torch.cat([head.weight.grad, head.bias.grad[:, None]], 1).tolist()
    distilled = torch.cat([head.copy_weight.grad, head.copy_bias.grad[:, None]], 1).tolist() if old else []
    learner.after_backward(batch, backward)
    expected, sums = pilot.reweighted(ours, distilled, received, old, learner.config.options.gammar_r)
    found = torch.cat([head.weight.grad, head.bias.grad[:, None]], 1)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(learner.received, torch.tensor(sums), rtol=1e-5, atol=1e-7)


def test_dgrs_cross_entropy_is_adjusted_by_the_classes_frequencies(digits, tmp_path):  # noqa: F811
    learner, tasks = after("dgr", 1, digits, tmp_path, memory_per_class=3, **KEYS)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    counts = [3] * 3 + [int((learner.manager.train_targets == label).sum()) for label in range(3, 6)]
    expected = [math.log(each / sum(counts)) for each in counts]
    assert learner.prior.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_distillation_without_a_gradient_does_not_move_dgrs_head_by_its_rounding(digits, tmp_path):  # noqa: F811
    """In a task's first step the student is its teacher; PILOT scales up what rounding leaves of the gradient."""
    learner, tasks = after("dgr", 1, digits, tmp_path, **KEYS)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    (phase,) = learner.phases(tasks[1])
    learner.eval()
    batch = batch_of(BATCH, torch.tensor([0, 4, 2, 3, 1, 5]))
    backward = pass_backward(learner, phase, batch)
    head = learner.network.head
    norm = head.weight.grad.norm()
    assert head.copy_weight.grad.norm() < 1e-5 * norm
    distilled = torch.cat([head.copy_weight.grad, head.copy_bias.grad[:, None]], 1)
    head.copy_weight.grad.zero_()
    head.copy_bias.grad.zero_()
    learner.after_backward(batch, backward)
    without = head.weight.grad.clone()
    backward = pass_backward(learner, phase, batch)
    learner.received.zero_()
    learner.after_backward(batch, backward)
    assert distilled.any()
    assert (head.weight.grad - without).norm() < 0.05 * norm


def test_ducts_backbone_is_the_initial_one_with_the_weighted_changes_of_all_tasks(digits, tmp_path):  # noqa: F811
    learner, tasks = after("duct", 1, digits, tmp_path, **KEYS)
    initial = learner.initial.state_dict()
    first = {name: value.clone() for name, value in learner.change.items()}
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    for name, value in learner.network.backbone.state_dict().items():
        assert torch.equal(value, initial[name]), "each task trains the initial backbone"
    with torch.no_grad():
        for parameter in learner.network.backbone.parameters():
            parameter += 0.01
    cosines = [
        torch.cosine_similarity(learner.means[label], mean, dim=0).item() for label, mean in learner.new_means(tasks[1])
    ]
    assert len(cosines) == 3
    learner.merge_backbone(tasks[1])
    name = next(name for name, _ in learner.network.backbone.named_parameters())
    expected = initial[name] + first[name] + 0.25 * sum(cosines) / 3 * 0.01
    torch.testing.assert_close(learner.network.backbone.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


def test_ducts_old_rows_move_towards_the_new_ones_by_optimal_transport(digits, tmp_path):  # noqa: F811
    learner, tasks = grown("duct", 2, digits, tmp_path, ot_reg=0.5, **KEYS)
    learner.means.copy_(0.3 * torch.randn(6, learner.means.shape[1], generator=torch.Generator().manual_seed(0)))
    before = learner.network.head.weight.tolist()
    learner.merge_head(tasks[1])
    means = learner.means.double().tolist()
    costs = [[math.dist(means[new], means[old]) for old in range(3)] for new in range(3, 6)]
    plan = sinkhorn(costs, [1 / 3] * 3, [1 / 3] * 3, 0.5)
    expected = pilot.transported((before[:3], before[3:]), plan, 0.25) + before[3:]
    torch.testing.assert_close(learner.network.head.weight, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_ducts_rate_is_a_third_in_its_first_five_epochs(digits, tmp_path):  # noqa: F811
    learner, tasks = grown("duct", 1, digits, tmp_path, lr_re=0.3, epc_re=7, **KEYS)
    retraining = learner.retraining(tasks[0])
    assert [retraining.lr(epoch) for epoch in (0, 4, 5)] == pytest.approx([0.1, 0.1, 0.3])
    assert retraining.network is learner.network.head
