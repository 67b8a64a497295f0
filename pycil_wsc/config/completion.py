"""One value per key -> a complete, checked configuration: what is not given has the learner's default."""

import json
import types
from collections.abc import Iterable, Mapping
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config.checks import check
from pycil_wsc.config.loading import DIRECTIVES
from pycil_wsc.config.options import FIELDS, TYPES, Config
from pycil_wsc.config.wsc import WSCOptions
from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.keys import checked, takes_list, typed


def complete(flat: Mapping[str, Any]) -> Config:
    """The configuration of a class-incremental run."""
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
    check(config)
    return config


def takes_list_value(name: str) -> bool:
    """Whether one value of the key is a list."""
    defaults = registry.learner_defaults.values()
    return takes_list(TYPES.get(name)) or any(isinstance(own.get(name), list) for own in defaults)


def _refuse_unknown(names: Iterable[str]) -> None:
    known = (set(FIELDS) | DIRECTIVES).union(*registry.learner_defaults.values())
    for name in names:
        if name not in known:
            raise UserError(f"unknown key '{name}'{did_you_mean(name, known) if name else ''}")


def _schedule(flat: Mapping[str, Any], learner: str) -> dict[str, Any]:
    """Epochs and milestones that are not given, in proportion to those that are and to the budget.

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


def _usual_epochs(learner: str, first_task: bool) -> dict[str, int]:
    """Key -> epochs of the phases of a task, as the learner has them by default."""
    keys = ("init_epoch",) if first_task else registry.learners[learner].epoch_keys
    return {name: _default(learner, name) for name in keys}


def _default(learner: str, name: str) -> Any:
    own = registry.learner_defaults[learner]
    return own[name] if name in own else FIELDS[name].default


def _reference(budget: Any) -> str | None:
    """The learner whose number of updates counts, or None for each its own."""
    if budget == "pycil":
        return None
    if isinstance(budget, dict) and list(budget) == ["updates_like"] and isinstance(budget["updates_like"], str):
        registry.learners[budget["updates_like"]]
        return budget["updates_like"]
    raise UserError(f'budget: expected "pycil" or {{"updates_like": "replay"}}, got {json.dumps(budget, default=str)}')


def _checked(name: str, value: Any, own: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """``value`` with the type of key ``name`` and within its limits, or a :class:`UserError`."""
    if name not in FIELDS:
        return typed(name, value, tuple[float, ...] if isinstance(own[name], list) else type(own[name]))
    return checked(name, value, TYPES[name], FIELDS[name].metadata)
