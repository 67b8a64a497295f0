"""The operations per image that docs/methods.md and the README state are those that torch counts in each phase."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_runs import once

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.training.phase import Monitor
from pycil_wsc.training.step.cost import Operations, StepCost

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
METHODS = ("finetune", "lwf", "ewc", "si", "mas", "replay", "er_ace", "derpp", "l2_init", "sam", "ema", "icarl", "bic")
METHODS += ("wise_ft", "cofima", "magmax", "ties", "gem", "coil", "podnet", "wa", "der", "foster", "memo", "joint")
METHODS += ("wsc", "lucir")
METHODS += ("cls_er", "redo", "gdumb", "fetril", "aper_finetune", "pass", "il2a", "ssre", "rmm-icarl", "rmm-foster")
METHODS += ("slca", "slca_cofima", "dgr", "duct")
METHODS += ("beef", "tagfex", "replay of tagfex")  # of ResNet-18, as in TagFex's file
LIKE = {"tagfex": "replay of tagfex", "ssre": "replay of tagfex"}  # SSRE's ResNet-18 costs as much
# images and mixtures per training image: each is mixed four times, and nine partners in ten are of another class
IMAGES = {"il2a": 1 + 4 * 0.9}
BESIDE = {"il2a": 4 * 100 * 64**2}  # operations per image whatever its size: covariances of 100 classes of 64 features
EXPANDING = ("der", "memo", "beef", "tagfex")  # methods whose cost grows from task to task by more than rows of a head
SECOND_PHASES = {"foster": {"compression_epochs": 1}, "beef": {"fusion_epochs": 1}, "podnet": {"ft_epochs": 1}}
SECOND_PHASES |= {"slca": {"ca_epochs": 1}, "slca_cofima": {"ca_epochs": 1}, "duct": {"epc_re": 1}}
SECOND_PHASES |= {"lucir": {"ft_epochs": 1}}
SECOND_PHASES["rmm-foster"] = SECOND_PHASES["foster"]
TASKS = 10  # CIFAR-100 in tasks of ten classes
TRAINED = 4  # tasks of the methods that expand


@pytest.fixture(scope="module")
def costs(common, tmp_path_factory):
    """{method: operations per image, a list of the phases of each task}, of ResNet-32. What a method computes before a
    step, per exemplar, stands before its phase.

    Images have half of CIFAR's side, which saves time: all operations but the head's, a thousandth, are a quarter.
    """
    folder = tmp_path_factory.mktemp("costs")
    images = np.random.default_rng(0).integers(0, 256, (200, 16, 16, 3)).astype(np.uint8)
    for count in (1, 2):
        train, test = np.repeat(np.arange(100), count), np.arange(100)
        arrays = {"train_x": images[: len(train)], "train_y": train, "test_x": images[:100], "test_y": test}
        np.savez(folder / f"{count}.npz", **arrays)
    return once(common / "costs.pickle", lambda: {method: counted(method, folder) for method in METHODS})


def counted(method, folder):
    method, _, like = method.partition(" of ")
    settings = json.loads((ROOT / f"exps/{method}.json").read_text())
    if like:
        settings["convnet_type"] = json.loads((ROOT / f"exps/{like}.json").read_text())["convnet_type"]
    settings |= {"init_cls": 10, "increment": 10, "init_epoch": 1, "epochs": 1}
    settings |= {"device": "cpu", "batch_size": 512, "cache_first_task": False}
    count = 2 if method == "bic" else 1  # BiC holds images of each class out
    settings |= {"dataset": f"npz:{folder}/{count}.npz", "memory_per_class": count, "seed": 1993, "out": str(folder)}
    if method == "tagfex":  # a quarter of the projector, too; without exemplars, which would cost as much and take time
        settings |= {"proj_hidden_dim": 512, "memory_per_class": 0}
    settings |= {"exemplars": "random"}  # which costs less to choose, and as much to train on
    settings |= {"prefix": "costs"} | SECOND_PHASES.get(method, {})
    costs = []

    class Monitored(Monitor):
        def task_started(self, task):
            costs.append([])

    class Counted(StepCost):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "per_image" or value:  # most methods do nothing before a step
                costs[-1].append(value)

    growing = method in (*EXPANDING, "replay")
    settings |= {"max_tasks": TRAINED if growing else 2}
    if settings.pop("pretrained", False):
        settings |= {"convnet_type": "resnet32"}
    if method == "pass":  # as many prototypes in a batch as images
        settings |= {"convnet_type": "resnet32", "batch_size": 10}
    if method == "il2a":  # the same, with few pairs of new classes; a mixture costs what an image does
        settings |= {"convnet_type": "resnet32", "init_cls": 90, "increment": 10, "batch_size": 10, "mixtures": 0}
    config = resolve(settings)
    dataset = load_dataset(config.dataset, ".")
    manager = tasks_of(dataset, config)
    device = torch.device("cpu")
    source = open_source(dataset.info, dataset.train, device, config.num_workers)
    learner = configured_learner(config)(config, manager, source, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycil_wsc.training.loop.StepCost", Counted)
        for task in manager.tasks:
            learner.learn(task, Monitored())
    return expanded(costs) if growing else costs[:1] + costs[1:] * (TASKS - 1)


def expanded(costs):
    """The costs of all tasks from those of the first four: a polynomial of degree two from the second task on.

    Each task adds a block, and the head has an entry for each pair of a class and a feature of a block.
    """
    trained = np.arange(1, TRAINED)
    polynomial = np.polyfit(trained, np.array(costs[1:]), 2)  # (3, phases)
    return costs[:1] + [np.polyval(polynomial, task) for task in range(1, TASKS)]


def relative(costs, method):
    """What each phase of each later task costs per image, over Replay's with the same backbone: (9, phases).

    The methods that do not expand are compared in the second task, the only one that they train.
    """
    later = np.array(costs[method][1:]) - BESIDE.get(method, 0)
    replay = np.array(costs[LIKE.get(method, "replay")][1:])
    return (later / (replay if method in EXPANDING else replay[0])).round(2)


def table(page, heading):
    """{first cell: the others} of the table whose header begins with ``heading``."""
    text = (ROOT / page).read_text()
    rows = re.search(rf"^\| {re.escape(heading)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)[1].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: others for name, *others in cells}


STATED = {  # what the pages say of each method, from the relative costs (9 later tasks, phases)
    "finetune, ewc, si, mas, replay, er_ace, derpp, l2_init, ema, joint, wsc": lambda cost: f"{cost[0, 0]:g}",
    "redo, gdumb, wise_ft, cofima, magmax, ties": lambda cost: f"{cost[0, 0]:g}",
    "fetril": lambda cost: f"{cost[0, 0]:g} on features, which cost 0.33 per image once",
    "pass": lambda cost: f"{cost[0, 0]}, with four rotations of each image",
    "il2a": lambda cost: (
        f"{cost[0, 0]} for each image and mixture ({cost[0, 0] * IMAGES['il2a']:.1f} per training image with ten new "
        "classes), and 4 C d² operations for covariances of C classes and d features"
    ),
    "ssre": lambda cost: f"{cost[0, 0]}",
    "slca, slca_cofima": lambda cost: (
        f"{cost[0, 0]:g}; next to nothing in the alignment of the head" if cost[0, 1] < 0.01 else ""
    ),
    "duct": lambda cost: f"{cost[0, 0]:g} in training, {cost[0, 1]} in training the head again",
    "aper_finetune": lambda cost: f"{cost[0, 0]:g} in the second task; afterwards features once, 0.67 per image",
    "sam": lambda cost: f"{cost[0, 0]:g}",
    "cls_er": lambda cost: (  # of "task"; in a step of the other, the network sees what is drawn twice
        f"1 for each image of the batch and {2 + cost[0, 0]:g} for each one drawn; with "
        f'`"memory_update": "task"` {cost[0, 1]:g}, and {cost[0, 0]} for each exemplar of a batch'
    ),
    "gem": lambda cost: "2 + exemplars / `batch_size`" if cost[0, 0] == 2 + 10 / 10 else f"{cost[0, 0]}",
    "lwf, icarl, wa, rmm-icarl, dgr": lambda cost: f"{cost[0, 0]}",
    "coil": lambda cost: f"{cost[0, 0]}, and a pass over the exemplars and new images every `transport_steps`",
    "podnet": lambda cost: f"{cost[0, 0]} in both of its phases" if (cost == cost[0, 0]).all() else f"{cost[0]}",
    "lucir": lambda cost: f"{cost[0, 0]}, and {cost[0, 1]} in the second phase",
    "bic": lambda cost: f"{cost[0, 0]} in training, {cost[0, 1]} in the correction",
    "foster, rmm-foster": lambda cost: f"{cost[0, 0]} in boosting, {cost[0, 1]} in compression",
    "der": lambda cost: f"(k + 2) / 3 in task k: {cost[0, 0]} in the second, {cost[-1, 0]} in the tenth",
    "memo": lambda cost: f"{cost.min()} to {cost.max()}",
    "beef": lambda cost: (
        f"(2 k + 9) / 3 in expansion in task k: {cost[0, 0]} in the second, {cost[-1, 0]} in the tenth; "
        f"k / 3 in fusion: {cost[0, 1]} and {cost[-1, 1]}"
    ),
    "tagfex": lambda cost: f"2 (k + 6) / 3 in task k: {cost[0, 0]} in the second, {cost[-1, 0]} in the tenth",
}


def test_a_view_of_a_parameter_in_a_module_without_gradients_is_counted():
    """As in the pooling of some vision transformers, which torch's own tracker of modules cannot follow."""
    query, layer, cost = torch.nn.Parameter(torch.randn(1, 4, 3)), torch.nn.Linear(3, 5), StepCost()
    with cost.measured(2), torch.no_grad():
        layer(query.expand(2, -1, -1))
    assert cost.per_image == 2 * 4 * 3 * 5


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_the_backward_pass_of_a_convolution_costs_two_forward_passes(kind, groups):
    """One for the gradient of the images, one for that of the weights, whatever its groups."""
    layer, images = kind(8, 16, 3, stride=2, groups=groups), torch.randn(2, 8, 9, 9, requires_grad=True)
    with Operations() as forward:
        output = layer(images)
    places = (9 if kind is torch.nn.ConvTranspose2d else 4) ** 2
    assert forward.total == 2 * 2 * 8 * 16 * 9 // groups * places
    with Operations() as backward:
        output.sum().backward()
    assert backward.total == 2 * forward.total
    with Operations() as of_the_weight_alone:
        layer(images.detach()).sum().backward()
    assert of_the_weight_alone.total == 2 * forward.total, "forward and one gradient"


def test_attention_is_counted_on_the_cpu_too():
    """Two products of (16, 8) matrices for each of 2 x 4 heads; five of them backwards, as torch counts on a GPU."""
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with Operations() as forward:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert forward.total == 2 * 2 * 2 * 4 * 16 * 16 * 8
    with Operations() as backward:
        output.sum().backward()
    assert backward.total == 5 * 2 * 2 * 4 * 16 * 16 * 8


@pytest.mark.slow
def test_costs_per_image_are_those_that_torch_counts(costs):
    page = table("docs/methods.md", "method | operations per image")
    counted = {names: cells for names, cells in page.items() if names.split(", ")[0] in METHODS}
    assert counted.keys() == STATED.keys()
    others = page.keys() - counted.keys()
    (drawing,) = (names for names in others if names.startswith("er, "))  # a step counts what it draws as images
    assert all("step" in registry.learners[name].Plan.memory_updates for name in drawing.split(", "))
    (untrained,) = others - {drawing}
    assert all(not registry.learners[name].Plan.epoch_keys for name in untrained.split(", "))
    built_in = [
        name
        for name, learner in registry.learners.items()
        if learner.__module__.startswith("pycil_wsc.") and not learner.Plan.tunes  # other networks
    ]
    assert sorted(name for names in page for name in names.split(", ")) == sorted(built_in)
    for names, (said,) in counted.items():
        for name in names.split(", "):
            assert STATED[names](relative(costs, name)) == said, name


def test_the_readmes_costs_are_the_largest_of_each_family(costs):
    """One number per family: of all its methods, later tasks and phases; "up to" if a main phase costs less."""
    families = table("README.md", "family | `model_name` | cost")
    named = {family: re.findall(r"`([\w-]+)`", names) for family, (names, _) in families.items()}
    for family, names in named.items():
        cost = families[family][1]
        if family == "Gradient projection":
            assert cost == "above 2" and relative(costs, "gem").min() > 2
            continue
        if registry.learners[names[0]].Plan.tunes:  # another network: methods/pretrained has these
            continue
        trained = [relative(costs, name) * IMAGES.get(name, 1) for name in names if name in METHODS]
        largest = f"{round(max(of_method.max() for of_method in trained), 1):g}"
        least = f"{round(min(of_method[:, 0].min() for of_method in trained), 1):g}"
        assert cost == (largest if largest == least else f"up to {largest}"), family
    assert set(METHODS) - {name for names in named.values() for name in names} == {"replay of tagfex"}
