"""Methods whose classifier is computed from features: against the solution for all images at once, by slow twins."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.covariance import OAS
from support.methods import SILENT, SMALL
from support.small_runs import Tiny

from pycil_wsc import Learner, registry
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.closed_form import closed_form
from pycil_wsc.methods.closed_form.ranpac import RIDGES, RandomProjection
from pycil_wsc.networks.closed_form_nets import RidgeSums
from pycil_wsc.runs.run import Run
from pycil_wsc.training.outputs import Outputs

KEYS = {"buffer_size": 96, "IL_batch_size": 100, "projection": 96, "gamma": 0.1, "gamma_comp": 0.2}
ORDERLESS = ["fecam", "ncm", "ranpac", "slda"]


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", ".")


@pytest.fixture(scope="module")
def learned(digits, tmp_path_factory):
    """A learner after three tasks, and of each task: float64 features (n, d) in the order of the classes, and (n,)."""

    def learn(name, **keys):
        out = str(tmp_path_factory.mktemp("runs"))
        run = Run(resolve(SMALL | KEYS | {"model_name": name, "out": out} | keys), digits)
        learner, parts = run.learner, []
        for task in run.manager.tasks[:3]:
            learner.learn(task, SILENT)
            targets = run.manager.train_targets[task.train_indices]
            indices = task.train_indices[np.argsort(targets, kind="stable")]
            parts.append((learner.outputs.features(indices).astype(float), run.manager.train_targets[indices]))
        return learner, parts

    return learn


def logits_of(learner, features):
    with torch.no_grad():
        return learner.classify(torch.from_numpy(features).float()).double().numpy()


def assert_near(found, expected):
    """To 1e-4 of the largest logit."""
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def joined(parts):
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


# ---- each method against the batch solution --------------------------------------------------------------------------


def test_ncm_is_the_nearest_mean(learned):
    learner, parts = learned("ncm")
    features, labels = joined(parts)
    found = logits_of(learner, features[:50])
    for x, logits in zip(features[:50], found, strict=True):
        for label, logit in enumerate(logits):
            difference = x - features[labels == label].mean(0)
            assert (x @ x - difference @ difference) / 2 == pytest.approx(logit, abs=1e-4 * np.abs(found).max())


def test_slda_has_one_covariance_for_all_classes(learned):
    learner, parts = learned("slda", shrinkage=0.01)
    features, labels = joined(parts)
    means = np.stack([features[labels == label].mean(0) for label in range(10)])
    estimate = OAS(assume_centered=True).fit(features - means[labels]).covariance_
    inverse = np.linalg.inv(0.99 * estimate + 0.01 * np.eye(len(estimate)))
    expected = features @ inverse @ means.T - np.einsum("cd,de,ce->c", means, inverse, means) / 2
    assert_near(logits_of(learner, features), expected)


def test_ranpac_is_a_ridge_regression_whose_parameter_suits_images_held_out(learned):
    learner, parts = learned("ranpac")
    projection = learner.network.head.projection.double().numpy()
    features, labels = joined(parts)
    cosines = features @ projection[:, 0] / np.linalg.norm(features, axis=1) / np.linalg.norm(projection[:, 0])
    held_out = 64 * np.sqrt(features.shape[1]) * cosines % 1 < 1 / 5
    assert 0.1 < held_out.mean() < 0.3
    X, Y = np.maximum(features @ projection, 0), np.eye(10)[labels]

    def solved(ridge, rows):
        return np.linalg.solve(X[rows].T @ X[rows] + ridge * np.eye(X.shape[1]), X[rows].T @ Y[rows])

    errors = [np.square(X[held_out] @ solved(ridge, ~held_out) - Y[held_out]).mean() for ridge in RIDGES]
    best = RIDGES[int(np.argmin(errors))]
    assert learner.network.head.ridge() == best and RIDGES[0] < best < RIDGES[-1]
    assert_near(logits_of(learner, features), X @ solved(best, slice(None)))


@pytest.mark.parametrize("per_class", [1, 2])
def test_ranpac_learns_from_one_image_of_each_class(per_class):
    """Every class is in the regression, whether or not the only image of one is held out for the ridge parameter."""
    head = RandomProjection(4, 64, torch.float64)
    head.grow(6)
    features = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(per_class, 0)
    labels = torch.arange(6).repeat_interleave(per_class)
    head.add(features, labels)
    head.solve()
    assert head(features).argmax(1).tolist() == labels.tolist()
    assert head.ridge() == 1.0, "no class has images on both sides, which tell nothing about the ridge then"


def test_images_are_added_as_if_all_had_features_at_once_though_few_have(learned, monkeypatch):
    expected, _ = learned("acil", inplace_repeat=2)
    monkeypatch.setattr(closed_form, "AT_ONCE", 50)
    sizes = []
    features = Outputs.features
    monkeypatch.setattr(Outputs, "features", lambda self, some: sizes.append(len(some)) or features(self, some))
    found, _ = learned("acil", inplace_repeat=2)
    state = found.state_dict()
    for name, value in expected.state_dict().items():
        assert not torch.is_tensor(value) or torch.equal(value, state[name]), name
    assert sorted(sizes)[-4] <= 100 + SMALL["batch_size"], "but for the fixture, which asks for all of each task"


def test_ranpac_chooses_its_ridge_again_only_when_that_may_matter():
    """After a class, a tenth more images, or one that is taken out or moved; in between it is the regression of all."""
    head = RandomProjection(6, 16, torch.float64)
    head.grow(4)
    features = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(130) % 3
    head.add(features[:100], labels[:100])

    def chosen_again():
        """Whether solving replaces another parameter by the chosen one."""
        head.chosen[0] = 3e-3
        head.solve()
        return head.chosen[0].item() != 3e-3

    assert chosen_again(), "there was no choice before"
    head.add(features[100:109], labels[100:109])
    assert not chosen_again()
    X, Y = (features[:109].double() @ head.projection.double()).relu().numpy(), np.eye(4)[labels[:109]]
    assert_near(head.weight.numpy(), np.linalg.solve(X.T @ X + 3e-3 * np.eye(16), X.T @ Y).T)
    again = RandomProjection(6, 16, torch.float64)
    again.grow(4)
    again.load_state_dict(head.state_dict())
    assert torch.equal(again.chosen, head.chosen), "a saved learner goes on with the same choice"
    head.add(features[109:110], labels[109:110])
    assert chosen_again(), "110 images are a tenth more than 100"
    head.relabel(features[:1], labels[:1], torch.ones(1, dtype=torch.int64))
    assert chosen_again()
    head.remove(features[1:2], labels[1:2])
    assert chosen_again()
    head.add(features[:1], torch.full((1,), 3))
    assert chosen_again(), "a fourth class has come"
    head.merge(3, 0)
    assert chosen_again() and not chosen_again()


def test_fecam_has_a_covariance_of_each_class(learned):
    learner, parts = learned("fecam", beta=0.4, alpha1=0.7, alpha2=0.3)
    features, labels = joined(parts)
    some, distances = features[::40], []
    for label in range(10):
        own = features[labels == label]
        covariance = np.cov(own.T**0.4)
        beside = ~np.eye(len(covariance), dtype=bool)
        shrunk = covariance + 0.7 * covariance.diagonal().mean() * ~beside
        shrunk += 0.3 * covariance[beside & (covariance != 0)].mean() * beside
        scale = np.sqrt(shrunk.diagonal())
        inverse = np.linalg.pinv(shrunk / np.outer(scale, scale))
        unit = [vectors**0.4 / np.linalg.norm(vectors**0.4, axis=-1, keepdims=True) for vectors in (some, own.mean(0))]
        difference = unit[0] - unit[1]
        distances.append(np.einsum("nd,de,ne->n", difference, inverse, difference))
    assert_near(logits_of(learner, some), -np.stack(distances, 1))


class Recursive:
    """Ridge regression whose inverse autocorrelation is updated batch by batch (Zhuang et al., 2022, eq. 9 and 10)."""

    def __init__(self, size, gamma):
        self.inverse, self.weight = np.eye(size) / gamma, np.zeros((size, 10))

    def update(self, X, Y):
        gain = self.inverse @ X.T @ np.linalg.inv(np.eye(len(X)) + X @ self.inverse @ X.T)
        self.inverse = self.inverse - gain @ X @ self.inverse
        self.weight = self.weight + self.inverse @ X.T @ (Y - X @ self.weight)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", ["acil", "ds-al"])
def test_the_analytic_methods_are_their_recursions(name, repeats, learned):
    learner, parts = learned(name, inplace_repeat=repeats)
    projection = learner.network.head.projection.double().numpy()
    main, compensation = Recursive(96, 0.1), Recursive(96, 0.2)
    for features, labels in parts:
        features, labels = features.repeat(repeats, 0), labels.repeat(repeats)
        first = labels.min()
        for start in range(0, len(labels), 100):
            Z, Y = features[start : start + 100] @ projection, np.eye(10)[labels[start : start + 100]]
            main.update(np.maximum(Z, 0), Y)
            residuals = Y - np.maximum(Z, 0) @ main.weight
            residuals[:, :first] = 0
            compensation.update(np.tanh(Z), residuals)
    Z = features @ projection
    expected = np.maximum(Z, 0) @ main.weight
    if name == "ds-al":
        expected = expected + 0.6 * np.tanh(Z) @ compensation.weight
    assert_near(logits_of(learner, features), expected)


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
    errors = [np.abs(each - expected).max() / np.abs(expected).max() for each in (sums.solution().numpy(), inverted)]
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


@pytest.mark.parametrize("name", ["acil", "ds-al"])
def test_updates_of_few_images_are_those_of_many_parts(name, learned):
    """The recursion again, in parts of 6 images, of which 96 features take each as an update of the factor."""
    learner, parts = learned(name, IL_batch_size=6)
    assert len(learner.network.head.sums.factor) == 96
    projection = learner.network.head.projection.double().numpy()
    main, compensation = Recursive(96, 0.1), Recursive(96, 0.2)
    for features, labels in parts:
        first = labels.min()
        for start in range(0, len(labels), 6):
            Z, Y = features[start : start + 6] @ projection, np.eye(10)[labels[start : start + 6]]
            main.update(np.maximum(Z, 0), Y)
            residuals = Y - np.maximum(Z, 0) @ main.weight
            residuals[:, :first] = 0
            compensation.update(np.tanh(Z), residuals)
    expected = np.maximum(Z, 0) @ main.weight
    if name == "ds-al":
        expected = expected + 0.6 * np.tanh(Z) @ compensation.weight
    assert_near(logits_of(learner, features[start:]), expected)


# ---- the order of the tasks, saving and loading ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def photographs(tmp_path_factory, digits):
    """Image files of three months: {month: (files, labels)}. The third brings classes 0 and 1 again, and class 6."""
    folder, months = tmp_path_factory.mktemp("photographs"), {}
    classes = {0: (0, 1, 2), 1: (3, 4, 5), 2: (0, 1, 6)}
    taken = dict.fromkeys(range(10), 0)
    for month, labels in classes.items():
        files = []
        for label in labels:
            images = digits.train.images[digits.train.targets == label][taken[label] :][: 12 + label]
            taken[label] += len(images)
            for number, image in enumerate(images):
                files.append((str(folder / f"{month}-{label}-{number}.png"), f"digit {label}"))
                Image.fromarray(image).save(files[-1][0])
        months[month] = [file for file, _ in files], [label for _, label in files]
    return months


def taught(name, photographs, order, shelf=None):
    """A learner of the months in ``order``; with ``shelf``, it is saved and loaded after each."""
    keys = {"convnet_type": "resnet8", "image_size": 8, "device": "cpu", "precision": "fp32", "adapt": False}
    learner = Learner(name, projection=64, quiet=True, num_workers=0, **keys)
    for month in order:
        learner.learn(photographs[month])
        if shelf:
            learner.save(shelf)
            learner = Learner.load(shelf, quiet=True)
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERLESS)
def test_the_order_of_the_tasks_does_not_matter_nor_saving_between(name, photographs, tmp_path):
    files = [file for month in photographs.values() for file in month[0]]
    found = []
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):  # an exchange and a rotation make up every other order
        learner = taught(name, photographs, order, tmp_path / str(order))
        logits = learner.logits(files).numpy()
        found.append(logits[:, np.argsort(learner.classes)])
        assert not any(line["images_trained"] for line in learner.history)
    for other in found[1:]:
        assert_near(other, found[0])
    kept = taught(name, photographs, (0, 1, 2))
    assert np.array_equal(kept.logits(files).numpy()[:, np.argsort(kept.classes)], found[0])


# ---- the backbone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ORDERLESS, "acil", "ds-al"])
def test_the_backbone_learns_in_the_first_task_or_never(name, digits, tmp_path):
    for adapt in (True, False) if name in ORDERLESS else (True,):
        keys = {"adapt": adapt} if name in ORDERLESS else {}
        run = Run(resolve(SMALL | KEYS | {"model_name": name, "out": str(tmp_path)} | keys), digits)
        backbone = run.learner.network.backbone
        sums = [value for key, value in run.learner.network.state_dict().items() if key.endswith("gram")]
        assert not any(map(len, sums)), "checkpoints within the first task need not hold matrices of zeros"
        weights = [copied(backbone)]
        for task in run.manager.tasks[:2]:
            run.learner.learn(task, SILENT)
            weights.append(copied(backbone))
        changed = [not all(torch.equal(a, b) for a, b in zip(*pair)) for pair in itertools.pairwise(weights)]
        assert changed == [adapt, False]
        assert not [key for key in run.learner.state_dict() if "first_head" in key]


def copied(network):
    return [tensor.clone() for tensor in network.state_dict().values()]


def test_a_pretrained_backbone_stays_as_it_is_unless_told_otherwise():
    pytest.importorskip("timm")
    method = registry.learners["ranpac"]
    keys = {"model_name": "ranpac", "convnet_type": "timm:resnet18"}
    cases = [({"pretrained": True}, False), ({}, True), ({"pretrained": True, "adapt": True}, True)]
    for given, adapts in [*cases, ({"adapt": False}, False)]:
        assert method.Plan(resolve(keys | given)).adapts() is adapts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_builds_no_backbone(precision, monkeypatch):
    built = []

    class Counted(Tiny):
        def __init__(self):
            super().__init__()
            built.append(self)

    monkeypatch.setitem(registry.backbones._entries, "counted", Counted)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (8, 8, 8, 3), np.uint8), np.repeat(["a", "b"], 4)
    learner = Learner("ncm", convnet_type="counted", adapt=False, precision=precision, device="cpu", quiet=True)
    learner.learn((images, labels))
    first = len(built)
    learner.learn((images[:1] // 2, labels[:1]))
    assert len(built) == first > 0


def test_a_class_of_one_image_has_finite_logits(digits, tmp_path):
    for name in ORDERLESS:
        learner = Learner(name, convnet_type="resnet8", device="cpu", adapt=False, projection=16, quiet=True)
        learner.learn((digits.train.images[:1], ["one"]))
        learner.learn((digits.train.images[1:3], ["two", "three"]))
        assert learner.logits(digits.train.images[:4]).isfinite().all()


# ---- PyCIL's files ---------------------------------------------------------------------------------------------------


def pycils(path, **keys):
    """A file with a set of keys for each of two data sets."""
    content = {"model_name": "ds-al", "dataset": "cifar100", "init_batch_size": 64, "memory_size": 0, "seed": [1993]}
    schedule = {"type": "MultiStep", "init_lr": 0.2, "init_epochs": 90, "warmup": 0, "milestones": [30], "decay": 0.3}
    small = {"buffer_size": 99, "gamma_comp": 0.5, "init_weight_decay": 1e-3, "scheduler": schedule}
    other = {"buffer_size": 7, "scheduler": {"type": "CosineAnnealing", "init_epochs": 3}}
    content["configurations"] = {"cifar100": small, "digits": other}
    return write_json(path, content | keys)


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


def test_the_keys_of_the_data_set_are_those_of_the_file(tmp_path):
    (run,) = load(pycils(tmp_path / "ds-al.json"))
    assert (run.options.buffer_size, run.options.gamma_comp, run.init_weight_decay, run.batch_size) == (
        99,
        0.5,
        1e-3,
        64,
    )
    assert (run.scheduler, run.init_lr, run.init_epoch) == ("steplr", 0.2, 90)
    assert (run.init_milestones, run.init_lr_decay, run.warmup_epochs) == ((30,), 0.3, 0)
    (other,) = load(pycils(tmp_path / "ds-al.json"), {"dataset": "digits"})
    assert (other.options.buffer_size, other.scheduler, other.init_epoch, other.min_lr) == (7, "cosine", 3, 1e-6)
    with pytest.raises(
        UserError, match="configurations: has no keys for dataset 'imagenet100', only for cifar100, dig"
    ):
        load(pycils(tmp_path / "ds-al.json", dataset="imagenet100"))
    with pytest.raises(UserError, match="unknown key 'configurations.cifar100'"):
        load(pycils(tmp_path / "replay.json", model_name="replay"))
    wrong = {"digits": {"scheduler": {"gamma": 3}}}
    with pytest.raises(UserError, match="unknown key 'scheduler.gamma'"):
        load(pycils(tmp_path / "ds-al.json", dataset="digits", configurations=wrong))
    warm = {"digits": {"scheduler": {"type": "MultiStep", "warmup": 5}}}
    with pytest.raises(UserError, match="scheduler.warmup: .* is not built in; .* give warmup_epochs"):
        load(pycils(tmp_path / "acil.json", model_name="acil", dataset="digits", configurations=warm))
