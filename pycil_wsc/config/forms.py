"""What a kind of run says of its configurations: their keys, and where the files of a run are.

A kind of run is a :class:`Form` here, and a :class:`pycil_wsc.runs.kinds.Kind`, which trains. They have the same name,
``kind`` of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pycil_wsc.config import completion, pycil
from pycil_wsc.config.options import KEYS, Config
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.data.options import ALL
from pycil_wsc.files import Json
from pycil_wsc.keys import SAME, digest, having
from pycil_wsc.registry import Registry

C = TypeVar("C", bound=RunConfig)
IN_FOLDER = having(KEYS, names="folder")


class Form(Generic[C]):
    """The configurations of a kind of run."""

    def merge(self, file: Mapping[str, Json], overrides: Mapping[str, Json]) -> dict[str, Json]:
        """Merge the keys of a JSON file (nested ones with dots) with those of the command line, which override them."""
        return {**file, **overrides}

    def takes_list(self, name: str) -> bool:
        """Whether a value of the key is itself a list; for other keys, a list is an axis of the sweep."""
        raise NotImplementedError

    def resolve(self, flat: Mapping[str, Json]) -> C:
        """Build a complete, checked configuration from one value per key."""
        raise NotImplementedError

    def earlier(self) -> dict[str, Json]:
        """Values that applied before keys were added whose defaults differ from them."""
        return {}

    def folder(self, config: C) -> Path:
        """The folder of the run's files."""
        raise NotImplementedError


DEFAULT = "class_incremental"
forms = Registry("kind of run")


def register_form(name: str) -> Callable[[type[Form[Any]]], type[Form[Any]]]:
    """Register a :class:`Form`. A configuration has it if it has the key ``name``, or one below it."""

    def decorate(cls: type[Form[Any]]) -> type[Form[Any]]:
        forms.add(name, cls())
        return cls

    return decorate


def form_for(flat: Mapping[str, Json]) -> Form[Any]:
    """The form of the configuration that has these keys."""
    for name in flat:
        first = name.partition(".")[0]
        if first in forms:
            return forms[first]
    return forms[DEFAULT]


def run_folder(config: RunConfig) -> Path:
    """The folder of the files of the run with this ``config``."""
    return forms[config.kind].folder(config)


@register_form(DEFAULT)
class ClassIncremental(Form[Config]):
    def merge(self, file: Mapping[str, Json], overrides: Mapping[str, Json]) -> dict[str, Json]:
        file, overrides = pycil.overridden(file, overrides)
        return pycil.our_values({**pycil.our_names(file, overrides.get("dataset")), **overrides})

    def takes_list(self, name: str) -> bool:
        known = completion.known_keys()
        return name in known and known[name].takes_list

    def resolve(self, flat: Mapping[str, Json]) -> Config:
        return completion.complete(flat)

    def earlier(self) -> dict[str, Json]:
        return {name: key.before for name, key in KEYS.items() if key.before is not SAME}

    def folder(self, config: Config) -> Path:
        """``<out>/<prefix>/<dataset>-b<init_cls>-inc<increment>/<method>/m<memory>/seed<seed>[-<hash>]``

        The hash covers the keys that are not at their defaults and not in the folder names. With ``tasks``, to which
        others may be added later, the first one names the folder: ``<task>-tasks``.
        """
        unused, _ = config.memory_keys
        named = {name: getattr(config, name) for name in IN_FOLDER if name != unused}
        named["tasks"] = config.tasks[:1]
        usual = self.resolve(named).identity() | self.earlier()  # a changed default does not change folder names
        identity = config.identity() | {"tasks": usual["tasks"]}
        seed = f"seed{config.seed}{digest(identity, usual)}"
        return Path(config.out, config.prefix, _split(config), config.method, _memory(config), seed)


def _split(config: Config) -> str:
    """The name of the data and their tasks in the folder's path."""
    name = config.tasks[0] if config.tasks else config.dataset
    dataset = re.sub(r"[^\w.]+", "-", name).strip("-")[-60:]
    return f"{dataset}-tasks" if config.tasks else f"{dataset}-b{config.init_cls}-inc{config.increment}"


def _memory(config: Config) -> str:
    """The name of the memory's size in the folder's path."""
    if config.memory_bytes is not None:
        return f"bytes{config.memory_bytes}"
    if not config.fixed_memory:
        return f"total{config.memory_size}"
    return f"m{'all' if config.memory_per_class == ALL else config.memory_per_class}"
