"""One value per key -> a complete, checked configuration: what is not given has the learner's default."""

from collections.abc import Iterable, Mapping
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config import pycil
from pycil_wsc.config.checks import check
from pycil_wsc.config.loading import DIRECTIVES
from pycil_wsc.config.options import BACKBONE_OPTION, KEYS, Config, keys_of
from pycil_wsc.config.wsc import WSCOptions
from pycil_wsc.data.memory import ALL
from pycil_wsc.errors import UserError, did_you_mean, shown
from pycil_wsc.keys import Key, declared

EMPTY = ("convnet_options", {})  # a group without keys is not flattened


def complete(flat: Mapping[str, Any]) -> Config:
    """The configuration of a class-incremental run."""
    model_name = KEYS["model_name"].check(flat.get("model_name", KEYS["model_name"].default))
    if model_name not in registry.learners:
        pycil.refuse_other_method(model_name)
    learner = registry.learners[model_name]
    backbone = {name: value for name, value in flat.items() if name.startswith(BACKBONE_OPTION)}
    flat = {name: value for name, value in flat.items() if name not in backbone and (name, value) != EMPTY}
    _refuse_unknown(flat)
    if flat.get("memory_per_class") == "all":
        flat["memory_per_class"] = ALL
    optimizer = KEYS["optimizer"].check(flat.get("optimizer", KEYS["optimizer"].default))
    keys, usual = keys_of(learner), defaults(model_name) | suited_to(optimizer)
    given = {name: keys[name].check(value) for name, value in flat.items() if name in keys}
    values = usual | given | _schedule(given, usual, learner, _budget_of(flat.get("budget", "pycil")))
    if not learner.uses_memory:
        values |= {"memory_per_class": 0, "fixed_memory": True}
    wsc = {name.removeprefix("wsc."): values.pop(name) for name in list(values) if name.startswith("wsc.")}
    options = {name: values.pop(name) for name in declared(learner.Options)}
    named = {name.removeprefix(BACKBONE_OPTION): value for name, value in backbone.items()}
    config = Config(**values, wsc=WSCOptions(**wsc), convnet_options=named, options=learner.Options(**options))
    check(config)
    return config


def defaults(model_name: str) -> dict[str, Any]:
    """The values that a learner's keys have if absent from the JSON."""
    keys, own = keys_of(registry.learners[model_name]), registry.learner_defaults[model_name]
    if strange := [name for name in own if name not in KEYS]:
        raise ValueError(
            f'register_learner("{model_name}", {strange[0]}=...): not a key that learners share; declare it in a '
            "dataclass Options of the learner's class, with pycil_wsc.keys.key"
        )
    return {name: key.default for name, key in keys.items()} | {name: keys[name].check(own[name]) for name in own}


def suited_to(optimizer: str) -> dict[str, Any]:
    """The values that keys have with an optimiser if absent from the JSON."""
    return {name: KEYS[name].check(value) for name, value in registry.optimizer_defaults[optimizer].items()}


def known_keys() -> dict[str, Key]:
    """The keys that all learners share, and those of each."""
    own = {name: key for learner in registry.learners.values() for name, key in declared(learner.Options).items()}
    return {**own, **KEYS}


def _refuse_unknown(names: Iterable[str]) -> None:
    known = {*known_keys(), *DIRECTIVES}
    groups = {name.partition(".")[0] for name in (*known, BACKBONE_OPTION) if "." in name}
    for name in names:
        if name in groups:
            raise UserError(f"{name}: is a group of keys; set one of them ({name}.KEY), or give an object of them")
        if name not in known:
            pycil.refuse_alias(name)
            raise UserError(f"unknown key '{name}'{did_you_mean(name, known) if name else ''}")


def _schedule(given: Mapping[str, Any], usual: Mapping[str, Any], learner: Any, like: str | None) -> dict[str, Any]:
    """Epochs and milestones that are not given, in proportion to those that are and to the budget.

    By default each method has its own epochs, ``usual``. A budget ``like`` another learner's gives it the other's: as
    many passes over the data in each task, spread over the method's phases (``epoch_keys``) as usual.
    """
    scaled = {}
    for keys, milestones in ((("init_epoch",), "init_milestones"), (learner.epoch_keys, "milestones")):
        main = keys[0]
        asked, whole = given.get(main), usual[main]
        if like:
            theirs = ("init_epoch",) if main == "init_epoch" else registry.learners[like].epoch_keys
            asked = given.get(main, sum(defaults(like)[name] for name in theirs))
            whole = sum(usual[name] for name in keys)
        if asked is None:
            continue
        epochs = {name: max(1, round(usual[name] * asked / whole)) for name in keys}
        places = [max(1, round(place * epochs[main] / usual[main])) for place in usual[milestones]]
        scaled |= {name: value for name, value in epochs.items() if like or name not in given}
        if milestones not in given:
            scaled[milestones] = tuple(place for place in places if place < epochs[main])
    return scaled


def _budget_of(budget: Any) -> str | None:
    """The learner whose number of updates counts, or None for each its own."""
    if budget == "pycil":
        return None
    if isinstance(budget, dict) and list(budget) == ["updates_like"] and isinstance(budget["updates_like"], str):
        registry.learners[budget["updates_like"]]
        return budget["updates_like"]
    raise UserError(f'budget: expected "pycil" or {{"updates_like": "replay"}}, got {shown(budget, quotes=True)}')
