"""Builds a complete, checked configuration from one value per key; absent keys get the learner's defaults."""

from collections.abc import Mapping
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config import pycil
from pycil_wsc.config.checks import check
from pycil_wsc.config.options import BACKBONE_OPTION, KEYS, Config, keys_of
from pycil_wsc.config.unknown import DIRECTIVES, refuse_unknown
from pycil_wsc.config.wsc import WSCKeys, without_removed
from pycil_wsc.data.memory import ALL
from pycil_wsc.errors import UserError, shown
from pycil_wsc.keys import Key, declared, without_empty_groups


def complete(flat: Mapping[str, Any]) -> Config:
    """The configuration of a class-incremental run."""
    model_name = KEYS["model_name"].check(flat.get("model_name", KEYS["model_name"].default))
    if model_name not in registry.learners:
        pycil.refuse_other_method(model_name)
    learner = registry.learners[model_name]
    backbone = {name: value for name, value in flat.items() if name.startswith(BACKBONE_OPTION)}
    known = {*known_keys(), *DIRECTIVES}
    flat = without_removed(without_empty_groups(flat, {*known, BACKBONE_OPTION}))
    flat = {name: value for name, value in flat.items() if name not in backbone}
    refuse_unknown(flat, known)
    if flat.get("memory_per_class") == "all":
        flat["memory_per_class"] = ALL
    optimizer = KEYS["optimizer"].check(flat.get("optimizer", KEYS["optimizer"].default))
    keys, default = keys_of(learner), defaults(model_name) | defaults_for_optimizer(optimizer)
    given = {name: keys[name].check(value) for name, value in flat.items() if name in keys}
    values = default | given | _schedule(given, default, learner, _budget_of(flat.get("budget", "pycil")))
    if not learner.uses_memory:
        values |= {"memory_per_class": 0, "fixed_memory": True, "memory_bytes": None}
    elif values["memory_bytes"] is not None:
        values["fixed_memory"] = False
    wsc = {name.removeprefix("wsc."): values.pop(name) for name in list(values) if name.startswith("wsc.")}
    options = {name: values.pop(name) for name in declared(learner.Options)}
    backbone = {name.removeprefix(BACKBONE_OPTION): value for name, value in backbone.items()}
    config = Config(**values, wsc=_consolidation(wsc), convnet_options=backbone, options=learner.Options(**options))
    check(config)
    return config


def _consolidation(values: Mapping[str, Any]) -> WSCKeys:
    try:
        return WSCKeys(**values)
    except ValueError as error:
        raise UserError(f"wsc.{error}") from None


def defaults(model_name: str) -> dict[str, Any]:
    """The values of a learner's keys that are absent from the JSON."""
    keys, own = keys_of(registry.learners[model_name]), registry.learner_defaults[model_name]
    if unknown := [name for name in own if name not in KEYS]:
        raise ValueError(
            f'register_learner("{model_name}", {unknown[0]}=...): not a key shared by all learners; declare it in the '
            "Options dataclass of the learner's class, with pycil_wsc.keys.key"
        )
    return {name: key.default for name, key in keys.items()} | {name: keys[name].check(own[name]) for name in own}


def defaults_for_optimizer(optimizer: str) -> dict[str, Any]:
    """The defaults that an optimiser sets; they take precedence over the learner's."""
    return {name: KEYS[name].check(value) for name, value in registry.optimizer_defaults[optimizer].items()}


def known_keys() -> dict[str, Key]:
    """The keys shared by all learners, and each learner's own."""
    own = {name: key for learner in registry.learners.values() for name, key in declared(learner.Options).items()}
    return {**own, **KEYS}


def _schedule(given: Mapping[str, Any], default: Mapping[str, Any], learner: Any, like: str | None) -> dict[str, Any]:
    """Scale the epochs and milestones that are not given to match the given ones and the budget.

    Without a budget, each method keeps its ``default`` epochs. With a budget ``like`` another learner's, a task makes
    as many passes over the data as the other learner's, divided among the method's phases (``epoch_keys``) in the same
    proportions as by default.
    """
    scaled = {}
    for keys, milestones in ((("init_epoch",), "init_milestones"), (learner.epoch_keys, "milestones")):
        if not keys:
            scaled[milestones] = ()  # later tasks are learned without training
            continue
        main = keys[0]
        requested, total = given.get(main), default[main]
        if like:
            other_keys = ("init_epoch",) if main == "init_epoch" else registry.learners[like].epoch_keys
            requested = given.get(main, sum(defaults(like)[name] for name in other_keys))
            total = sum(default[name] for name in keys)
            if wrong := [name for name in keys[1:] if name in given]:
                raise UserError(f"{wrong[0]}: is set by 'budget', in proportion to '{main}'; leave it out")
        if requested is None:
            continue
        epochs = {name: max(1, round(default[name] * requested / total)) for name in keys}
        rescaled = [max(1, round(epoch * epochs[main] / default[main])) for epoch in default[milestones]]
        scaled |= {name: value for name, value in epochs.items() if like or name not in given}
        if milestones not in given:
            scaled[milestones] = tuple(epoch for epoch in rescaled if epoch < epochs[main])
    return scaled


def _budget_of(budget: Any) -> str | None:
    """The learner whose number of updates all methods use, or None if each method uses its own."""
    if budget == "pycil":
        return None
    if isinstance(budget, dict) and list(budget) == ["updates_like"] and isinstance(budget["updates_like"], str):
        registry.learners[budget["updates_like"]]
        return budget["updates_like"]
    raise UserError(f'budget: expected "pycil" or {{"updates_like": "replay"}}, got {shown(budget, quotes=True)}')
