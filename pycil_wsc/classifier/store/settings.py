"""The configuration of a :class:`pycil_wsc.Learner`: keys as Python values, and those that the first task fixes."""

import dataclasses
from collections.abc import Iterable, Mapping

from pycil_wsc import registry
from pycil_wsc.classifier.predict.arguments import from_python
from pycil_wsc.config.completion import complete
from pycil_wsc.config.image_config import BACKBONE_OPTION, KEYS, Config
from pycil_wsc.config.loading import flatten
from pycil_wsc.errors import UserError
from pycil_wsc.keys import having, plain

# later tasks' key -> first task's key, which has the same value unless given
FIRST = {key.like: name for name, key in KEYS.items() if key.like}
OF_EXPERIMENTS = frozenset(having(KEYS, only="experiments"))
# keys that the first task fixes: of the images, the network and its own schedule
FIXED = frozenset([*having(KEYS, decides="data"), *having(KEYS, fixed=True), *FIRST.values()])


def of_learner(keys: Mapping[str, object]) -> dict[str, object]:
    """The keys as in JSON; raises a :class:`UserError` for one of whole experiments."""
    given = flatten({name: from_python(value) for name, value in keys.items()})
    if wrong := sorted(OF_EXPERIMENTS & given.keys()):
        raise UserError(f"{wrong[0]}: is a key for experiments in JSON files only; leave it out")
    return given


def refuse_changes(saved: Config, given: Mapping[str, object]) -> None:
    """Raise a :class:`UserError` if a key that the first task has fixed is given with another value than ``saved``."""
    values = saved.to_dict()
    fixed = {name: KEYS[name].check(value) for name, value in given.items() if name in FIXED}
    fixed |= {name: value for name, value in given.items() if name.startswith(BACKBONE_OPTION)}
    for name, value in plain(fixed).items():
        if name not in values or value != values[name]:
            raise UserError(f"{name}: was fixed by the first task; leave it out, or start a new learner")


def saved_values(saved: Config, given: Mapping[str, object]) -> dict[str, object]:
    """The values of ``saved``, without those that followed from a key that is now ``given``."""
    values = saved.to_dict()
    following = {
        "epochs": {*having(KEYS, within="epochs"), *registry.learners[saved.model_name].Plan.epoch_keys[1:]},
        "optimizer": {name for defaults in registry.optimizer_defaults.values() for name in defaults},
        "memory_bytes": {"fixed_memory"},
    }
    names = set().union(*(following[name] for name in following.keys() & given.keys())) & values.keys() - FIXED
    derived = configured({name: value for name, value in values.items() if name not in names}, tasks=()).to_dict()
    return {name: value for name, value in values.items() if name not in names or value != derived[name]}


def configured(values: Mapping[str, object], tasks: tuple[str, ...]) -> Config:
    """The configuration with these values and ``tasks``, which are not checked: arrays have no path."""
    config = complete({k: v for k, v in values.items() if k != "tasks"})
    return dataclasses.replace(config, tasks=tasks)


def values_of(config: Config, tasks: Iterable[str]) -> dict[str, object]:
    """The configuration's values to save, of a learner of ``tasks``."""
    omitted = OF_EXPERIMENTS - {"model_name"}
    values: dict[str, object] = {name: value for name, value in config.to_dict().items() if name not in omitted}
    return values | {"tasks": list(tasks)}
