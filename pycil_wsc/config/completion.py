"""Builds a complete, checked configuration from one value per key; absent keys get the learner's defaults."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from pycil_wsc import registry
from pycil_wsc.config.config_checks import check
from pycil_wsc.config.dropped import refuse_dropped
from pycil_wsc.config.image_config import BACKBONE_OPTION, KEYS, Config, keys_of
from pycil_wsc.config.unknown import DIRECTIVES, refuse_unknown
from pycil_wsc.data.data_options import ALL, STRATEGIES
from pycil_wsc.errors import UserError, shown
from pycil_wsc.files import Json
from pycil_wsc.keys import Key, declared, without_empty_groups
from pycil_wsc.methods.consolidation.wsc_keys import WSCKeys

if TYPE_CHECKING:
    from pycil_wsc.training.learner import BaseLearner

BY_STEP = {"exemplars": "reservoir", "fixed_memory": False}  # defaults with `memory_update` "step"
ONLINE = {  # defaults with `online`, as in Mai et al., Online continual learning in image classification, 2022
    "batch_size": 10,
    "init_epoch": 1,
    "epochs": 1,
    "init_milestones": (),
    "milestones": (),
    "momentum": 0.0,
    "init_weight_decay": 0.0,
    "weight_decay": 0.0,
}
LARGEST_FACTOR = 1000  # by which a budget may multiply the methods' epochs


def complete(flat: Mapping[str, Json]) -> Config:
    """The configuration of a class-incremental run."""
    model_name = registry.spelled(KEYS["model_name"].check(flat.get("model_name", KEYS["model_name"].default)))
    flat = {**flat, "model_name": model_name}
    learner = registry.learners[model_name]
    backbone = {name: value for name, value in flat.items() if name.startswith(BACKBONE_OPTION)}
    known = {*known_keys(), *DIRECTIVES}
    flat = refuse_dropped(without_empty_groups(flat, {*known, BACKBONE_OPTION}))
    flat = {name: value for name, value in flat.items() if name not in backbone}
    refuse_unknown(flat, known, registry.left_out_hint())
    if flat.get("memory_per_class") == "all":
        flat["memory_per_class"] = ALL
    keys = keys_of(learner)
    default = defaults(model_name)
    optimizer = KEYS["optimizer"].check(flat.get("optimizer", default["optimizer"]))
    if optimizer != default["optimizer"]:
        default |= defaults_for_optimizer(optimizer)
    update = KEYS["memory_update"].check(flat.get("memory_update", default["memory_update"]))
    if update == "step":
        default |= BY_STEP
    if KEYS["online"].check(flat.get("online", False)):
        default |= ONLINE
    given = {name: keys[name].check(value) for name, value in flat.items() if name in keys}
    budget = _budget_of(flat.get("budget", "pycil"))
    twice = [name for name in budget.keys if name in given]
    if twice:
        raise UserError(f"{twice[0]}: is set by 'budget'; leave one of the two out")
    values = default | given | budget.keys | _schedule(given, default, learner, budget)
    if "wsc.average_lr" not in given and values["wsc.average_lr"] is not None:
        values["wsc.average_lr"] = values["lrate"]
    if not learner.Plan.uses_memory:
        values |= {"memory_per_class": 0, "fixed_memory": True, "memory_bytes": None}
    elif values["memory_bytes"] is not None:
        values["fixed_memory"] = False
    values |= _unread(values)
    wsc = {name.removeprefix("wsc."): values.pop(name) for name in list(values) if name.startswith("wsc.")}
    options = {name: values.pop(name) for name in declared(learner.Options)}
    backbone = {name.removeprefix(BACKBONE_OPTION): value for name, value in backbone.items()}
    config = Config(**values, wsc=_consolidation(**wsc), convnet_options=backbone, options=learner.Options(**options))
    check(config)
    return config


def _unread(values: Mapping[str, Json]) -> dict[str, Json]:
    """The keys of the other kind of memory, as if they were not given: a file may have several methods."""
    if values["memory_update"] == "task":
        return {name: KEYS[name].default for name in ("replay_batch_size", "steps_per_batch")}
    return {"replay_ratio": None} | ({} if values["exemplars"] in STRATEGIES else {"exemplars": BY_STEP["exemplars"]})


@functools.lru_cache(maxsize=256, typed=True)
def _consolidation(**values: Json) -> WSCKeys:
    """The options with these checked values; most runs of a sweep share them."""
    try:
        return WSCKeys(**values)
    except ValueError as error:
        raise UserError(f"wsc.{error}") from None


def defaults(model_name: str) -> dict[str, Json]:
    """The values of a learner's keys that are absent from the JSON."""
    keys = keys_of(registry.learners[model_name])
    set_defaults = registry.learner_defaults[model_name]
    unknown = [name for name in set_defaults if name not in KEYS]
    if unknown:
        raise UserError(
            f'register_learner("{model_name}", {unknown[0]}=...): not a key shared by all learners; declare it in the '
            "Options dataclass of the learner's class, with pycil_wsc.keys.key"
        )
    usual = {name: key.default for name, key in keys.items()}
    usual["memory_update"] = registry.learners[model_name].Plan.memory_updates[0]
    checked = {name: keys[name].check(value) for name, value in set_defaults.items()}
    of_optimizer = defaults_for_optimizer(set_defaults.get("optimizer", usual["optimizer"]))
    return usual | of_optimizer | checked


def defaults_for_optimizer(optimizer: str) -> dict[str, Json]:
    """The defaults that an optimiser sets; they take precedence over those of a learner with another optimiser."""
    return {name: KEYS[name].check(value) for name, value in registry.optimizer_defaults[optimizer].items()}


def known_keys() -> Mapping[str, Key]:
    """The keys shared by all learners, and each learner's own."""
    return _known_keys(tuple(learner.Options for learner in registry.learners.data.values()))


@functools.lru_cache(maxsize=1)
def _known_keys(options: tuple[type, ...]) -> Mapping[str, Key]:
    """The keys of all learners with these ``options``: a sweep asks for them again for each of its runs."""
    option_keys = {name: key for part in options for name, key in declared(part).items()}
    return MappingProxyType({**option_keys, **KEYS})


def _schedule(
    given: Mapping[str, Json],
    default: Mapping[str, Json],
    learner: "type[BaseLearner]",
    budget: "_Budget",
) -> dict[str, Json]:
    """Scale the epochs and milestones that are not given to match the given ones and the budget.

    Each method keeps its ``default`` epochs, multiplied by the budget's ``factor``. With a budget ``like`` another
    learner's, a task has the other learner's epochs, divided among the method's phases (``epoch_keys``) in the same
    proportions as by default. If the optimiser's steps are to be equal, batches of half the size make half as many
    passes over the data; if the operations are, as many.
    """
    like = budget.like
    factor = budget.factor
    equal_steps = "operations_like" not in budget.keys
    scaled = {}
    of_first = [name for name, key in keys_of(learner).items() if key.like == "batch_size"]
    of_images = tuple(name for name in learner.Plan.epoch_keys if name not in learner.Plan.over_features)
    for keys, milestones in ((("init_epoch",), "init_milestones"), (of_images, "milestones")):
        if not keys:
            scaled[milestones] = ()  # later tasks are learned without training
            continue
        main = keys[0]
        total = default[main]
        requested = given.get(main)
        if like:
            other_keys = ("init_epoch",) if main == "init_epoch" else registry.learners[like].Plan.epoch_keys
            others = defaults(like)
            size_key = of_first[0] if of_first and main == "init_epoch" else "batch_size"
            batch_size = {**default, **given}[size_key]
            requested = given.get(main, sum(others[name] for name in other_keys))
            if equal_steps:
                requested *= batch_size / given.get("batch_size", others["batch_size"])
            total = sum(default[name] for name in keys)
            wrong = [name for name in keys[1:] if name in given]
            if wrong:
                raise UserError(f"{wrong[0]}: is set by 'budget', in proportion to '{main}'; leave it out")
        elif requested is None and factor != 1:
            requested = factor * total
        if requested is None:
            continue
        epochs = {name: max(1, round(default[name] * requested / total)) for name in keys}
        rescaled = [max(1, round(epoch * epochs[main] / default[main])) for epoch in default[milestones]]
        scaled |= {name: value for name, value in epochs.items() if like or name not in given}
        if milestones not in given:
            scaled[milestones] = tuple(epoch for epoch in rescaled if epoch < epochs[main])
    return scaled


@dataclass(frozen=True)
class _Budget:
    """The learner whose number of passes all methods make, if any, the factor of their own epochs, and keys it sets."""

    like: str | None = None
    factor: float = 1.0
    keys: dict[str, Json] = field(default_factory=dict)


def _budget_of(budget: Json) -> _Budget:
    if budget == "pycil":
        return _Budget()
    if isinstance(budget, dict) and len(budget) == 1:
        ((name, value),) = budget.items()
        if name == "updates_like" and isinstance(value, str):
            registry.learners[value]
            return _Budget(like=value)
        if name == "flops_like" and value == "replay":
            return _Budget(like=value, keys={"operations_like": value})
        if name == "epochs_times" and type(value) in (int, float) and 0 < value <= LARGEST_FACTOR:
            return _Budget(factor=float(value))
    raise UserError(
        'budget: expected "pycil", {"updates_like": "replay"}, {"flops_like": "replay"} or '
        f'{{"epochs_times": 0.1}}, got {shown(budget, quotes=True)}'
    )
