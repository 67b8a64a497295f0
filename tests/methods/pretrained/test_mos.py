"""MOS: merged adapters, statistics, the aligned head and refined predictions are those of the slow twin."""

import pytest
import torch
from reference import mos as twin
from support.methods import SILENT
from support.recorded import SMALL, adapters, features, images_of, part_of, recorded, trained, without_dropout
from support.small_runs import run_of, small_data
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.gaussians import GaussianSource
from pycil_wsc.errors import UnusableRun
from pycil_wsc.methods.pretrained.mos import MOS, RoutedNet
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.networks.tuning.transformer import TunedTransformer

pytest.importorskip("timm")
KEYS = {"ffn_num": 3, "init_lr": 0.1, "lrate": 0.1, "reg": 0.05, "crct_epochs": 2, "ca_lr": 0.02, "ca_batches": 2}


@pytest.fixture(scope="module", params=["blocks", "step"])
def learned(request, tmp_path_factory):
    return recorded("mos", tmp_path_factory.mktemp("mos"), prepare=without_dropout, merging=request.param, **KEYS)


def adapters_of(state, task):
    return part_of(state, f"backbone.sets.{task}.")


def forward(learner, images, current, earlier):
    """The twin's features in training, for which PILOT merges all adapters before each block."""
    depth = learner.network.backbone.depth
    used = {}
    for block in range(depth if earlier else 0):
        if learner.config.options.merging == "blocks":
            twin.merge(current, earlier, 0.1)
        used |= {name: value * 1 for name, value in current.items() if name.startswith(f"{block}.")}
    return features(learner, images, adapters=adapters(used or current))


def test_each_task_trains_adapters_that_begin_as_those_before_and_merge_with_the_mean_of_earlier_ones(learned):
    learner = learned.learner
    mains = [phase for phase in learned.phases if phase.name == "train"]
    earlier = []
    for phase in mains:
        current, head = trained(adapters_of(phase.before, phase.task)), trained(part_of(phase.before, "head."))
        for name, value in current.items() if earlier else ():
            assert torch.equal(value, earlier[-1][name])
        means = learner.means[: 2 * phase.task, 0]
        groups = [{"params": list(part.values()), "lr": 0} for part in (current, head)]
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4)
        steps = len(phase.batches) // len(phase.rates)
        for step, (images, targets) in enumerate(phase.batches):
            for group, factor in zip(optimizer.param_groups, (1, 0.1)):
                group["lr"] = factor * phase.rates[step // steps]
            optimizer.zero_grad()
            vectors = forward(learner, images, current, earlier)
            logits = vectors @ head["weight"].T + head["bias"]
            logits[:, : 2 * phase.task] = -torch.inf
            loss = cross_entropy(logits, targets) + 0.05 * twin.orthogonality(vectors, means)
            loss.backward()
            optimizer.step()
            if earlier:
                twin.merge(current, earlier, 0.1)
            assert phase.losses[step] == pytest.approx(loss.item(), rel=1e-3)
        for name, value in adapters_of(phase.after, phase.task).items():
            torch.testing.assert_close(value, current[name].detach(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            part_of(phase.after, "head.")["weight"], head["weight"].detach(), rtol=1e-3, atol=1e-5
        )
        earlier.append(adapters_of(phase.after, phase.task))
    assert [phase.task for phase in mains] == [0, 1, 2]


@torch.no_grad()
def test_what_is_kept_of_a_class_are_its_features_with_its_own_and_with_the_first_adapters(learned):
    learner, state = learned.learner, learned.learner.network.state_dict()
    for label in (1, 4):
        images, _ = images_of(learned.run, "train", [label])
        mean, covariance = twin.covariance(features(learner, images, adapters=adapters(adapters_of(state, label // 2))))
        torch.testing.assert_close(learner.means[label, 0], mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(learner.spreads[label], covariance, rtol=1e-3, atol=1e-4)
        first = features(learner, images, adapters=adapters(adapters_of(state, 0))).mean(0)
        torch.testing.assert_close(learner.network.prototypes[label], first, rtol=1e-3, atol=1e-4)


def test_from_the_second_task_on_the_head_is_aligned_on_features_drawn_for_all_classes(learned):
    phases = [phase for phase in learned.phases if phase.name == "alignment"]
    assert [phase.task for phase in phases] == [1, 2]
    for phase in phases:
        classes = 2 * phase.task + 2
        assert [len(rows) for rows, _ in phase.batches] == [12] * 2 * classes
        labels = torch.cat([labels for _, labels in phase.batches[:classes]])
        assert torch.bincount(labels).tolist() == [12] * classes
        assert not torch.equal(phase.batches[0][0], phase.batches[classes][0]), "drawn anew in each epoch"
        before, after = (part_of(state, "head.") for state in (phase.before, phase.after))
        weight, bias = twin.aligned(before["weight"], before["bias"], phase.batches, 2, 0.02, 5e-4)
        torch.testing.assert_close(after["weight"], weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(after["bias"], bias, rtol=1e-4, atol=1e-6)
        moved = [name for name, value in phase.after.items() if not torch.equal(value, phase.before[name])]
        assert moved == ["head.weight", "head.bias"]


@torch.no_grad()
def test_a_prediction_is_the_twins_and_does_not_depend_on_other_images_nor_on_how_often_it_was_asked(learned):
    learner, state = learned.learner, learned.learner.network.state_dict()
    images, _ = images_of(learned.run, "test")
    chosen = images[::9]
    sets = [features(learner, chosen, adapters=adapters(adapters_of(state, task))) for task in range(3)]
    probabilities = learner.predict(images)[::9].exp()
    for number, scores in enumerate(probabilities):
        by_task = torch.stack([of_task[number] for of_task in sets])
        parts = state["prototypes"], state["head.weight"], state["head.bias"]
        expected = twin.refined(by_task, *parts, [0, 0, 1, 1, 2, 2], ensemble=True)
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(learner.predict(chosen[number][None])[0].exp(), expected, rtol=1e-3, atol=1e-4)
    after = learner.network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in state.items())


@pytest.mark.parametrize("ensemble", [True, False])
@torch.no_grad()
def test_adapters_are_chosen_again_until_they_are_those_of_the_predicted_class(ensemble):
    """On random features, where it often takes several rounds."""
    options = {f"convnet_options.{name}": value for name, value in (("embed_dim", 12), ("depth", 1))}
    backbone = make_backbone("timm:test_vit", {name.partition(".")[2]: value for name, value in options.items()})
    network = RoutedNet(TunedTransformer(backbone), MOS.Options(ensemble=ensemble))
    for classes in (2, 5, 6, 8):
        network.grow(classes)
    generator = torch.Generator().manual_seed(1)
    network.prototypes = torch.randn(8, 12, generator=generator)
    network.head.weight.copy_(torch.randn(8, 12, generator=generator))
    images = torch.randn(64, 4, 12, generator=generator)
    task_of = [0, 0, 1, 1, 1, 2, 3, 3]
    logits = network.classify(images.flatten(1))
    for features_of_one, scores in zip(images, logits.exp() if ensemble else logits):
        parts = network.prototypes, network.head.weight, network.head.bias
        torch.testing.assert_close(scores, twin.refined(features_of_one, *parts, task_of, ensemble))


@pytest.mark.parametrize("kind", ["variance", "multi-centroid"])
def test_less_may_be_kept_of_a_class(kind, tmp_path):
    keys = KEYS | {"ca_storage_efficient_method": kind, "n_centroids": 5}
    learned = recorded("mos", tmp_path, tasks=2, **keys)
    learner = learned.learner
    images, _ = images_of(learned.run, "train", [3])
    with torch.no_grad():
        rows = learner.network.backbone(images, route=1)
    source = learner.distributions(4)
    if kind == "variance":
        _, covariance = twin.covariance(rows)
        torch.testing.assert_close(learner.spreads[3, 0], covariance.diag(), rtol=1e-3, atol=1e-5)
        assert source.labels.tolist() == [0, 1, 2, 3]
        torch.testing.assert_close(source.roots[3], covariance.diag().sqrt(), rtol=1e-3, atol=1e-5)
        return
    assert learner.means.shape == (4, 5, 12), "six images in five clusters: four of them have one image"
    sizes = [(rows[:, None] - learner.means[3]).norm(dim=2).argmin(1).tolist().count(k) for k in range(5)]
    assert sorted(sizes) == [1, 1, 1, 1, 2] and source.labels.tolist() == [0, 1, 2, 3]
    pair = rows[(rows[:, None] - learner.means[3]).norm(dim=2).argmin(1) == sizes.index(2)]
    torch.testing.assert_close(source.means[3], pair.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(source.roots[3] ** 2, pair.var(0, correction=0) + 1e-4, rtol=1e-3, atol=1e-5)
    sizes = [len(labels) for _, labels in learned.phases[-1].batches]
    assert sizes == [12] * 8, "as many as of one distribution a class"


def test_features_are_drawn_from_each_distribution_with_its_mean_and_covariance():
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[5.0, 0.0], [0.0, -3.0]])
    roots = torch.tensor([[[1.0, 0.0], [2.0, 0.5]], [[0.1, 0.0], [0.0, 0.3]]])
    source = GaussianSource(means, roots, torch.tensor([7, 4]), 20_000, torch.device("cpu"))
    rows, labels = source.drawn(generator)
    for mean, root, part in zip(means, roots, rows.split(20_000)):
        torch.testing.assert_close(part.mean(0), mean, rtol=0, atol=0.05)
        torch.testing.assert_close(part.T.cov(), root @ root.T, rtol=0.05, atol=0.02)
    assert labels.tolist() == [7] * 20_000 + [4] * 20_000
    deviations = GaussianSource(means, torch.tensor([[1.0, 3.0], [0.5, 0.2]]), labels[[0, -1]], 20_000, source.device)
    spread = deviations.drawn(generator)[0].split(20_000)[0].std(0)
    torch.testing.assert_close(spread, torch.tensor([1.0, 3.0]), rtol=0.05, atol=0)


def test_too_few_images_for_the_clusters_are_one_line_before_the_task_is_trained(tmp_path):
    keys = {"model_name": "mos", "ca_storage_efficient_method": "multi-centroid", "out": str(tmp_path)}
    run = run_of(SMALL | keys | {"dataset": f"npz:{small_data(tmp_path / 'data.npz', per_class=6)}"})
    with pytest.raises(UnusableRun, match=r"n_centroids: class 0 has 6 images, too few for 10 clusters; give fewer"):
        run.learner.learn(run.manager.tasks[0], SILENT)
    assert not run.learner.spent.images


def test_the_defaults_are_those_of_pilots_file():
    config = resolve({"model_name": "mos"})
    schedule = config.init_epoch, config.epochs, config.init_lr, config.lrate, config.weight_decay, config.batch_size
    assert schedule == (20, 20, 0.03, 0.03, 5e-4, 48) and config.scheduler == "cosine" and config.options.ffn_num == 16
