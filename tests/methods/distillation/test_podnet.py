"""PODNet: proxies, the NCA loss, distillation of stages, and the balanced second phase."""

import numpy as np
import pytest
import torch
from reference import podnet as twin
from support.methods import BATCH, SILENT, SMALL, TARGETS, grown, moved, snapshot
from support.small_runs import assert_slopes, batch_of, killed_at, without_measurements

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.memory.exemplar_selection import herding
from pycil_wsc.errors import UserError
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.methods.distillation.podnet import nca
from pycil_wsc.networks.heads import ProxyHead
from pycil_wsc.networks.stages import with_stages
from pycil_wsc.runs.run import Run
from pycil_wsc.training.optimizers.parameter_groups import set_rate

KEYS = {"convnet_type": "resnet8", "convnet_options.width": 2, "nb_proxy": 3, "milestones": []}
KEYS |= {"init_milestones": []}


def twins_loss(learner, batch):
    """The slow twin's loss of the batch, from what the networks put out."""
    network, teacher, images = learner.network, learner.teacher, []
    with torch.no_grad():
        now, before = with_stages(network.backbone, batch), with_stages(teacher.backbone, batch)
    proxies = torch.cat([network.head.old, network.head.weight]).reshape(-1, 3, network.head.in_features).tolist()
    for each in range(len(batch)):
        features, old = now[0][each].tolist(), before[0][each].tolist()
        logits = [twin.logit(features, of_class, network.head.scale.item()) for of_class in proxies]
        stages, old_stages = ([stage[each].tolist() for stage in outputs] for outputs in (now[1], before[1]))
        images.append((features, stages, logits, old, old_stages))
    return twin.loss(images, TARGETS.tolist(), 4, 7)


def test_the_loss_is_the_sum_written_out_and_its_gradient_is_the_slope(digits, tmp_path, monkeypatch):
    learner, _ = grown("podnet", 2, digits, tmp_path, **KEYS)
    learner.double().eval()
    images = BATCH.double()
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # so that slopes can be measured
    loss, _ = learner.loss(batch_of(images, TARGETS))
    assert loss.item() == pytest.approx(twins_loss(learner, images), rel=1e-10)
    loss.backward()
    names = ("head.scale", "head.weight", "backbone.stage3.0.conv2.weight", "backbone.stem.0.weight")
    assert_slopes(learner, lambda: twins_loss(learner, images), names)
    assert learner.network.head.old.grad is None


@pytest.mark.parametrize("margin", [None, 0.0, 0.6])
def test_the_nca_loss_is_pycils_whose_margin_cancels_itself_or_the_papers(margin):
    logits, scale = 2 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.7])
    targets = torch.tensor([0, 3, 1, 1, 2])
    rows = list(zip(logits.tolist(), targets.tolist()))
    if margin is None:
        expected = [twin.pycil_nca(*row) for row in rows]
        assert expected == pytest.approx([twin.pycil_nca(*row, margin=0.0) for row in rows])
    else:
        expected = [twin.paper_nca(*row, 1.7, margin) for row in rows]
        assert 0.0 in expected, "a score so far above the others costs nothing"
    assert nca(logits, targets, scale, margin).mean().item() == pytest.approx(np.mean(expected), abs=1e-5)


@pytest.mark.parametrize("margin", [None, 0.6])
def test_a_single_class_has_a_finite_gradient(margin):
    logits = torch.zeros(3, 1, requires_grad=True)
    nca(logits, torch.zeros(3, dtype=torch.long), torch.ones(1), margin).mean().backward()
    assert torch.equal(logits.grad, torch.zeros(3, 1))


def test_new_classes_bring_new_proxies_and_old_ones_never_change():
    head = ProxyHead(5, 2, proxies=3)
    first = head.weight.detach().clone()
    assert first.shape == (6, 5) and not len(head.old)
    head.grow(2)
    assert torch.equal(head.weight, first), "no new class: the newest proxies are still trained"
    head.grow(6)
    assert torch.equal(head.old, first) and head.weight.shape == (12, 5) and head(torch.randn(2, 5)).shape == (2, 6)
    assert head.weight.abs().max() <= 5**-0.5
    head(torch.randn(2, 5)).sum().backward()
    assert head.old.grad is None and head.weight.grad.abs().min() > 0


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """A learner that has learned two tasks of the digits, and [samples, rates, weights before] of each phase."""
    keys = {"model_name": "podnet", "out": str(tmp_path_factory.mktemp("runs")), "exemplars": "herding", "epochs": 2}
    keys |= {"fixed_memory": False, "memory_size": 42, "ft_epochs": 2}
    run = Run(resolve(SMALL | KEYS | keys), load_dataset("digits", "."))
    seen, learner = [], run.learner

    def started(task, run):
        phase = run.phase
        rates = []
        for epoch in range(phase.epochs):
            set_rate(phase.optimizer, phase.lr(epoch))
            rates.append(phase.optimizer.param_groups[0]["lr"])
        held = {label: kept.tolist() for label, kept in learner.memory.classes.items()}
        seen.append((phase.indices, rates, snapshot(learner.network), held))

    monitor = type("Monitor", (), dict(vars(SILENT)) | {"phase_started": staticmethod(started)})
    for task in run.manager.tasks[:2]:
        learner.learn(task, monitor)
    return run, seen


@pytest.mark.slow
def test_the_second_phase_has_the_exemplars_and_as_many_new_images_which_the_first_phase_chooses(phases):
    run, (_, (_, _, _, held), (indices, _, weights, still_held)) = phases
    learner, (_, task, *_) = run.learner, run.manager.tasks
    assert still_held == held and {len(kept) for kept in held.values()} == {10}  # 42 // 4
    targets = run.manager.train_targets
    assert np.bincount(targets[indices]).tolist() == [10] * 7
    assert set(sum(held.values(), [])) <= set(indices.tolist())
    final = snapshot(learner.network)
    for state, chosen, quota in ((weights, indices, 10), (final, learner.memory.indices, 6)):  # 42 // 7
        learner.network.load_state_dict(state)
        for label in range(4, 7):
            candidates = task.train_indices[targets[task.train_indices] == label]
            expected = candidates[herding(learner.outputs.features(candidates), quota)]
            assert sorted(chosen[targets[chosen] == label]) == sorted(expected)
    learner.network.load_state_dict(final)


def test_each_phase_anneals_its_own_rate_and_neither_moves_old_proxies(phases):
    run, (_, (_, rates, before, _), (_, balanced, between, _)) = phases
    assert rates == pytest.approx([0.1, 0.05]) and balanced == pytest.approx([0.005, 0.0025])
    for state in (between, run.learner.network.state_dict()):
        assert torch.equal(state["head.old"], before["head.old"])
    assert {"head.scale", "head.weight"} <= set(moved(run.learner.network, between))


@pytest.mark.slow
def test_a_run_stopped_in_the_second_phase_ends_like_one_never_stopped(settings, undrawn):
    settings |= KEYS | {"model_name": "podnet", "ft_epochs": 3, "checkpoint_seconds": 0, "max_tasks": 2}
    data = load_dataset(settings["dataset"], ".")
    expected = Run(resolve(settings | {"prefix": "whole"}), data).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 1, "epoch": 2}):
        Run(resolve(settings), data).execute()
    result = Run(resolve(settings), data).execute()
    different = {name for name, value in without_measurements(expected).items() if value != result[name]}
    assert different <= {"config"}


def test_label_smoothing_is_refused_in_one_line(settings):
    with pytest.raises(UserError, match="^label_smoothing: has no part in the loss of 'podnet'; leave it out"):
        resolve(settings | {"model_name": "podnet", "label_smoothing": 0.1})


def test_a_backbone_without_stages_is_refused_in_one_line(settings):
    with pytest.raises(UserError, match="has no stages, which this method needs; use a built-in backbone"):
        run = resolve(settings | {"model_name": "podnet"})
        configured_learner(run).Plan(run).check_backbone(torch.nn.Sequential(torch.nn.Flatten()))
