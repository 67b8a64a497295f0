"""Which runs are the same, and which may be compared.

A run writes its :class:`Identity` into its result when it ends. Readers compare identities and derive none, except for
results of the first schema, which lack them (:mod:`pycil_wsc.results.old_schemas`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from pydantic import BaseModel, ConfigDict, field_validator

from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.image_config import BACKBONE_OPTION, CONSOLIDATED, KEYS
from pycil_wsc.data.data_options import ALL, memory_keys
from pycil_wsc.files import Json
from pycil_wsc.keys import having

NAMED = frozenset(name for name, key in KEYS.items() if key.identifies)  # in fields of an identity of their own
# with which an adapter's learning rate goes; not a role of the key, as readers of results do not import `llm`
LANGUAGE_LEADING = ("llm.lora_rank",)
LEADING = (*having(KEYS, sets_defaults=True), *LANGUAGE_LEADING)  # keys on which values of others depend
OF_FIRST_TASK = sorted(name for name, key in KEYS.items() if key.like)
_BY_PLACE = sorted((key.studied, name) for name, key in KEYS.items() if key.studied)
# the keys that the paper's studies vary, with the values of the paper's method
STUDIED: dict[str, Json] = {name: KEYS[name].default for _, name in _BY_PLACE}


class Identity(BaseModel):
    """What decides the result of a run. Two results with equal identities are those of the same run.

    ``memory``: the number of exemplars, per class or in total; for a language model the replayed percentage of each
    earlier task. ``keeps_all``: the memory has every image. ``shared``: the keys in which runs must agree to be
    compared, whatever their method. ``own``: the keys that the method chooses.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    method: str
    memory: int | float
    seed: int
    keeps_all: bool = False
    shared: dict[str, Json]
    own: dict[str, Json]

    @field_validator("shared", "own")
    @classmethod
    def _as_now(cls, values: dict[str, Json]) -> dict[str, Json]:
        """Without keys that were dropped since the run."""
        return without_dropped(values)

    @cached_property
    def variant(self) -> dict[str, Json]:
        """The keys that decide the result, without the method, the size of the memory and the seed."""
        return {**self.shared, **self.own}

    @cached_property
    def frozen(self) -> tuple[tuple[str, str], ...]:
        """The variant as a hashable."""
        return tuple(sorted((name, json.dumps(value)) for name, value in self.variant.items()))


def without_consolidation(method: str) -> str:
    """The name of the method to which a consolidation was added, if one was: ``icarl+wsc`` -> ``icarl``."""
    return method.removesuffix(CONSOLIDATED)


def image_identity(method: str, decisive: Mapping[str, Json], contents: Mapping[str, Json]) -> Identity:
    """The identity of a class-incremental run of ``method``, from the keys that decide the result and the result.

    Of its ``contents``, the configuration, the precision and the numbers of images, classes and tasks are read.
    """
    config = contents["config"]
    unused, active = memory_keys(config["fixed_memory"])
    keeps_all = config["fixed_memory"] and config["memory_per_class"] == ALL
    values = {name: value for name, value in decisive.items() if name not in NAMED}
    # a learner may also read the memory key that `fixed_memory` leaves unused
    values |= {unused: decisive[unused]} if unused in decisive else {}
    values |= {"precision": contents.get("precision") or decisive["precision"]}  # the one that "auto" selected
    values |= {"max_tasks": part_of(contents).get("max_tasks")}
    return Identity(
        method=method,
        memory=_images_per_class(contents) if keeps_all else config[active],
        seed=config["seed"],
        keeps_all=keeps_all,
        shared={name: value for name, value in values.items() if not is_own(name)},
        own={name: value for name, value in values.items() if is_own(name)},
    )


def is_own(name: str) -> bool:
    """Whether a method chooses this key: its own options, those of the consolidation, and keys ``by_method``."""
    if name.startswith("wsc."):
        return True
    if name in KEYS:
        return KEYS[name].by_method
    return not name.startswith(BACKBONE_OPTION)


def language_identity(
    decisive: Mapping[str, Json],
    config: Mapping[str, Json],
    identifying: Mapping[str, str],
    compared: Iterable[str],
) -> Identity:
    """The identity of a language model's run, from the keys that decide the result and the configuration.

    ``identifying``: the key of each of the fields ``method``, ``memory`` and ``seed``; ``compared``: the keys in which
    runs must agree to be compared.
    """
    percent = round(100 * config[identifying["memory"]], 6)
    shared = {name: decisive[name] for name in sorted(compared)}
    elsewhere = {*identifying.values(), *shared}
    return Identity(
        method=config[identifying["method"]],
        memory=int(percent) if percent == int(percent) else percent,
        seed=config[identifying["seed"]],
        shared=shared,
        own={name: value for name, value in decisive.items() if name not in elsewhere},
    )


def part_of(contents: Mapping[str, Json]) -> dict[str, Json]:
    """The keys that restrict a run to a part of its data. A ``max_tasks`` above the number of tasks does not."""
    config = contents["config"]
    part = {name: config[name] for name in having(KEYS, restricts=True) if config.get(name)}
    if part.get("max_tasks", 0) > len(contents["curve"]):
        del part["max_tasks"]
    return part


def distinguishing_keys(variants: Sequence[Mapping[str, Json]], skipped: Iterable[str] = ()) -> list[str]:
    """The keys that distinguish the variants, chosen greedily :func:`in_order`."""
    keys: list[str] = []
    parts: list[tuple[str, ...]] = [()] * len(variants)
    for name in in_order({name for variant in variants for name in variant} - set(skipped)):
        if len(set(parts)) == len(parts):  # no two are alike any more
            break
        finer = []
        for part, variant in zip(parts, variants):
            finer.append((*part, json.dumps(variant.get(name))))
        if len(set(finer)) > len(set(parts)):
            keys.append(name)
            parts = finer
    return keys


def in_order(names: Iterable[str]) -> list[str]:
    """Keys in the order in which names of runs have them, whichever order their configurations have.

    Keys on which values of other keys depend come first, so that runs with two optimisers, each with its own learning
    rates, are told apart by the optimiser too. Then come the keys of the paper's studies, those of the first task, and
    all others, each by name.
    """
    first = [*LEADING, *STUDIED, *OF_FIRST_TASK]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name))


def _images_per_class(contents: Mapping[str, Json]) -> int:
    """The mean number of training images of a class, or ``ALL`` if it is unknown."""
    images = (contents.get("data") or {}).get("train")
    classes = contents.get("class_names")
    part = part_of(contents)
    most = part.pop("images_per_class", ALL)
    if not images or not classes or part:  # of all classes, and of the learned ones
        return ALL
    mean = round(images / len(classes))
    share = contents["config"].get("validation_split")
    if share:
        mean -= min(max(1, round(share * mean)), mean - 1)  # as ``hold_out`` rounds
    return min(mean, most)
