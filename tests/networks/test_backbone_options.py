"""``convnet_options``: keyword arguments of the backbone, from the JSON to the network;
and backbones of the user's own.
"""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.small_runs import run_of, suited
from torch import nn

from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, parse_override, resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.consolidation.wsc import consolidated
from pycil_wsc.networks.timm_models import _collect_once
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner import BaseLearner, grow_for


class Pixels(nn.Module):
    """The smallest backbone: no split, so nothing for MEMO."""

    def __init__(self, features=3):
        super().__init__()
        self.out_dim, self.layer = features, nn.Linear(3, features)

    def forward(self, x):
        return self.layer(x.mean((2, 3)))


@pytest.fixture
def pixels(monkeypatch):
    monkeypatch.setattr(registry, "backbones", copy.copy(registry.backbones))
    from pycil_wsc.networks import nets

    monkeypatch.setattr(nets, "backbones", registry.backbones)
    registry.register_backbone("pixels")(Pixels)


@pytest.mark.parametrize("name", [name for name in sorted(registry.learners) if not suited(name)])
def test_every_learner_passes_the_options_on_to_its_backbone(name, settings):
    keys = {"model_name": name, "convnet_type": "resnet8", "convnet_options.width": 4}
    learner = run_of(settings, **keys).learner
    assert learner.network.first_parts()[-1].in_features == 16  # the head's, 4 * width


def test_a_nested_object_of_options_is_read_swept_and_written_again(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"convnet_type": "resnet8", "convnet_options": {"width": [4, 8]}}))
    configs = load(path)
    assert [config.convnet_options for config in configs] == [{"width": 4}, {"width": 8}]
    assert len({run_folder(config) for config in configs}) == 2
    assert resolve(configs[0].to_dict()) == configs[0]
    (config,) = load(path, dict([parse_override("convnet_options={}")]))
    assert config.convnet_options == {}, "the backbone's defaults"
    (config,) = load(path, dict([parse_override("convnet_options.width=2")]))
    assert config.convnet_options == {"width": 2}


def test_without_options_identity_and_folder_are_what_they_were():
    for flat in {"model_name": "icarl", "lrate": 0.05}, {"model_name": "icarl", "lrate": 0.05, "convnet_options": {}}:
        config = resolve(flat)
        assert not any("convnet_options" in key for key in config.identity())
        assert run_folder(config).name == "seed1993-269b71df"


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"convnet_options.depth": 3}, "convnet_options: unknown option 'depth' of 'resnet8'; .*width"),
        ({"convnet_options.widht": 3}, "unknown option 'widht' of 'resnet8'; did you mean 'width'"),
        ({"convnet_options.width": "wide"}, 'convnet_options.width: expected int, got "wide"'),
        ({"convnet_type": "resnet18_small", "convnet_options.stem": "cifar"}, "'resnet18_small' has no options"),
    ],
)
def test_wrong_options_are_one_line(keys, message):
    with pytest.raises(UserError, match=message):
        resolve({"convnet_type": "resnet8"} | keys)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"convnet_type": "resnet18", "convnet_options.stem": "tiny"},
            "stem='tiny' is not one of imagenet, cifar, small",
        ),
        ({"convnet_type": "resnet8", "convnet_options.width": 0}, "width=0: give at least 1 channel"),
    ],
)
def test_values_that_the_backbone_refuses_are_one_line_before_any_training(settings, keys, message):
    with pytest.raises(UserError, match=message):
        run_of(settings, **keys)


class Given(Pixels):
    """Returns what ``forms`` makes of its (1, 3) features."""

    def __init__(self, forms, lacks=()):
        super().__init__()
        self.forms = forms
        for name in lacks:
            delattr(self, name)

    def forward(self, x):
        return self.forms(super().forward(x))


@pytest.mark.parametrize(
    "forms, lacks, message",
    [
        (
            lambda features: {"features": features},
            (),
            r"'mine' gives dict for one image, .* of shape \(1, 3\)",
        ),
        (
            lambda features: features[:, :2],
            (),
            r"gives features of shape \(1, 2\) for one image, not",
        ),
        (lambda features: features, ["out_dim"], "'mine' has no attribute out_dim; set it to the number of"),
    ],
)
def test_a_backbone_that_is_none_is_one_line(forms, lacks, message, settings, pixels):
    registry.register_backbone("mine")(lambda: Given(forms, lacks))
    with pytest.raises(UserError, match=message):
        check_backbone(resolve(settings | {"convnet_type": "mine"}), 8)


def test_options_without_a_default_or_with_none_may_have_any_type(settings, pixels):
    registry.register_backbone("mine")(lambda features, activation=None: Pixels(features))
    keys = {"convnet_type": "mine", "convnet_options.features": 4, "convnet_options.activation": "gelu"}
    assert run_of(settings, **keys).learner.network.backbone.out_dim == 4
    with pytest.raises(UserError, match="missing 1 required positional argument: 'features'"):
        run_of(settings, convnet_type="mine")


def test_a_backbone_without_split_serves_every_learner_but_memo_which_says_so(settings, pixels):
    keys = {"convnet_type": "pixels", "convnet_options.features": 5}
    images = torch.zeros(2, 3, 8, 8)
    assert run_of(settings, model_name="der", **keys).learner.network.extract(images).shape == (2, 5)
    with pytest.raises(UserError, match=r"'pixels' has no split\(\) into a shared trunk .* which MEMO needs"):
        run_of(settings, model_name="memo", **keys)


def test_a_learner_of_two_phases_that_forgot_to_say_so_cannot_be_consolidated(settings):
    class TwoPhases(registry.learners["replay"]):
        def phases(self, task):
            yield self.main_phase(task)
            yield self.main_phase(task)

    assert issubclass(TwoPhases, BaseLearner) and TwoPhases.Plan.one_phase
    config = resolve(settings | {"model_name": "replay", "consolidate": True})
    ours = Run(config, load_dataset(config.dataset, "."))
    learner = consolidated(TwoPhases)(config, ours.manager, ours.train_source, ours.device)
    grow_for(learner, ours.manager.tasks[0])
    phases = learner.phases(ours.manager.tasks[0])
    next(phases)
    with pytest.raises(UserError, match="'replay' trains a task in several phases, .* declare one_phase = False"):
        next(phases)


class Meeting(nn.BatchNorm2d):
    """A layer in which two threads are at the same time."""

    barrier = threading.Barrier(2)

    def forward(self, images):
        self.barrier.wait(60)
        return super().forward(images)


def test_threads_may_predict_together_with_a_network_that_recomputes_its_activations():
    model = nn.Sequential(Meeting(3)).eval()
    _collect_once(model)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(model, [torch.ones(2, 3, 4, 4)] * 2)
    assert torch.equal(one, two)
