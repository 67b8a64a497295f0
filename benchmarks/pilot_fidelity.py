"""What stock PILOT computes from our weights and our batches, method by method, over three tasks.

    OMP_NUM_THREADS=1 python benchmarks/pilot_fidelity.py --pilot ../LAMDA-PILOT --out pilot-fidelity.json

Both sides read the same JSON file of PILOT's, shortened, and train a small transformer in double precision, so that
rounding is told from what is computed otherwise. Ours goes first. PILOT's own
``incremental_train`` then starts from the same weights and gets the batches, and the features drawn for a head, that
ours had. Compared after each task are all trained tensors, class means, the loss of each step and the scores of all
test images. Where we differ on purpose, PILOT's behaviour is switched on; the record names what has no switch.
"""

import argparse
import contextlib
import functools
import inspect
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pilot_stock
import torch
from pilot_stock import EPOCHS, OURS, Images, Loader
from record import origin, write
from torch import Tensor

from pycil_wsc.devices import resolved_device
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.phase import Monitor

SIZES = {"image_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 5, "num_heads": 2}
TASKS, CLASSES, PER_CLASS = 3, 2, 6  # classes of a task, images of a class
SHORT = {  # values of the keys of PILOT's files
    **dict.fromkeys(EPOCHS, 2),
    **dict.fromkeys(("init_cls", "increment"), CLASSES),
    **dict.fromkeys(("milestones", "init_milestones"), [1]),
    "batch_size": 6,
    "memory_size": 12,
    "memory_per_class": 2,
    "num_workers": 0,
    "ffn_num": 3,
    "M": 8,
    "prompt_param": [6, 4, 0.1],
    "num_freeze_epochs": 1,
}
CASTS = {"float32": "float64", "FloatTensor": "DoubleTensor"}  # in PILOT's code
FAST = dict.fromkeys(("init_lr", "lrate", "later_lr", "lr"), 0.1)  # so that weights move
ALL = slice(None)
Pair = tuple[str, Tensor, Tensor, slice | None]  # a name, PILOT's tensor, ours, and the part that is new in a task
Pairs = Callable[[Any, dict[str, Tensor], int], Iterator[Pair]]  # of PILOT's learner, our state, the task


def none(stock, state, task) -> Iterator[Pair]:
    yield from ()


@dataclass(frozen=True)
class Method:
    """A method of PILOT's.

    Attributes:
        trained: the tensors that it trains, of which a task copies the new parts to PILOT's side.
        kept: what it computes after the training.
        changes: more values of the file's keys, and further keys of PILOT's code.
        keys: keys of ours that switch PILOT's behaviour on.
        train: the name of PILOT's function that trains.
        left_out: deliberate differences without a switch, and how they are left out.
        begin: called with our learner when its training in a task begins.
        equal: called with PILOT's learner and what ours learned in a task, before PILOT's learns it.
        scores: ours as PILOT's; None: they and the losses of a later training are not compared.
        compared: the beginning of the names of tensors that are compared.
    """

    trained: Pairs
    kept: Pairs = none
    changes: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    train: str = "_train"
    left_out: tuple[str, ...] = ()
    begin: Callable[[Any], None] = lambda ours: None
    equal: Callable[[Any, "Learned"], None] = lambda stock, ours: None
    scores: Callable[[Tensor], Tensor] | None = lambda scores: scores
    compared: str = ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", type=Path, required=True, help="the folder of PILOT's repository")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, in_double_precision():
        pilot_stock.repaired(args.pilot, Path(folder), SIZES, CASTS)
        found = {name: compared(name, args.pilot) for name in args.methods}
    record = {"methods": found, "repairs": [f"{place}: {why}" for place, _, _, why in pilot_stock.REPAIRS]}
    replaced = ["dropout, on both sides: nothing is dropped", "casts to float32, on both sides: to float64"]
    record |= {"replaced": [*pilot_stock.REPLACED, *replaced]}
    record |= {"tasks": TASKS, "classes": CLASSES, "images": PER_CLASS, "precision": "fp64"} | SIZES
    record |= origin(resolved_device("cpu"))
    print(json.dumps(record, indent=2))
    write(record, args.out)


def compared(name, pilot):
    """The largest differences over all tasks."""
    method = METHODS[name]
    file = pilot_stock.settings(pilot, name, SHORT | FAST | method.changes)
    with tempfile.TemporaryDirectory() as folder, without_dropout():
        run = our_run(method, file, Path(folder))
        tasks = [learned(method, run, task) for task in run.manager.tasks]
        with contextlib.redirect_stdout(io.StringIO()):
            differences = stock(method, file, run, tasks)
    lines = [inspect.getsourcefile(type(run.learner)), pilot / f"models/{file['model_name']}.py"]
    ours, theirs = (Path(path).read_text().count("\n") for path in lines)
    largest = {part: max(values) for part, values in differences.items() if values}
    steps = sum(len(task.losses) for task in tasks)
    switched = {"switched": OURS.get(name, {}) | method.keys, "left_out": list(method.left_out)}
    return largest | {"steps": steps, "lines": ours, "pilot_lines": theirs} | switched


# ---- ours ------------------------------------------------------------------------------------------------------------


@dataclass
class Learned:
    """What a task of ours trained on, and what it gave."""

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    epochs: list = field(default_factory=list)  # of batches of images and classes
    drawn: list = field(default_factory=list)  # epochs of batches of features
    losses: list[float] = field(default_factory=list)
    scores: Tensor | None = None  # of all test images


def our_run(method, file, folder):
    count = TASKS * CLASSES * PER_CLASS
    generator = np.random.default_rng(0)
    targets = np.repeat(np.arange(TASKS * CLASSES), PER_CLASS)
    centres = generator.integers(0, 200, (TASKS * CLASSES, 8, 8, 3))
    train, test = ((centres[targets] + generator.integers(0, 56, (count, 8, 8, 3))).astype(np.uint8) for _ in range(2))
    np.savez(folder / "data.npz", train_x=train, train_y=targets, test_x=test, test_y=targets)
    keys = {"dataset": f"npz:{folder / 'data.npz'}"} | method.keys
    config = pilot_stock.our_configuration(file, folder, SIZES, **keys)
    return Run(config, Datasets().of(config))


def learned(method, run, task) -> Learned:
    """Let our learner learn a task."""
    learner, found = run.learner, Learned()
    phases = type(learner).phases

    def watched(task):
        for phase in phases(learner, task):
            if not found.before:
                method.begin(learner)
                found.before = state_of(learner)
            batches = []

            def loss(batch, plain=phase.loss, batches=batches):
                value, logits = plain(batch)
                batches.append((batch.images.clone(), batch.targets.clone()))
                found.losses.append(value.item())
                return value, logits

            yield replace(phase, loss=loss)
            steps = len(batches) // phase.epochs
            epochs = [batches[start : start + steps] for start in range(0, len(batches), steps)]
            (found.drawn if phase.name == "alignment" else found.epochs).extend(epochs)

    learner.phases = watched
    learner.learn(task, Monitor())
    images, _ = plain_images(run, "test", range(task.num_seen))
    with torch.no_grad():
        found.scores = learner.eval().predict(images)
    found.after = state_of(learner)
    return found


def state_of(learner):
    """The learner's tensors by name, those of the network without its name."""
    state = {name: value for name, value in learner.state_dict().items() if isinstance(value, Tensor)}
    return {name.removeprefix("network."): value.clone() for name, value in state.items()}


def plain_images(run, split, classes):
    """Images as in a test, and their classes."""
    source, targets = {
        "train": (run.train_source, run.manager.train_targets),
        "test": (run.evaluator.source, run.manager.test_targets),
    }[split]
    chosen = np.flatnonzero(np.isin(targets, list(classes)))
    ((images, found),) = source.batches(chosen, targets, len(chosen))
    return images, found


# ---- PILOT's ---------------------------------------------------------------------------------------------------------


class Manager:
    """In place of PILOT's data manager: our batches in training, our images otherwise."""

    dataset_name = "cifar224"
    nb_classes = TASKS * CLASSES

    def __init__(self, run):
        self.run = run
        self.epochs: list = []  # of the task

    def get_task_size(self, task):
        return CLASSES

    def getlen(self, label):
        return PER_CLASS

    def get_dataset(self, classes, source, mode, appendent=None, ret_data=False):
        images, labels = plain_images(self.run, source, classes) if len(classes) else (torch.empty(0, 3, 8, 8), [])
        images, labels = images.numpy(), np.asarray(labels)
        if appendent is not None and len(appendent):
            images = np.concatenate([images, appendent[0]])
            labels = np.concatenate([labels, appendent[1]]).astype(np.int64)
        training = mode == "train" and len(classes) > 1
        dataset = Images(images, labels, self.epochs if training else None)
        return (images, labels, dataset) if ret_data else dataset


class Drawn:
    """In place of PILOT's normal distributions and their shuffling: the features that ours drew."""

    def __init__(self, epochs):
        self.epochs = iter(epochs)
        self.parts: list[Tensor] = []
        self.order = torch.empty(0)

    def __call__(self, mean, covariance):
        return self

    def sample(self, sample_shape):
        if not self.parts:
            features, labels = (torch.cat(column) for column in zip(*next(self.epochs)))
            self.order = labels.argsort(stable=True)
            self.parts = list(features[self.order].split(sample_shape[0]))
        return self.parts.pop(0)

    def randperm(self, count):
        return self.order.argsort()


def stock(method, file, run, tasks: list[Learned]):
    """Let PILOT's learner learn all tasks; the differences of each."""
    found: dict[str, list[float]] = {"weights": [], "moved": [], "kept": [], "losses": [], "predictions": []}
    with pilot_stock.small(pretrained(tasks[0]), SIZES):
        theirs = pilot_stock.learner_of(file, TASKS, TASKS * CLASSES)
        manager = Manager(run)
        for number, ours in enumerate(tasks):
            method.equal(theirs, ours)
            manager.epochs = list(ours.epochs)
            if file["model_name"] == "cofima":
                manager.epochs.append(batches_for_the_fisher_information(run, number))
            losses = trained_by_stock(method, theirs, manager, ours, number)
            before = {name: tensor for name, _, tensor, _ in method.trained(theirs, ours.before or ours.after, number)}
            for name, stock, tensor, _ in method.trained(theirs, ours.after, number):
                if name.startswith(method.compared):
                    found["weights"].append(distance(stock, tensor))
                    found["moved"].append(distance(before[name], tensor))
            kept = method.kept(theirs, ours.after, number)
            found["kept"] += [distance(stock, tensor) for _, stock, tensor, _ in kept]
            count = len(ours.losses) if method.scores else sum(map(len, ours.epochs))
            found["losses"] += np.abs(np.subtract(losses[:count], ours.losses[:count])).tolist()
            if method.scores:
                scores = scores_of(theirs, manager, CLASSES * (number + 1))
                found["predictions"].append(distance(scores, method.scores(ours.scores)))
            theirs.after_task()
    return found


def pretrained(task: Learned):
    """The weights that the transformers of both sides begin with, by timm's names."""
    state = task.before or task.after
    for place in ("backbone.vit.", "backbone.", "trunk.vit.", "blocks.0."):
        if f"{place}cls_token" in state:
            break
    return {name.removeprefix(place): value for name, value in state.items() if name.startswith(place)}


def batches_for_the_fisher_information(run, number):
    learner, task = run.learner, run.manager.tasks[number]
    indices = learner.plan.new_samples(task, run.manager.train_targets)
    batches = learner.batches.of(Sampling(indices=indices, mixed=False), task.index, "fisher")
    return [(batch.images, batch.targets) for batch in batches]


def trained_by_stock(method, theirs, manager, ours: Learned, number):
    """Let PILOT's learner learn a task; its losses."""
    module = sys.modules[type(theirs).__module__]
    train, losses = getattr(theirs, method.train), []
    backward = Tensor.backward
    started = []

    def copied(*arguments, **keys):
        if not started:
            for _, stock, tensor, new in method.trained(theirs, ours.before, number):
                if new is not None:
                    stock.data[new] = tensor[new]
        started.append(True)
        return train(*arguments, **keys)

    def noted(loss, *arguments, **keys):
        losses.append(loss.item())
        return backward(loss, *arguments, **keys)

    drawn = Drawn(ours.drawn)
    with contextlib.ExitStack() as stack:
        if ours.before:
            stack.enter_context(patch.object(theirs, method.train, copied))
        stack.enter_context(patch.object(Tensor, "backward", noted))
        if ours.drawn:
            stack.enter_context(patch.object(module, "MultivariateNormal", drawn))
            stack.enter_context(patch.object(torch, "randperm", drawn.randperm))
        theirs.incremental_train(manager)
    return losses


def scores_of(theirs, manager, classes):
    """The scores of which PILOT's test takes the largest, or the distances of which it takes the smallest."""
    found = []

    def noting(order):
        def noted(scores, *arguments, **keys):
            if scores.ndim == 2 and scores.shape[1] == classes:
                found.append(scores)
            return order(scores, *arguments, **keys)

        return noted

    with patch.object(torch, "topk", noting(torch.topk)), patch.object(np, "argsort", noting(np.argsort)):
        theirs._eval_cnn(Loader(manager.get_dataset(range(classes), "test", "test"), batch_size=1000))
    return found[-1]


def distance(one, other):
    """The largest difference of two tensors."""
    one, other = (torch.as_tensor(tensor).detach().double() for tensor in (one, other))
    assert one.shape == other.shape, (one.shape, other.shape)
    return (one - other).abs().max().item()


@contextlib.contextmanager
def without_dropout():
    """The context in which nothing is dropped: the two sides would drop other values."""

    def whole(tensor, *_, **__):
        return tensor

    with (
        patch("torch.nn.functional.dropout", whole),
        patch("pycil_wsc.networks.tuning.modules.dropout", whole),
    ):
        yield


@contextlib.contextmanager
def in_double_precision():
    """The context in which new tensors are float64, as is what either side casts to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)


# ---- where the tensors are -------------------------------------------------------------------------------------------


def first(task):
    """Of what begins at random in the first task alone."""
    return None if task else ALL


def rows(module, state, task, name="head") -> Iterator[Pair]:
    """A linear layer with a row for each class, of which PILOT's may have those of classes to come."""
    seen, new = CLASSES * (task + 1), slice(CLASSES * task, None)
    for kind in ("weight", "bias"):
        yield f"{name}.{kind}", getattr(module, kind)[:seen], state[f"{name}.{kind}"], new


def backbone(module, state, place="backbone.") -> Iterator[Pair]:
    for name, tensor in module.named_parameters():
        yield place + name, tensor, state[place + name], None


def adapters(modules, state, number, new) -> Iterator[Pair]:
    for block, adapter in enumerate(modules):
        for kind in ("weight", "bias"):
            for layer in ("down", "up"):
                name = f"backbone.sets.{number}.{block}.{layer}.{kind}"
                yield name, getattr(getattr(adapter, f"{layer}_proj"), kind), state[name], new


def incremental(stock, state, task) -> Iterator[Pair]:
    yield from backbone(stock._network.backbone, state)
    yield from rows(stock._network.fc, state, task)


def dgr(stock, state, task) -> Iterator[Pair]:
    yield from backbone(stock._network.backbone, state)
    yield from ((name, theirs, ours, ALL) for name, theirs, ours, _ in rows(stock._network.fc, state, task))


def der(stock, state, task) -> Iterator[Pair]:
    network = stock._network
    for number, each in enumerate(network.backbones):
        yield from backbone(each, state, f"blocks.{number}.")
    yield from heads(network.fc, network.aux_fc, state)


def memo(stock, state, task) -> Iterator[Pair]:
    network = stock._network
    for name, tensor in network.TaskAgnosticExtractor.named_parameters():
        if not name.startswith("norm"):  # is not used
            yield f"trunk.{name}", tensor, state[f"trunk.vit.{name}"], None
    for number, block in enumerate(network.AdaptiveExtractors):
        for name, tensor in block.named_parameters():
            if name.startswith(("last_block", "norm")):
                place = f"blocks.{number}.{name.removeprefix('last_')}"
                yield place, tensor, state[place], first(task)
    yield from heads(network.fc, network.aux_fc, state)


def foster(stock, state, task) -> Iterator[Pair]:
    network, student = stock._network, stock._snet
    for number, each in enumerate(network.backbones):
        yield from backbone(each, state, f"blocks.{number}.")
    yield from heads(network.fc, network.fe_fc, state)
    if student and student is not network:  # PILOT's makes its student when it has boosted
        yield from backbone(student.backbones[0], state, "student.blocks.0.")
        for kind in ("weight", "bias"):
            yield f"student.{kind}", getattr(student.fc, kind), state[f"student.head.{kind}"], None


def heads(head, auxiliary, state) -> Iterator[Pair]:
    """With an auxiliary head, as DER has it."""
    for kind in ("weight", "bias"):
        yield f"head.{kind}", getattr(head, kind), state[f"head.{kind}"], ALL
        yield f"aux_head.{kind}", getattr(auxiliary, kind), state[f"aux_head.{kind}"], ALL


def coil(stock, state, task) -> Iterator[Pair]:
    yield from backbone(stock._network.backbone, state)
    yield "head.weight", stock._network.fc.weight, state["head.weight"], first(task)
    yield "head.scale", stock._network.fc.sigma.view(()), state["head.scale"].view(()), None


def prototypes(stock, state, task) -> Iterator[Pair]:
    yield "head", stock._network.fc.weight, state["head.weight"], None


def tuned_once(tensors, head="tuning_head") -> Pairs:
    """APER's, of whose transformer ``tensors`` are tuned, with a ``head`` of their own in the first task."""

    def trained(stock, state, task) -> Iterator[Pair]:
        network = stock._network
        if hasattr(network, "backbones"):
            yield from tensors(network.backbones[1], state, None)
        else:
            yield from tensors(network.backbone, state, ALL)
            yield head, network.fc.weight, state[f"{head}.weight"], ALL

    return trained


def copy_of(module, state, new) -> Iterator[Pair]:
    yield from backbone(module, state, "tuned.0.")


def adapters_of_mlps(module, state, new) -> Iterator[Pair]:
    yield from adapters([block.adaptmlp for block in module.blocks], state, 0, new)


def scales(module, state, new) -> Iterator[Pair]:
    layers = {"patch_embed.proj": (module.patch_embed, 1), "norm": (module, 1)}
    for number, block in enumerate(module.blocks):
        owners = {"norm1": (block, 1), "norm2": (block, 2), "attn.qkv": (block.attn, 1), "attn.proj": (block.attn, 2)}
        owners |= {"mlp.fc1": (block.mlp, 1), "mlp.fc2": (block.mlp, 2)}
        layers |= {f"blocks.{number}.{name}": owner for name, owner in owners.items()}
    for name, (owner, place) in layers.items():
        for theirs, ours in (("scale", "factor"), ("shift", "shift")):
            tensor = state[f"backbone.sets.0.{name.replace('.', '-')}.{ours}"]
            yield f"{name}.{ours}", getattr(owner, f"ssf_{theirs}_{place}"), tensor, new


def tokens(module, state, new) -> Iterator[Pair]:
    yield "tokens", module.Prompt_Tokens, state["backbone.sets.0.tokens"], new


def ranpac(stock, state, task) -> Iterator[Pair]:
    yield from adapters_of_mlps(stock._network.backbone, state, first(task))
    if stock._network.RP_dim is None:
        yield "first_head", stock._network.fc.weight, state["first_head.weight"], ALL


def fecam(stock, state, task) -> Iterator[Pair]:
    yield from adapters_of_mlps(stock._network.backbone, state, first(task))
    if not stock.cov_mats:  # then the head holds class means
        yield "first_head", stock._network.fc.weight, state["first_head.weight"], ALL


def kept_by_fecam(stock, state, task) -> Iterator[Pair]:
    yield "means", stock._network.fc.weight, state["head.means"], None


def ease(stock, state, task) -> Iterator[Pair]:
    yield from adapters(stock._network.backbone.cur_adapter, state, task, ALL)
    yield "proxies", stock._network.proxy_fc.weight, state["proxies.weight"][CLASSES * task :], ALL


def mos(stock, state, task) -> Iterator[Pair]:
    yield from adapters(stock._network.backbone.cur_adapter, state, task, first(task))
    yield from rows(stock._network.backbone.head, state, task)


def kept_by_mos(stock, state, task) -> Iterator[Pair]:
    yield "prototypes", stock._network.fc.weight, state["prototypes"], None
    for label in range(CLASSES * (task + 1)):
        yield f"mean {label}", stock.cls_mean[label], state["means"][label, 0], None
        yield f"covariance {label}", stock.cls_cov[label], state["spreads"][label], None


def l2p(stock, state, task) -> Iterator[Pair]:
    module = stock._network.backbone
    yield "prompts", module.prompt.prompt, state["prompts.prompts"], first(task)
    yield "keys", module.prompt.prompt_key, state["prompts.keys"], first(task)
    yield from rows(module.head, state, task)


def dualprompt(stock, state, task) -> Iterator[Pair]:
    module = stock._network.backbone
    blocks, _, _, length, heads, width = module.e_prompt.prompt.shape  # (blocks, 2, size, length, heads, width)
    ours = state["prompts.prompts"].unflatten(1, (blocks, 2, length)).unflatten(4, (heads, width))
    yield "prompts", module.e_prompt.prompt, ours.permute(1, 2, 0, 3, 4, 5), first(task)
    yield "keys", module.e_prompt.prompt_key, state["prompts.keys"], first(task)
    yield "general", module.g_prompt, state["general"].unflatten(0, (-1, 2)).unflatten(3, (heads, width)), first(task)
    yield from rows(module.head, state, task)


def coda_prompt(stock, state, task) -> Iterator[Pair]:
    for block in range(SIZES["depth"]):
        for theirs, name in (("p", "prompts"), ("k", "keys"), ("a", "attention")):
            ours = state[f"prompts.{block}.{name}"]
            new = slice(len(ours) // (task + 1) * task, None)
            tensor = getattr(stock._network.prompt, f"e_{theirs}_{block}")
            yield f"{block}.{name}", tensor[: len(ours)], ours, new
    yield from rows(stock._network.fc, state, task)


def lae(stock, state, task) -> Iterator[Pair]:
    for number, modules in enumerate((stock._network.pets, stock._network.pets_emas)):
        for block, module in enumerate(modules):
            for theirs, name in ((module.key, "key"), (module.val, "value")):
                place = f"backbone.sets.{number}.{block}.{name}"
                yield f"{place}s", theirs.tokens, state[f"{place}s"], first(task)
                yield f"{place}_scale", theirs.scaler.scale.view(()), state[f"{place}_scale"], None
    yield from rows(stock._network.fc, state, task)


def slca(stock, state, task) -> Iterator[Pair]:
    yield from backbone(stock._network.backbone, state)
    for number, (part,) in enumerate(stock._network.fc.heads):
        for kind in ("weight", "bias"):
            name = f"head.parts.{number}.{kind}"
            yield name, getattr(part, kind), state[name], ALL if number == task else None


def kept_by_slca(stock, state, task) -> Iterator[Pair]:
    yield "means", stock._class_means_slca, state["means"], None
    yield "covariances", stock._class_covs_slca, state["factors"] @ state["factors"].mT, None


def duct(stock, state, task) -> Iterator[Pair]:
    yield from backbone(stock._network.backbone, state)
    yield "head.weight", stock._network.fc.weight, state["head.weight"], slice(CLASSES * task, None)
    yield "head.scale", stock._network.fc.sigma.view(()), state["head.scale"].view(()), None


def kept_by_duct(stock, state, task) -> Iterator[Pair]:
    yield "means", stock._class_means, state["means"], None


# ---- what is made equal ----------------------------------------------------------------------------------------------


@torch.no_grad()
def move_old_rows(ours):
    """Otherwise the student is the teacher in the first step."""
    head, old = ours.network.head, ours.num_old
    if old:
        head.weight[:old] += 0.1 * torch.randn(old, head.in_features, generator=torch.Generator().manual_seed(old))
        head.renew()


def merge_in_training_alone(stock, ours):
    """PILOT's, which merges in every pass."""
    module = stock._network.backbone
    merge = type(module).reweight_adapter

    def merged(adapter, number):
        return merge(module, adapter, number) if torch.is_grad_enabled() else adapter

    module.reweight_adapter = merged


def share_projection(stock, ours):
    """And the ridge parameter."""
    state = ours.after
    made = type(stock).setup_RP

    def setup():
        made(stock)
        stock.W_rand = stock._network.W_rand = state["head.projection"]
        stock._network.fc.sigma.data.fill_(1)

    stock.setup_RP = setup
    stock.optimise_ridge_parameter = lambda *_: state["head.chosen"][0].item()


def share_new_rows_of_the_student(stock, ours):
    network = type(stock._network)
    copied = inspect.unwrap(network.copy_fc)

    @functools.wraps(copied)
    def copy_fc(student, head):
        copied(student, head)
        for kind in ("weight", "bias"):
            getattr(student.fc, kind).data[len(head.bias) :] = ours.before[f"student.head.{kind}"][len(head.bias) :]

    network.copy_fc = copy_fc


SLOWER = {"lrate": 0.02, "+bcb_lrscale": 0.5}
APER = {"kept": prototypes, "changes": {"init_lr": 0.1}}
METHODS = {
    "l2p": Method(l2p, changes={"init_lr": 0.01}, keys={"batchwise_test": True}),
    "dualprompt": Method(
        dualprompt,
        changes={"init_lr": 0.01},
        keys={"batchwise_test": True, "prompts_by_halves": True},
    ),
    "coda_prompt": Method(
        coda_prompt,
        changes={"init_lr": 0.01, "tuned_epoch": 3},
        left_out=("PILOT leaves out the last batch of an epoch; it gets it here",),
    ),
    "aper_adapter": Method(tuned_once(adapters_of_mlps), **APER),
    "aper_ssf": Method(tuned_once(scales), **APER),
    "aper_vpt_deep": Method(tuned_once(tokens), **APER),
    "aper_vpt_shallow": Method(tuned_once(tokens), **APER),
    "aper_finetune": Method(tuned_once(copy_of, "tuned.1"), **APER),
    "ease": Method(ease, prototypes),
    "mos": Method(
        mos,
        kept_by_mos,
        left_out=(
            "PILOT merges adapters in passes without gradients, too; not here",
            "PILOT computes prototypes of later tasks with dropout; nothing is dropped here",
            "PILOT's rows of classes to come shrink by weight decay; they are ours when their task begins",
        ),
        equal=merge_in_training_alone,
        scores=torch.exp,
    ),
    "slca": Method(slca, kept_by_slca, SLOWER, train="_stage1_training"),
    "slca_cofima": Method(
        slca,
        kept_by_slca,
        SLOWER,
        train="_stage1_training",
        left_out=("PILOT multiplies the head's new rows by their Fisher information, and undoes it after the task",),
        scores=None,
        compared="backbone.",
    ),
    "lae": Method(lae, changes={"init_lr": 0.01}, scores=torch.exp),
    "dgr": Method(
        dgr,
        left_out=(
            "in a task's first step PILOT scales up a gradient of rounding; old rows are moved at random before",
        ),
        begin=move_old_rows,
    ),
    "duct": Method(
        duct,
        kept_by_duct,
        {"epochs": 3},
        keys={"lr_re": None},
        left_out=(
            "new rows of PILOT's head begin as 0; they are ours here",
            "PILOT's means after the training are of augmented images; of plain ones here",
        ),
    ),
    "ranpac": Method(
        ranpac,
        changes={"init_lr": 0.1},
        left_out=(
            "the ridge parameter is ours; PILOT chooses it on the last fifth of a shuffled task",
            "PILOT multiplies all scores by the scale of the first task's classifier; by 1 here",
        ),
        equal=share_projection,
    ),
    "fecam": Method(fecam, kept_by_fecam, scores=torch.neg),
    "simplecil": Method(none, prototypes),
    "finetune": Method(incremental),
    "icarl": Method(incremental),
    "der": Method(der),
    "memo": Method(memo),
    "coil": Method(coil),
    "foster": Method(
        foster,
        left_out=("PILOT weights a class by the sum of its images' positions; by their number here",),
        equal=share_new_rows_of_the_student,
    ),
}


if __name__ == "__main__":
    main()
