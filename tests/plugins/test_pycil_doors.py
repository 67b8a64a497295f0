"""``convs`` and ``utils``: scripts written for PyCIL run on the package, which imports neither."""

import ast
from dataclasses import replace

import numpy as np
import pytest
import torch
from structure import modules, within
from torch.utils.data import DataLoader

from convs.cifar_resnet import resnet32
from convs.linears import SimpleLinear
from convs.resnet import resnet18
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.runs.run import Run
from utils import factory
from utils.data_manager import DataManager
from utils.inc_net import BaseNet, IncrementalNet, get_convnet
from utils.toolkit import accuracy, count_parameters, makedirs, split_images_labels, target2onehot, tensor2numpy

ARGS = {
    "prefix": "reproduce",
    "dataset": "digits",
    "memory_size": 2000,
    "memory_per_class": 5,
    "fixed_memory": True,
    "shuffle": True,
    "init_cls": 4,
    "increment": 3,
    "model_name": "icarl",
    "convnet_type": "resnet8",
    "device": [torch.device("cpu")],
    "seed": 1993,
    "init_epoch": 1,
    "epochs": 1,
    "precision": "fp32",
}


def manager(**changes):
    args = ARGS | changes
    return DataManager(*(args[name] for name in ("dataset", "shuffle", "seed", "init_cls", "increment")), args)


def trained_by_a_script_for_pycil(args):
    """The loop of a script that uses only PyCIL's interface: -> top-1 of each task, by logits and by class means."""
    data, model = manager(), factory.get_model(args["model_name"], args)
    before, curves = count_parameters(model._network), {"cnn": [], "nme": []}
    assert before > 0
    for task in range(data.nb_tasks):
        model.incremental_train(data)
        cnn, nme = model.eval_task(save_conf=False)
        model.after_task()
        curves["cnn"].append(cnn["top1"])
        curves["nme"].append(nme["top1"])
        assert model.exemplar_size == 5 * data.get_accumulate_tasksize(task)
        groups = [name for name in cnn["grouped"] if "-" in name]
        assert groups[0] == "00-09" and {"total", "old", "new"} <= cnn["grouped"].keys()
    return curves


@pytest.mark.slow
@pytest.mark.parametrize("name", ["icarl", "wsc"])
def test_a_script_for_pycil_has_the_accuracies_of_our_own_run(name, tmp_path):
    curves = trained_by_a_script_for_pycil(ARGS | {"model_name": name})
    config = resolve(ARGS | {"model_name": name, "device": "cpu", "out": str(tmp_path), "cache_first_task": False})
    result = Run(config, load_dataset("digits", ".")).execute()
    assert curves["cnn"] == [round(value, 2) for value in result["curve"]]
    assert curves["nme"] == [round(value, 2) for value in result["nme_curve"]]


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_pycils_network_on_pycils_data():
    torch.manual_seed(0)
    data = manager()
    assert [data.get_task_size(task) for task in range(data.nb_tasks)] == [4, 3, 3] and data.nb_classes == 10
    images, labels, train = data.get_dataset(np.arange(0, 4), source="train", mode="train", ret_data=True)
    assert len(train) == len(images) == sum(map(data.getlen, range(4))) and set(labels) == {0, 1, 2, 3}
    network = IncrementalNet({"convnet_type": "resnet32"}, False)
    network.update_fc(4)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _, inputs, targets in DataLoader(train, batch_size=64, shuffle=True):
        out = network(inputs)
        assert out["features"].shape == (len(inputs), network.feature_dim) and len(out["fmaps"]) == 3
        loss = torch.nn.functional.cross_entropy(out["logits"], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    before = network.fc.weight.detach().clone()
    network.update_fc(7)
    assert network.fc.out_features == 7 and torch.equal(network.fc.weight[:4], before)
    network.weight_align(3)
    norms = network.fc.weight.norm(dim=1)
    torch.testing.assert_close(norms[4:].mean(), norms[:4].mean())
    twin = network.copy().freeze()
    assert not any(p.requires_grad for p in twin.parameters()) and count_parameters(twin, trainable=True) == 0


class Biasless(BaseNet):
    """A network of one's own: its head has no bias and is new for each task."""

    def update_fc(self, nb_classes):
        self.fc = SimpleLinear(self.feature_dim, nb_classes, bias=False)


def test_a_network_of_ones_own_derives_from_base_net():
    torch.manual_seed(0)
    network, images = Biasless({"convnet_type": "resnet32"}).freeze(), torch.rand(2, 3, 32, 32)
    with pytest.raises(UserError, match="Biasless: there is no head yet"):
        network(images)
    network.update_fc(5)
    out, features = network(images), network.extract_vector(images)
    assert network.fc.bias is None and torch.equal(out["features"], features)
    torch.testing.assert_close(out["logits"], features @ network.fc.weight.T)


def test_small_helpers(tmp_path):
    for _ in range(2):
        makedirs(tmp_path / "logs" / "run")
    assert (tmp_path / "logs" / "run").is_dir()
    paths, labels = split_images_labels([("a.jpg", 1), ("b.jpg", 0)])
    assert paths.tolist() == ["a.jpg", "b.jpg"] and labels.tolist() == [1, 0]


def test_appended_exemplars_come_last_and_the_transforms_are_those_of_the_data_set():
    data = manager()
    images, labels, _ = data.get_dataset([9], source="test", mode="test", ret_data=True)
    both = data.get_dataset([0], source="test", mode="test", appendent=(images, labels))
    assert [label for _, _, label in both] == [0] * (len(both) - len(images)) + [9] * len(images)
    flipped = data.get_dataset([9], source="test", mode="flip")
    plain = data.get_dataset([9], source="test", mode="test")
    assert torch.equal(flipped[0][1], plain[0][1].flip(2)) and plain[0][1].dtype == torch.float32


def test_a_split_data_set_holds_out_random_samples_of_each_class_and_of_each_class_appended():
    data = manager()
    old = data.get_dataset([0, 1], source="train", mode="test", ret_data=True)[:2]
    images, labels, _ = data.get_dataset([4, 2], source="train", mode="test", appendent=old, ret_data=True)
    rows = {image.tobytes(): row for row, image in enumerate(images)}
    assert len(rows) == len(images), "images differ, so each is recognised"

    def split(seed):
        np.random.seed(seed)
        parts = data.get_dataset_with_split([4, 2], "train", "train", old, val_samples_per_class=3)
        found = [[rows[image.tobytes()] for image in part.images] for part in parts]
        assert all(np.array_equal(part.labels, labels[each]) for part, each in zip(parts, found, strict=True))
        return parts, found

    (train, validation), (trained, held_out) = split(1)
    assert sorted(trained + held_out) == list(range(len(images))) and trained == sorted(trained)
    assert [validation.labels.tolist().count(label) for label in (0, 1, 2, 4)] == [3, 3, 3, 3]
    assert train.trsf.mode == validation.trsf.mode == "train"
    assert split(1)[1] == [trained, held_out] != split(2)[1]


def test_a_split_data_set_that_holds_nothing_out_is_the_whole_one():
    data = manager()
    train, validation = data.get_dataset_with_split([5], source="test", mode="test")
    assert np.array_equal(train.images, data.get_dataset([5], "test", "test").images) and len(validation) == 0


def test_training_images_are_cropped_flipped_and_brightened_with_torchs_own_random_numbers():
    data = manager()
    data.dataset = replace(data.dataset, info=replace(data.dataset.info, padding=1, flip=True, brightness=0.25))
    images, _, train = data.get_dataset([0], source="train", mode="train", ret_data=True)
    normalise = augment.Normalise(data.dataset.info.mean, data.dataset.info.std, torch.device("cpu"))
    torch.manual_seed(3)
    augmented = [train[number][1] for number in range(8)]
    torch.manual_seed(3)
    for image, ours in zip(torch.from_numpy(images[:8]), augmented, strict=True):
        cropped = augment.random_crop_flip(image[None], 1, True, None)
        assert torch.equal(ours, normalise(augment.random_brightness(cropped, 0.25, None))[0])
    assert not torch.equal(train[0][1], augmented[0]), "the next draw is another"


def test_backbones_have_pycils_outputs_and_stems():
    args = {"dataset": "cifar100", "init_cls": 10, "increment": 10, "model_name": "replay", "convnet_type": "resnet18"}
    assert resnet32()(torch.zeros(2, 3, 32, 32))["features"].shape == (2, 64)
    assert get_convnet(args)(torch.zeros(2, 3, 16, 16))["features"].shape == (2, 512)


def test_the_toolkit_computes_by_hand():
    predicted, true = np.array([0, 1, 2, 2, 4, 0]), np.array([0, 1, 1, 2, 4, 5])
    assert accuracy(predicted, true, nb_old=2, increment=2) == {
        "total": 66.67,
        "00-01": 66.67,
        "02-03": 100.0,
        "04-05": 50.0,
        "old": 66.67,
        "new": 66.67,
    }
    assert target2onehot(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert tensor2numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: factory.get_model("rmm", ARGS), "unknown model_name 'rmm'"),
        (lambda: factory.get_model("icarl", ARGS | {"gama": 3}), "unknown key 'gama'"),
        (lambda: manager(aug=2), "aug: 2 views"),
        (lambda: manager().get_dataset([0], "valid", "test"), "source 'valid' is not train or test"),
        (lambda: manager().get_dataset([0], "train", "valid"), "mode 'valid' is not train, test or flip"),
        (lambda: manager().get_dataset([0], "train", "train", m_rate=0.5), "m_rate is not available"),
        (
            lambda: manager().get_dataset_with_split([0], "train", "test", val_samples_per_class=10**4),
            "val_samples_per_class: 10000 of class 0, which has",
        ),
        (lambda: manager().get_dataset_with_split([0], "train", "test", None, -1), "val_samples_per_class: -1 of"),
        (lambda: factory.get_model("icarl", ARGS).eval_task(save_conf=True), "save_conf=True is not available here"),
        (lambda: get_convnet({"convnet_type": "cosine_resnet32"}), "'cosine_resnet32' is not available here"),
        (lambda: resnet18(pretrained=True, args=ARGS), "pretrained weights are not included"),
        (lambda: IncrementalNet({"convnet_type": "resnet32"})(torch.zeros(1, 3, 8, 8)), "call update_fc"),
    ],
)
def test_what_is_not_there_is_one_clear_error(call, message):
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.slow
def test_the_package_imports_neither():
    """By name; ``test_imports_point_one_way`` has the statements. The plugin's function ``run`` imports PyCIL's own."""
    found = [
        (name, function, module)
        for name, path in modules()
        if within(name, ["main", "pycil_wsc"])
        for function, module in imported_by_name(ast.parse(path.read_text()))
        if within(module, ["convs", "utils"])
    ]
    assert found == [("pycil_wsc.plugins.pycil", "run", "utils.factory")]


def imported_by_name(tree, function=None):
    """(function, module) of each call of ``import_module`` or ``__import__`` with a name; outside functions, None."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((function, name.value) for name in node.args[:1] if isinstance(name, ast.Constant))
        yield from imported_by_name(node, node.name if isinstance(node, ast.FunctionDef) else function)


@pytest.mark.parametrize(
    "changes, stem",
    [
        ({"dataset": "cifar100"}, "resnet18_cifar"),
        ({"dataset": "cifar100", "model_name": "memo"}, "resnet18"),
        ({"dataset": "imagenet100"}, "resnet18_small"),
        ({"dataset": "imagenet100", "init_cls": 3}, "resnet18"),
    ],
)
def test_a_learners_resnet18_has_the_stem_of_pycils(changes, stem):
    """The same as that of ``get_convnet``."""
    args = ARGS | {"convnet_type": "resnet18"} | changes
    model = factory.get_model(args["model_name"], args)
    assert model.learner.config.convnet_type == stem
    ours, theirs = (dict(module.named_parameters()) for module in (make_backbone(stem), get_convnet(args)))
    assert [value.shape for value in ours.values()] == [value.shape for value in theirs.values()]


def test_a_method_that_needs_another_augmentation_says_so():
    with pytest.raises(UserError, match="^model_name: 'fetril' needs augmentation 'autoaugment'"):
        factory.get_model("fetril", ARGS | {"model_name": "fetril"})


@pytest.mark.parametrize(
    "changes", [{"convnet_type": "memo_resnet32"}, {"device": ["0", "1"]}, {"wsc": {"retain": 0.5}}]
)
def test_values_in_pycils_form_are_taken(changes):
    name = "wsc" if "wsc" in changes else "memo"
    model = factory.get_model(name, ARGS | {"memory_per_class": 5} | changes)
    device = numbered(resolved_device("gpu:0")) if changes.get("device") == ["0", "1"] else torch.device("cpu")
    assert model.learner.config.method == name and model.device == device
    assert "convnet_type" not in changes or model.learner.config.convnet_type == "resnet32"
    assert "retain" not in changes.get("wsc", {}) or model.learner.config.wsc.retain == 0.5


@pytest.mark.parametrize("key, value", [("memory_bytes", 10**6), ("analyse", ["drift"]), ("out", "elsewhere")])
def test_keys_that_only_whole_runs_have_are_refused(key, value):
    with pytest.raises(UserError, match=f"{key}: is not available in scripts written for PyCIL"):
        factory.get_model("icarl", ARGS | {key: value})
