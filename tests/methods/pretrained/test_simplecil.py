"""Methods that classify by mean features: SimpleCIL, APER with finetuning."""

import copy
import json

import numpy as np
import pytest
import torch
from support.methods import SILENT, SMALL

from pycil_wsc.config.loading import load, resolve
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.runs.run import Run

KEYS = {"init_cls": 4, "increment": 2, "convnet_type": "cosine_resnet32", "convnet_options.width": 8}
KEYS |= {"images_per_class": 20}


@pytest.fixture(scope="module", params=["simplecil", "aper_finetune"])
def learned(request, tmp_path_factory):
    """A learner, and copies of its backbone after each of three tasks."""
    keys = KEYS | {"model_name": request.param, "out": str(tmp_path_factory.mktemp("runs")), "milestones": []}
    config = resolve(SMALL | keys)
    run = Run(config, Datasets().of(config))
    backbones, tuned = [], []
    for task in run.manager.tasks[:3]:
        run.learner.learn(task, SILENT)
        backbones.append(copy.deepcopy(run.learner.network.backbone).eval())
        tuned.append(copy.deepcopy(getattr(run.learner.network, "tuned", None)))
    return run, backbones, tuned


def images_of(run, label):
    """The training images of a class, as the test transform gives them."""
    indices = np.flatnonzero(run.manager.train_targets == label)
    batches = run.learner.batches.source.batches(indices, run.manager.train_targets, len(indices))
    return next(iter(batches))[0]


def prototype(run, tuned, label):
    """The mean feature of a class, image by image."""
    network = run.learner.network
    total = 0
    images = images_of(run, label)
    for image in images:
        features = network.backbone(image[None])[0]
        if tuned is not None and label >= 4:
            features = torch.cat([features, tuned[0].eval()(image[None])[0]])
        total = total + features
    return total / len(images)


@pytest.mark.slow
@torch.no_grad()
def test_each_class_is_its_mean_feature_and_the_scores_are_cosines(learned):
    run, _, tuned = learned
    network = run.learner.network.eval()
    prototypes = [prototype(run, tuned[-1], label) for label in range(8)]
    if tuned[-1] is not None:  # the classes of the first task, before there was a second branch
        prototypes[:4] = [torch.cat([each, each]) for each in prototypes[:4]]
    assert torch.allclose(network.head.weight, torch.stack(prototypes), atol=1e-5)
    images = images_of(run, 5)[:3]
    features = network.extract(images)
    for image, feature in zip(network(images), features):
        for score, row in zip(image, prototypes):
            cosine = (feature @ row) / (feature.norm() * row.norm())
            assert score.item() == pytest.approx((network.head.scale * cosine).item(), abs=1e-5)
    trained = network.head.scale.item() != 1
    assert trained == (tuned[-1] is None), "PyCIL's head for two branches is a new one"


def test_cosines_are_compared_in_fp32_whatever_the_precision(learned):
    """In bf16, those of a hundred similar classes would be a few numbers."""
    learner = learned[0].learner
    features = torch.randn(64, learner.network.head.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = learner.classify(features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, learner.network.classify(features).detach(), rtol=0, atol=1e-6)
    assert len(found.unique()) > 0.9 * found.numel()


def test_only_the_first_task_trains_the_backbone_and_only_the_second_its_copy(learned):
    _, backbones, tuned = learned
    first = backbones[0].state_dict()
    for later in backbones[1:]:
        assert all(torch.equal(tensor, first[name]) for name, tensor in later.state_dict().items())
    if tuned[1] is not None:
        moved = [not torch.equal(tensor, first[name]) for name, tensor in tuned[1][0].state_dict().items()]
        assert tuned[0] is None and any(moved)
        after = tuned[2].state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in tuned[1].state_dict().items())


@torch.no_grad()
def test_the_backbone_of_cosine_classifiers_has_signed_features_and_learned_shortcuts():
    """ResNet-32 has 463,504 parameters; the two 1x1 convolutions and their batch norms come on top."""
    backbone = make_backbone("cosine_resnet32").train()
    shortcuts = 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert sum(p.numel() for p in backbone.parameters()) == 463_504 + shortcuts
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert backbone.stage3(backbone.stage2(backbone.stage1(backbone.stem(images)))).min() < 0
    block = backbone.stage2[0].eval()
    x = torch.rand(1, 16, 8, 8)
    expected = torch.relu(block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x))))) + block.shortcut(x))
    assert torch.equal(block(x), expected)


def test_aper_has_the_schedule_of_pycils_file_and_with_a_shorter_one_that_of_its_code(tmp_path):
    """Stock aper_finetune.json gives 200 and 20 epochs; a file that leaves a key out gets the default of the code."""
    names = ("init_epoch", "init_lr", "init_weight_decay", "epochs", "lrate", "weight_decay")
    own = resolve({"model_name": "aper_finetune"})
    assert [getattr(own, name) for name in names] == [200, 0.01, 0.05, 20, 0.005, 0.05]
    path = tmp_path / "aper_finetune.json"
    stock = {"trained_epoch": 200, "init_weight_decay": 0.05, "tuned_epoch": 20, "finetune_lr": 0.005}
    stock |= {"model_name": "aper_finetune", "optimizer": "sgd", "weight_decay": 0.05}
    path.write_text(json.dumps(stock))
    assert [getattr(load(path)[0], name) for name in names] == [getattr(own, name) for name in names]
    path.write_text(json.dumps({"model_name": "aper_finetune", "optimizer": "sgd", "tuned_epoch": 20}))
    assert [getattr(load(path)[0], name) for name in names] == [50, 0.01, 5e-4, 20, 0.001, 0.005]


def test_adam_in_pycils_file_of_aper_is_adamw_with_the_constants_of_sgd_as_there(tmp_path):
    path = tmp_path / "aper_finetune.json"
    for epochs, optimizer, rates in (("tuned_epoch", "adamw", (0.01, 0.004)), ("epochs", "adam", (1e-3, 0.004))):
        path.write_text(json.dumps({"model_name": "aper_finetune", "optimizer": "adam", epochs: 20, "lrate": 0.004}))
        (run,) = load(path)
        assert (run.optimizer, run.epochs, run.init_lr, run.lrate) == (optimizer, 20, *rates)
        assert (run.init_weight_decay, run.weight_decay) == ((5e-4, 0.005) if optimizer == "adamw" else (0, 0))
    path.write_text(json.dumps({"model_name": "aper_finetune", "optimizer": "sgd", "tuned_epoch": 20}))
    (run,) = load(path, {"optimizer": "adam"})
    assert (run.optimizer, run.init_lr, run.weight_decay) == ("adamw", 0.01, 0.005)
    with pytest.raises(UserError, match="optimizer: 'adam' has its own rates in PyCIL's aper_finetune.json"):
        load(path, {"optimizer": ["sgd", "adam"]})
