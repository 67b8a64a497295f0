"""PASS, IL2A and SSRE: losses against slow twins of PyCIL's arithmetic, and what is kept of each class."""

import copy

import numpy as np
import pytest
import torch
from reference import prototypes as twin
from support.methods import SILENT, SMALL, snapshot
from torch import nn

from pycil_wsc.config.loading import load, resolve
from pycil_wsc.errors import UserError
from pycil_wsc.runs.predictions import predictions
from pycil_wsc.runs.run import Run

KEYS = {"init_cls": 4, "increment": 3, "batch_size": 32, "lrate": 1e-3, "init_lr": 1e-3}


@pytest.fixture(scope="module", params=["pass", "il2a", "ssre"])
def learned(request, digits, tmp_path_factory):
    """The learner after two tasks, and of each step of the second: (state before, batch, loss, state after)."""
    keys = KEYS | {"model_name": request.param, "out": str(tmp_path_factory.mktemp("runs"))}
    run = Run(resolve(SMALL | keys), digits)
    learner, steps = run.learner, []
    first, second = run.manager.tasks[:2]
    learner.learn(first, SILENT)
    before = copy.deepcopy(learner.network)
    loss, after_step = learner.loss, learner.after_step

    def watched(batch):
        steps.append([copy.deepcopy(learner.network), batch, None, None])
        steps[-1][2], logits = loss(batch)
        return steps[-1][2], logits

    def done():
        steps[-1][3] = snapshot(learner.network)
        after_step()

    learner.loss, learner.after_step = watched, done
    kept = {name: tensor.clone() for name, tensor in learner.named_buffers(recurse=False)}
    learner.learn(second, SILENT)
    return run, before.eval(), kept, steps


def numbers(tensor):
    return tensor.detach().double().tolist()


@torch.no_grad()
def features_of(network, images, training):
    return numbers(copy.deepcopy(network).train(training).extract(images))


@pytest.mark.slow
def test_a_steps_loss_is_pycils(learned):
    run, teacher, kept, steps = learned
    name, options = run.config.model_name, run.config.options
    for network, batch, loss, _ in steps[:1]:
        head = numbers(network.head.weight), numbers(network.head.bias)
        prototypes = numbers(kept["prototypes"])
        if name == "pass":
            images, targets = twin.turned(batch.images, batch.targets.tolist())
            radius = np.mean(numbers(kept["variances"])) ** 0.5
            parts = twin.noisy(prototypes, batch.drawn[0].tolist(), numbers(batch.drawn[1]), radius)
            parts = [twin.linear(row, *head) for row in parts], [4 * label for label in batch.drawn[0].tolist()]
        elif name == "il2a":
            chosen, mixed, pairs = batch.drawn
            images, targets = torch.cat([batch.images, mixed]), [*batch.targets.tolist(), *pairs.tolist()]
            parts = [
                twin.upper_bound(prototypes[label], numbers(kept["covariances"][label]), label, *head, options.ratio)
                for label in chosen.tolist()
            ]
            parts = parts, chosen.tolist()
            head = [a + numbers(b) for a, b in zip(head, (network.pair_head.weight, network.pair_head.bias))]
        else:
            images, targets = batch.images, batch.targets.tolist()
            chosen = batch.drawn[0].tolist()
            parts = [twin.linear(prototypes[label], *head) for label in chosen], chosen
        new = features_of(network, images, name != "ssre")
        old = features_of(teacher, images, False)
        errors = twin.errors([twin.linear(row, *head) for row in new], targets, options.temp)
        if name == "ssre":
            expected = twin.weighted(errors, new, old, prototypes, options.lambda_fkd)
        else:
            expected = np.mean(errors) + options.lambda_fkd * twin.distance(new, old)
        expected += options.lambda_proto * np.mean(twin.errors(*parts, options.temp))
        assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_each_class_leaves_its_mean_and_its_spread(learned):
    run, _, kept, _ = learned
    learner, labels = run.learner, run.manager.train_targets
    assert len(learner.prototypes) == 7 and torch.equal(learner.prototypes[:4], kept["prototypes"])
    for label in (4, 6):
        features = learner.outputs.features(np.flatnonzero(labels == label)).astype(float)
        centred = features - features.mean(0)
        covariance = centred.T @ centred / (len(features) - 1)
        assert np.allclose(learner.prototypes[label], twin.mean(features.tolist()), atol=1e-5)
        if run.config.model_name == "il2a":
            assert np.allclose(learner.covariances[label], covariance, atol=1e-5)
        if run.config.model_name == "pass":
            assert learner.variances[label].item() == pytest.approx(np.trace(covariance) / len(covariance), rel=1e-4)


def test_the_nearest_prototype_is_tested_too(learned):
    """As in PyCIL, by the squared distance of unit vectors, in the place of the nearest mean of exemplars."""
    run, _, _, _ = learned
    learner, task = run.learner, run.manager.tasks[1]
    tested = predictions(learner, run.evaluator.source, task)
    prototypes = np.array([row / np.linalg.norm(row) for row in learner.prototypes.double().numpy()])
    batches = learner.outputs.in_batches(run.evaluator.source, task.test_indices, run.manager.test_targets)
    features = torch.cat([each for each, _ in batches]).double().numpy()
    distances = ((features / np.linalg.norm(features, axis=1, keepdims=True))[:, None] - prototypes) ** 2
    assert (tested.nme[:, 0] == distances.sum(2).argmin(1)).mean() > 0.99


def test_statistics_of_batch_norm_move_as_in_pycil(learned):
    """Twice in each later step of PASS and IL2A, whose features PyCIL computes twice; never in SSRE."""
    run, _, _, steps = learned
    network, batch, _, after = steps[0]
    name = run.config.model_name
    images = batch.images
    if name == "pass":
        images, _ = twin.turned(images, batch.targets.tolist())
    if name == "il2a":
        images = torch.cat([images, batch.drawn[1]])
    network = copy.deepcopy(network).train(name != "ssre")
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    with torch.no_grad():
        for _ in range(2):
            network.extract(images)
    for key, value in network.state_dict().items():
        if "running" in key:
            torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_images_are_classified_by_the_rows_of_their_classes(learned):
    run, _, _, steps = learned
    learner = run.learner.eval()
    images = steps[0][1].images[:3]
    with torch.no_grad():
        features, logits = learner.extract(images), learner.predict(images)
    step = 4 if run.config.model_name == "pass" else 1
    rows = [7 * step, learner.network.head.in_features]
    assert list(learner.network.head.weight.shape) == rows and logits.shape == (3, 7)
    for feature, scores in zip(numbers(features), numbers(logits)):
        weight, bias = numbers(learner.network.head.weight[::step]), numbers(learner.network.head.bias[::step])
        assert np.allclose(scores, twin.linear(feature, weight, bias), atol=1e-4)


@pytest.mark.parametrize("name", ["pass", "il2a", "ssre"])
def test_one_schedule_of_pycils_file_is_that_of_the_first_task_and_of_later_ones(name, tmp_path):
    path = tmp_path / "pycil.json"
    path.write_text(f'{{"model_name": "{name}", "lr": 0.01, "epochs": 7, "step_size": 3, "gamma": 0.2, "T": 2}}')
    (config,) = load(path)
    assert (config.init_lr, config.lrate, config.init_epoch, config.epochs) == (0.01, 0.01, 7, 7)
    assert config.init_milestones == config.milestones == (3, 6)
    assert config.init_lr_decay == config.lrate_decay == 0.2 and config.optimizer == "adam"
    path.write_text(f'{{"model_name": "{name}", "lr": 0.01, "step_size": 45}}')
    assert load(path, {"epochs": 2, "init_epoch": 2})[0].milestones == (1,)
    path.write_text(f'{{"model_name": "{name}", "lr": 0.01, "step_size": 1, "epochs": {10**9}}}')
    with pytest.raises(UserError, match="step_size: needs one whole number above 0"):  # not a list of 10**9 milestones
        load(path)


def test_on_the_command_line_its_keys_hold_for_all_tasks_too(tmp_path):
    path = tmp_path / "pass.json"
    path.write_text(
        '{"model_name": "pass", "lr": 0.01, "epochs": 7, "step_size": 3, "gamma": 0.2, "weight_decay": 1e-4}'
    )
    (run,) = load(path, {"lr": 0.02, "gamma": 0.5, "weight_decay": 0.1, "epochs": 9, "step_size": 4})
    assert (run.init_lr, run.lrate, run.init_lr_decay, run.lrate_decay) == (0.02, 0.02, 0.5, 0.5)
    assert (run.init_epoch, run.epochs, run.init_weight_decay, run.weight_decay) == (9, 9, 0.1, 0.1)
    assert run.init_milestones == run.milestones == (4, 8)
    (run,) = load(path, {"epochs": 8, "init_epoch": 7})
    assert (run.init_epoch, run.epochs) == (7, 8), "a key of its own is nearer"
    with pytest.raises(UserError, match="gamma: is one value in PyCIL's file of pass; give init_lr_decay and lrate_d"):
        load(path, {"gamma": [0.1, 0.5]})
