"""APER on a transformer: adapters, scales or prompts learn the first task; a class is its mean of both features."""

import pytest
import torch
from reference import tuning
from support.methods import SILENT
from support.small_runs import SETTINGS, batch_of, small_data, suited

pytest.importorskip("timm")
from pycil_wsc.config.loading import load, resolve  # noqa: E402
from pycil_wsc.launch.attempt import Datasets  # noqa: E402
from pycil_wsc.runs.run import Run  # noqa: E402
from pycil_wsc.training.learner import grow_for

NAMES = {"aper_adapter": {"ffn_num": 3}, "aper_ssf": {}, "aper_vpt": {}, "shallow": {"vpt_type": "shallow"}}


def added(learner):
    """What the slow transformer needs of what is trained."""
    (part,) = learner.network.backbone.sets
    if learner.config.model_name == "aper_ssf":
        return {"scales": {name.replace("-", "."): (each.factor, each.shift) for name, each in part.items()}}
    if learner.config.model_name == "aper_adapter":
        names = {"down": "down.weight", "b": "down.bias", "up": "up.weight", "c": "up.bias"}
        fixed = {"factor": 0.1, "mode": "parallel", "place": "mlp"}
        return {
            "adapters": {
                int(index): {short: each.get_parameter(name) for short, name in names.items()} | fixed
                for index, each in part.items()
            }
        }
    return {"prompts": part.tokens[0]} if len(part.tokens) == 1 else {"deep": list(part.tokens)}


@pytest.fixture(scope="module", params=sorted(NAMES))
def learner(request, tmp_path_factory):
    data = small_data(tmp_path_factory.mktemp("aper") / "data.npz", per_class=3)
    name = "aper_vpt" if request.param == "shallow" else request.param
    keys = {"dataset": f"npz:{data}", "model_name": name, "precision": "fp32", "init_epoch": 2}
    config = resolve(SETTINGS | keys | suited(name) | NAMES[request.param])
    return Run(config, Datasets().of(config)).learner


def features_of(learner, image):
    weights = dict(learner.network.backbone.vit.named_parameters())
    tuned = tuning.features(weights, 2, image, **added(learner))
    tuned = tuned if tuned.ndim == 1 else tuned[0]  # the class token's, beside those of prompts
    return tuning.features(weights, 2, image), tuned


def test_only_what_was_added_learns_and_only_in_the_first_task(learner):
    tasks = learner.manager.tasks
    grow_for(learner, tasks[0])
    network = learner.network
    before = {name: value.clone() for name, value in network.backbone.state_dict().items()}
    names = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert all(name.startswith(("backbone.sets.", "tuning_head.")) for name in names)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 1, 0])
    learner.eval()
    loss, logits = learner.loss(batch_of(images, targets))
    head = network.tuning_head
    expected = []
    for image in images:
        feature = features_of(learner, image)[1]
        expected.append(head.scale * torch.stack([feature @ row / feature.norm() / row.norm() for row in head.weight]))
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(torch.stack(expected), targets))
    after = []
    for task in tasks:
        learner.learn(task, SILENT)
        after.append({name: value.clone() for name, value in network.backbone.state_dict().items()})
    moved = {name for name, value in after[0].items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("sets.") for name in moved)
    assert all(torch.equal(value, after[0][name]) for name, value in after[2].items())


def test_a_class_is_its_mean_of_both_features(learner):
    """After the test above; also of the first task's classes, whose means are those after its training."""
    learner.eval()
    for label in (0, 5):
        indices = torch.from_numpy(learner.manager.train_targets).eq(label).nonzero().flatten().numpy()
        images = torch.cat([i for i, _ in learner.batches.source.batches(indices, learner.manager.train_targets, 8)])
        with torch.no_grad():
            each = torch.stack([torch.cat(features_of(learner, image)) for image in images])
        torch.testing.assert_close(learner.network.head.weight[label], each.mean(0), rtol=1e-4, atol=1e-5)
    assert learner.network.head.scale.item() == 1


def test_pilots_spelling_of_its_own_file_is_understood(tmp_path):
    (tmp_path / "aper.json").write_text(
        '{"model_name": "aper_aperpter", "backbone_type": "pretrained_vit_b16_224_adapter", "tuned_epoch": 3, '
        '"init_lr": 0.02, "ffn_num": 16, "vpt_type": "deep", "prompt_token_num": 5}'
    )
    (config,) = load(tmp_path / "aper.json")
    assert (config.model_name, config.init_epoch, config.init_lr) == ("aper_adapter", 3, 0.02)
    assert config.options.ffn_num == 16
