"""The configuration: loaded, completed with defaults, expanded into runs and checked in this one place.

PyCIL's flat JSON keys keep their names and meaning. A list where one value is expected is an axis of the sweep.
"""

import json
import re
import types
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path

from pycil_wsc import (
    analysis,  # noqa: F401  registers the analyses
    registry,
)
from pycil_wsc.config.keys import PLACES, checked, digest, expand, key, takes_list, typed
from pycil_wsc.consolidation.importance import MOMENT_SCORES
from pycil_wsc.data.memory import ExemplarMemory
from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.learners.consolidating import (
    consolidated,  # the package registers the learners, and with them the backbones
)


@dataclass(frozen=True)
class WSCOptions:
    """Weight Space Consolidation: the keys ``wsc.*``. Where the paper leaves a choice, facts and reasons are in the README."""

    warmup: float = key(0.25, "share of a task's epochs before the reset", low=0, high=1)
    trigger: str = key(
        "warmup",
        "what ends the warm-up: its share (`warmup`), or a plateau of the `training_loss` or of the loss of `held_out` exemplars; without one the task ends as Replay",
        choices=("warmup", "training_loss", "held_out"),
    )
    patience: int = key(3, "a plateau is as many epochs without a new least loss", low=1)
    held_out: float = key(
        0.1, "share of each class's exemplars that `held_out` does not train on, at least one of two", low=0, high=0.5
    )
    retain: float = key(
        0.2, "share of the parameters that keep their weights at the reset (the paper's Q)", low=0, high=1
    )
    blend: float = key(0.5, "weight of the current weights in a reset parameter (the paper's alpha)", low=0, high=1)
    importance: str = key(
        "moment",
        "what parameters are ranked by: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
    )
    importance_samples: int | None = key(
        None, "`fisher` and `hessian`: training samples to pass over, drawn by `seed`; null: all", low=1
    )
    probes: int = key(1, "`hessian`: random vectors of Hutchinson's estimate", low=1)
    betas: tuple[float, ...] = key((0.9, 0.999), "decay of the gradient's first and second moment", low=0, high=1)
    score_abs: bool = key(False, "first moment of the absolute gradient rather than of the gradient")
    rank_scope: str = key(
        "global", "rank over all parameters together (`global`) or within each `tensor`", choices=("global", "tensor")
    )
    reset: str = key(
        "blend",
        "`blend` with the previous task's weights, `revert` to them, `random` initial values, `shrink_perturb` all, `continual_backprop` (units, all through the task), or `none`",
        choices=("blend", "revert", "random", "shrink_perturb", "continual_backprop", "none"),
    )
    shrink: float = key(0.6, "`shrink_perturb`: factor of the current weights", low=0, high=1)
    perturb: float = key(0.01, "`shrink_perturb`: factor of the random initial values that are added", low=0)
    replacement_rate: float = key(
        1e-5, "`continual_backprop`: share of the mature units replaced in a step", low=0, high=1
    )
    maturity: int = key(1000, "`continual_backprop`: steps that a new unit is safe", low=0)
    utility_decay: float = key(0.99, "`continual_backprop`: decay of the utility's running mean", low=0, high=1)
    reset_every: str | int = key(
        "once",
        "how often to reset from the end of the warm-up on: `once`, each `epoch` or `iteration`, or a number of epochs",
    )
    reset_head: bool = key(True, "the head takes part in ranking and reset")
    reset_norm: bool = key(True, "batch norm's weights and biases take part in ranking and reset")
    reset_new_rows: bool = key(True, "the head's rows of new classes take part in ranking and reset")
    reset_momentum: bool = key(False, "clear the optimiser's momentum at the reset")
    reset_buffers: bool = key(False, "blend batch-norm statistics at the reset too")
    average: bool = key(True, "average the weights from the reset on")
    average_every: int = key(5, "interval of the average (the paper's j)", low=1)
    average_unit: str = key("epoch", "unit of `average_every`: `epoch` or `iteration`", choices=("epoch", "iteration"))
    average_start: str = key(
        "reset",
        "the first weights averaged: those just `reset`, or those of the `first` interval after",
        choices=("reset", "first"),
    )
    average_count: str = key(
        "since_reset",
        "`since_reset` is a plain mean, `absolute` the paper's n = i/j with i from the task's start",
        choices=("since_reset", "absolute"),
    )
    average_last: bool = key(True, "the task's last weights enter the average")
    average_lr: float | None = key(
        0.1,
        "learning rate held after the reset; null keeps the schedule (in a prototype's single runs the average then lost, see above)",
        low=0,
    )
    average_anneal: int = key(5, "epochs in which the rate goes over to `average_lr` (cosine)", low=0)
    bn_update: str = key(
        "recompute",
        "batch-norm statistics of the average: a pass over the data, a `copy` of the last, or their `average`",
        choices=("recompute", "copy", "average"),
    )
    first_task: bool = key(False, "consolidate in the first task too")


@dataclass(frozen=True)
class Config:
    """Everything that decides one run, and where it runs. Learners bring defaults of their own (``pycil_wsc.registry``)."""

    prefix: str = key("run", "first folder below `out`: names an experiment")
    dataset: str = key("cifar100", "`cifar100`, `cifar10`, `digits`, `imagenet100`, `npz:PATH` or `folder:PATH`")
    memory_size: int = key(2000, "exemplars in all, when `fixed_memory` is false", low=0)
    memory_per_class: int = key(20, "exemplars per class, when `fixed_memory` is true", low=0)
    fixed_memory: bool = key(True, "keep `memory_per_class` of each class rather than share `memory_size` among them")
    shuffle: bool = key(True, "shuffle the class order by `seed`, as PyCIL does")
    init_cls: int = key(10, "classes of the first task", low=1)
    increment: int = key(10, "classes of each later task", low=1)
    model_name: str = key("wsc", "the learner")
    consolidate: bool = key(
        False, "Weight Space Consolidation (`wsc.*`) on top of a learner that trains one network in one phase per task"
    )
    convnet_type: str = key(
        "resnet32", "the backbone: `resnet8`, `resnet20`, `resnet32`, `resnet18`, `resnet18_cifar`, `resnet18_small`"
    )
    device: str = key("auto", "`auto`, `cpu`, `cuda` or `cuda:N`; of PyCIL's list of GPU numbers the first is used")
    seed: int = key(1993, "class order, initial weights, batches, augmentation and exemplars", low=0)

    init_epoch: int = key(200, "epochs of the first task", low=1)
    init_lr: float = key(0.1, "learning rate of the first task", low=0)
    init_milestones: tuple[int, ...] = key(
        (60, 120, 170), "first task: epochs at which the rate is multiplied by `init_lr_decay`"
    )
    init_lr_decay: float = key(0.1, "factor at each of `init_milestones`", low=0)
    init_weight_decay: float = key(5e-4, "weight decay of the first task", low=0)
    epochs: int = key(70, "epochs of each later task", low=1)
    lrate: float = key(0.1, "learning rate of later tasks", low=0)
    milestones: tuple[int, ...] = key((30, 50), "later tasks: epochs at which the rate is multiplied by `lrate_decay`")
    lrate_decay: float = key(0.1, "factor at each of `milestones`", low=0)
    weight_decay: float = key(2e-4, "weight decay of later tasks", low=0)
    scheduler: str = key(
        "steplr",
        "the rate within a task: `steplr` falls at the milestones, `cosine` to 0",
        choices=("steplr", "cosine"),
    )
    momentum: float = key(0.9, "SGD's momentum", low=0, high=1)
    batch_size: int = key(128, "images in a batch", low=1)
    replay_ratio: float | None = key(
        None,
        "share of each batch that the current task has, the rest being exemplars; null: all are shuffled together",
        low=0,
        high=1,
    )
    exemplars: str = key(
        "herding", "how exemplars are chosen: `herding`, `random` or `reservoir`", choices=ExemplarMemory.strategies
    )
    validation_split: float = key(
        0.0,
        "share of each class's training samples held out by `seed` and tested on in place of the test set",
        low=0,
        high=0.5,
    )
    nme: bool = key(
        True, "report nearest-mean-of-exemplars accuracy too (one more pass over the memory after each task)"
    )

    image_size: int | None = key(None, "side of the images of folder data; null: the data set's own", low=8)
    cache_images: bool = key(
        False,
        "decode image files from copies with the test transform's short side, made once below `data_root`/resized",
    )
    padding: int | None = key(None, "zero padding of the random crop; null: the data set's own", low=0)
    flip: bool | None = key(None, "mirror training images at random; null: the data set's own")
    brightness: float | None = key(None, "brightness jitter, factor in 1 +- this; null: the data set's own", low=0)

    precision: str = key(
        "auto",
        "`fp32`, `bf16`, or `auto`: bf16 where the processor or GPU computes it natively",
        choices=("auto", "fp32", "bf16"),
    )
    deterministic: bool = key(
        False, "on a GPU use algorithms that give the same numbers each time, to the bit; on the CPU they always do"
    )
    cuda_graph: bool = key(
        False, "on a GPU launch each step's forward and backward pass as one CUDA graph (not measured yet)"
    )
    num_workers: int = key(4, "processes that decode image files", low=0)
    threads: int | None = key(
        None, "processor threads of a run; null: one for each core. Small networks are best with 1", low=1
    )
    cache_first_task: bool = key(True, "train a first task that several runs share once (kept in `out`/first_tasks)")
    data_root: str = key("data", "folder of the data sets")
    out: str = key("runs", "folder of the results")
    checkpoint_seconds: float = key(
        10.0, "least time between checkpoints within a task, each at the end of an epoch", low=0
    )
    save_weights: bool | str = key(
        False,
        'keep the weights for `pycil_wsc.load`: `true` those after the last task, `"every"` those after each',
        choices=(False, True, "every"),
    )
    tensorboard: bool = key(False, "write each epoch's and task's scalars for TensorBoard (`pip install tensorboard`)")
    analyse: tuple[str, ...] = key((), "what to record for the report: `gradients`, `drift`, `flatness`, `dormant`")
    wsc: WSCOptions = field(default_factory=WSCOptions)
    options: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)  # what the learner alone knows

    language_model = False

    def to_dict(self):
        """Plain JSON values under the JSON's own names. Loading them gives this configuration again."""
        values = {name: getattr(self, name) for name in FIELDS if "." not in name} | vars(self.options)
        if self.learner.consolidates:
            values |= {f"wsc.{f.name}": getattr(self.wsc, f.name) for f in fields(WSCOptions)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def identity(self):
        """What decides the result: ``to_dict`` without the places, and without the memory key that does not count."""
        skipped = PLACES | ({self._other_memory_key} - self.learner.also_reads(self))
        return {name: value for name, value in self.to_dict().items() if name not in skipped}

    @property
    def _other_memory_key(self):
        """The one that does not say how many exemplars there are."""
        return "memory_size" if self.fixed_memory else "memory_per_class"

    @property
    def learner(self):
        """The learner's class."""
        learner = registry.learners[self.model_name]
        return consolidated(learner) if self.consolidate else learner

    @property
    def method(self):
        """The learner's name, as folders and tables have it."""
        return f"{self.model_name}+wsc" if self.consolidate else self.model_name

    @property
    def run_folder(self):
        """``<out>/<prefix>/<dataset>-b<init_cls>-inc<increment>/<model_name>[+wsc]/m<memory>/seed<seed>[-<hash of what else differs>]``"""
        usual = resolve({name: getattr(self, name) for name in IN_PATH if name != self._other_memory_key}).identity()
        memory = f"m{self.memory_per_class}" if self.fixed_memory else f"total{self.memory_size}"
        dataset = re.sub(r"[^\w.]+", "-", self.dataset).strip("-")[-60:]
        return Path(
            self.out,
            self.prefix,
            f"{dataset}-b{self.init_cls}-inc{self.increment}",
            self.method,
            memory,
            f"seed{self.seed}{digest(self.identity(), usual)}",
        )


FIELDS = {f.name: f for f in fields(Config) if f.metadata} | {f"wsc.{f.name}": f for f in fields(WSCOptions)}
KINDS = typing.get_type_hints(Config) | {
    f"wsc.{name}": kind for name, kind in typing.get_type_hints(WSCOptions).items()
}
DIRECTIVES = {"budget"}  # read while loading; what they decide is in other keys
ALIASES = {"init_epochs": "init_epoch", "boosting_epochs": "epochs", "lr": "lrate"}  # PyCIL's names in foster.json
STOCK = {"skip": False, "debug": False, "t_max": None}  # of PyCIL's memo.json: nothing here to turn on
IN_PATH = (
    "prefix",
    "dataset",
    "memory_size",
    "memory_per_class",
    "fixed_memory",
    "init_cls",
    "increment",
    "model_name",
    "consolidate",
    "seed",
)


def load(path, overrides=None):
    """The runs that the JSON file at ``path`` asks for, seeds outermost: a list of :class:`Config`.

    ``overrides`` maps keys (``wsc.retain`` for nested ones) to values that win over the file's. ``runs`` is a list of sets of
    keys: each is laid over the others, and the runs are those of all sets.
    """
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name an existing JSON file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); correct the file") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object of keys and values")
    try:
        runs = _all_runs(raw, overrides or {})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return list({config.run_folder: config for config in runs}.values())  # points that are the same run are one run


def _all_runs(raw, overrides):
    """The runs of every entry of ``runs``, or of the file itself: each entry's first seed, then each one's second, and so on."""
    shared = {name: value for name, value in raw.items() if name != "runs"}
    if "runs" not in raw:
        return _grid(_flatten(shared) | overrides)
    if (
        not isinstance(raw["runs"], list)
        or not raw["runs"]
        or not all(isinstance(entry, dict) for entry in raw["runs"])
    ):
        raise UserError("runs: expected a list of objects of keys and values, at least one")
    ranked = []
    for number, entry in enumerate(raw["runs"]):
        try:
            configs = _grid(_flatten(shared) | _flatten(entry) | overrides)
        except UserError as error:
            raise UserError(f"runs[{number}]: {error}") from None
        seeds = list(dict.fromkeys(config.seed for config in configs))
        ranked += [(seeds.index(config.seed), config) for config in configs]
    return [config for _, config in sorted(ranked, key=lambda pair: pair[0])]


def _grid(flat):
    """The run of each point of the sweep over list-valued keys."""
    points = (
        expand(flat, _language_models().takes_list)
        if of_a_language_model(flat)
        else expand(_our_names(flat), _takes_list)
    )
    return [resolve(point) for point in points]


def of_a_language_model(flat):
    """Whether these keys describe a run of ``pycil_wsc.llm``."""
    return any(name.partition(".")[0] == "llm" for name in flat)


def _language_models():
    from pycil_wsc.llm import config  # an extra

    return config


def parse_override(text):
    """``key=value`` of the command line: the value is read as JSON, or taken as a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: expected key=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _flatten(raw):
    """Nested groups become dotted keys: {"wsc": {"retain": 0.2}} -> {"wsc.retain": 0.2}."""
    flat = {}
    for name, value in raw.items():
        nested = isinstance(value, dict) and value and name not in DIRECTIVES
        flat |= {f"{name}.{inner}": v for inner, v in value.items()} if nested else {name: value}
    return flat


def _our_names(flat):
    """PyCIL's own files as they are: its other names become ours, and what has no counterpart may stand at its stock value."""
    flat = {ALIASES.get(name, name): value for name, value in flat.items() if name not in STOCK or value != STOCK[name]}
    if str(flat.get("convnet_type")).startswith("memo_"):
        flat["convnet_type"] = flat["convnet_type"].removeprefix("memo_")
    return flat | {"device": _first_device(flat["device"])} if "device" in flat else flat


def _takes_list(name):
    return takes_list(KINDS.get(name)) or any(isinstance(d.get(name), list) for d in registry.learner_defaults.values())


def _first_device(device):
    """PyCIL's ``["0", "1"]``, ``[0]`` or ``[-1]`` as one of our names; anything else as it is."""
    if isinstance(device, list) and device:
        device = device[0]
    if isinstance(device, int) or (isinstance(device, str) and re.fullmatch(r"-?\d+", device)):
        return "cpu" if int(device) < 0 else f"gpu:{int(device)}"
    return device


def resolve(flat):
    """One complete, checked :class:`Config` from one value per key; what is not given has the learner's default.

    Keys of a language model give a :class:`pycil_wsc.llm.config.LLMConfig`.
    """
    if of_a_language_model(flat):
        return _language_models().resolve(flat)
    learner = flat.get("model_name", FIELDS["model_name"].default)
    own = registry.learner_defaults[_checked("model_name", learner)]
    _refuse_unknown(flat)
    values = {name: f.default for name, f in FIELDS.items()} | own
    values |= {name: value for name, value in flat.items() if name in values}
    values |= _schedule(flat, learner)
    values = {name: _checked(name, value, own) for name, value in values.items()}
    if not registry.learners[learner].uses_memory:
        values |= {"memory_per_class": 0, "fixed_memory": True}
    wsc = {name.removeprefix("wsc."): values.pop(name) for name in list(values) if name.startswith("wsc.")}
    options = {name: values.pop(name) for name in list(values) if name not in FIELDS}
    config = Config(**values, wsc=WSCOptions(**wsc), options=types.SimpleNamespace(**options))
    _check_together(config)
    return config


def _refuse_unknown(flat):
    known = (set(FIELDS) | DIRECTIVES).union(*registry.learner_defaults.values())
    for name in flat:
        if name not in known:
            raise UserError(f"unknown key '{name}'{did_you_mean(name, known) if name else ''}")


def _schedule(flat, learner):
    """Epochs and milestones that the file leaves open, in proportion to those it gives and to the budget.

    By default each method has its own epochs. A budget of {"updates_like": other} gives it the other's: as many passes over
    the data in each task, spread over the method's phases (``epoch_keys``) as usual.
    """
    like, scaled = _reference(flat.get("budget", "pycil")), {}
    for first_task, milestones in ((True, "init_milestones"), (False, "milestones")):
        usual = _usual_epochs(learner, first_task)
        main = next(iter(usual))
        if like:
            asked, whole = flat.get(main, sum(_usual_epochs(like, first_task).values())), sum(usual.values())
        else:
            asked, whole = flat.get(main), usual[main]
        if not isinstance(asked, int) or asked < 1:
            continue  # not given; or no number of epochs, as the check will say
        epochs = {name: max(1, round(value * asked / whole)) for name, value in usual.items()}
        places = [max(1, round(m * epochs[main] / usual[main])) for m in _default(learner, milestones)]
        scaled |= {name: value for name, value in epochs.items() if like or name not in flat}
        scaled |= {milestones: [place for place in places if place < epochs[main]]} if milestones not in flat else {}
    return scaled


def _usual_epochs(learner, first_task):
    """Key -> epochs of the phases of a task, as the learner has them by default."""
    keys = ("init_epoch",) if first_task else registry.learners[learner].epoch_keys
    return {name: _default(learner, name) for name in keys}


def _default(learner, name):
    own = registry.learner_defaults[learner]
    return own[name] if name in own else FIELDS[name].default


def _reference(budget):
    """The learner whose number of updates counts, or None for each its own."""
    if budget == "pycil":
        return None
    if isinstance(budget, dict) and list(budget) == ["updates_like"] and isinstance(budget["updates_like"], str):
        registry.learners[budget["updates_like"]]
        return budget["updates_like"]
    raise UserError(f'budget: expected "pycil" or {{"updates_like": "replay"}}, got {json.dumps(budget, default=str)}')


def _checked(name, value, own=types.MappingProxyType({})):
    """``value`` with the type of key ``name`` and within its limits, or a :class:`UserError`."""
    if name not in FIELDS:
        return typed(name, value, tuple[float, ...] if isinstance(own[name], list) else type(own[name]))
    return checked(name, value, KINDS[name], FIELDS[name].metadata)


def _check_together(config):
    """What no key can be checked for alone."""
    for epochs, milestones in (("init_epoch", "init_milestones"), ("epochs", "milestones")):
        places, end = getattr(config, milestones), getattr(config, epochs)
        if list(places) != sorted(places) or any(not 0 < place < end for place in places):
            raise UserError(f"{milestones}: {list(places)} must rise and lie within the {end} epochs of '{epochs}'")
    if config.wsc.trigger == "held_out" and config.fixed_memory and config.memory_per_class < 2:
        raise UserError(
            f"wsc.trigger: 'held_out' needs two exemplars of a class, and memory_per_class is {config.memory_per_class}; keep more, or use 'training_loss'"
        )
    if config.wsc.utility_decay >= 1:
        raise UserError("wsc.utility_decay: 1 never takes anything in; use less")
    if config.wsc.warmup >= 1 and config.wsc.reset != "none":
        raise UserError("wsc.warmup: 1 leaves no epoch after the reset; use less")
    if config.wsc.reset_every not in ("once", "epoch", "iteration") and (
        isinstance(config.wsc.reset_every, str) or config.wsc.reset_every < 1
    ):
        raise UserError(
            f"wsc.reset_every: {config.wsc.reset_every!r} is not once, epoch, iteration or a number of epochs"
        )
    if config.wsc.importance not in (*MOMENT_SCORES, "drift"):
        registry.importances[config.wsc.importance]
    if len(config.wsc.betas) != 2 or max(config.wsc.betas) >= 1:
        raise UserError(f"wsc.betas: expected two numbers below 1, got {list(config.wsc.betas)}")
    if config.wsc.average_count == "absolute" and config.wsc.average_start != "reset":
        raise UserError("wsc.average_start: 'absolute' counting starts from the reset weights; use 'reset'")
    registry.backbones[config.convnet_type]
    for name in config.analyse:
        registry.analyses[name]
    learner = registry.learners[config.model_name]
    if config.consolidate and (learner.consolidates or not learner.one_phase):
        reason = "consolidates already" if learner.consolidates else "trains in two phases per task"
        raise UserError(f"consolidate: '{config.model_name}' {reason}; leave the key out")
    if problem := learner.check(config):
        raise UserError(problem)
    if not config.dataset.startswith(("npz:", "folder:")):
        registry.datasets[config.dataset]
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|gpu:\d+", config.device):
        raise UserError(f"device: '{config.device}' is not auto, cpu, cuda, cuda:N or a list of GPU numbers")
    if not re.fullmatch(r"[\w.-]+", config.prefix) or config.prefix in (".", ".."):
        raise UserError(
            f"prefix: '{config.prefix}' must be a folder name of letters, digits, dots, dashes and underscores"
        )
