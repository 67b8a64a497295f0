"""What the methods whose classifier is computed from features share."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from support.closed_form import KEYS, assert_near, learned
from support.methods import SILENT, SMALL
from support.small_runs import Tiny

from pycil_wsc import Learner, registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.methods.closed_form import closed_form
from pycil_wsc.runs.run import Run
from pycil_wsc.training.outputs import Outputs

ORDERLESS = ["fecam", "ncm", "ranpac", "slda"]


def test_images_are_added_as_if_all_had_features_at_once_though_few_have(digits, tmp_path, monkeypatch):
    expected, _ = learned("acil", digits, tmp_path, inplace_repeat=2)
    monkeypatch.setattr(closed_form, "AT_ONCE", 50)
    sizes = []
    features = Outputs.features
    monkeypatch.setattr(Outputs, "features", lambda self, some: sizes.append(len(some)) or features(self, some))
    learner, _ = learned("acil", digits, tmp_path, inplace_repeat=2)
    state = learner.state_dict()
    for name, value in expected.state_dict().items():
        assert not torch.is_tensor(value) or torch.equal(value, state[name]), name
    assert sorted(sizes)[-4] <= 100 + SMALL["batch_size"], "but for ``learned``, which asks for all of each task"


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
    logits_of_orders = []
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):  # an exchange and a rotation make up every other order
        learner = taught(name, photographs, order, tmp_path / str(order))
        logits = learner.logits(files).numpy()
        logits_of_orders.append(logits[:, np.argsort(learner.classes)])
        assert not any(line["images_trained"] for line in learner.history)
    first, *others = logits_of_orders
    for logits in others:
        assert_near(logits, first)
    kept = taught(name, photographs, (0, 1, 2))
    assert np.array_equal(kept.logits(files).numpy()[:, np.argsort(kept.classes)], first)


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
