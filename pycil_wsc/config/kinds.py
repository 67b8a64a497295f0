"""The kinds of runs: class-incremental learning, and language models.

A :class:`Kind` says what its configurations are, where the files of a run are, and how a run is planned and executed.
Reading a file or a record needs the former alone, and neither torch nor the rooms above this one. So the kind of
class-incremental runs has two classes: :class:`ClassIncrementalConfigs` stands here, and
:class:`pycil_wsc.runs.class_incremental.ClassIncrementalRuns` completes it. That of language models is one
class, which stands with them. The launcher imports both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pycil_wsc.config import completion, pilot_files, pycil_files
from pycil_wsc.config.image_config import KEYS, Config
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.data.data_options import ALL
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.keys import SAME, digest, having

IN_FOLDER = having(KEYS, names="folder")


C = TypeVar("C", bound=RunConfig)
D = TypeVar("D")  # the data of a run


class Kind(Generic[C, D]):
    """A kind of run.

    Attributes:
        unit: the unit of a run's cost.
        records: patterns of what a run writes beside result and log; first what it resumes from.
    """

    unit: str
    records: tuple[str, ...]

    # ---- its configurations ------------------------------------------------------------------------------------------

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

    # ---- what a run takes, in advance --------------------------------------------------------------------------------

    def loader(self) -> Callable[[C], D]:
        """A function from a configuration to the data of its run, which reads shared data only once."""
        raise NotImplementedError

    def check_model(self, config: C, data: D) -> None:
        """Raise a :class:`UserError`, before a sweep starts, if the model cannot be built or trained as configured."""

    def check_processes(self, config: C, count: int) -> None:
        """Raise a :class:`UserError` if ``count`` processes cannot share the run of ``config``."""

    def plan(self, config: C, data: D) -> int:
        """The cost of a whole run, in ``unit``."""
        raise NotImplementedError

    def budget(self, config: C, data: D) -> str:
        """What decides about a run's length in the place of :meth:`plan`, in words; empty without a budget."""
        return ""

    def outline(self, config: C, data: D) -> str:
        """The tasks, in a line; runs with the same tasks have the same line."""
        return ""

    def memory(self, config: C, data: D) -> int | None:
        """The exemplars that a run will keep after its last task; None if the method keeps none, or is not counted."""

    def remarks(self, config: C, data: D) -> list[str]:
        """Settings without effect, or with one that may surprise, a line each."""
        return []

    def measurer(self) -> Callable[[C, D], float]:
        """A function that estimates the training time on this machine, in seconds, from a configuration and its data.

        It measures a few steps of each phase; runs whose steps take equally long share a measurement. Testing, the
        choice of exemplars, resets and saving are not included.
        """
        raise UserError(f"--measure: training on {self.unit} cannot be measured yet; leave it out")

    # ---- a run, and what it leaves -----------------------------------------------------------------------------------

    def execute(self, config: C, data: D, on_progress: Callable[[Any], None]) -> dict[str, Json]:
        """Execute a run, resuming it if it was stopped; returns the contents of its ``result.json``.

        ``on_progress`` is called with every :class:`pycil_wsc.runs.progress.Progress`.

        Raises:
            UnusableRun, TrainingDiverged, WrongPlan: this run fails and is not tried again; the others continue.
            UserError: none of the runs can work; the sweep ends.
            Exception: any other; the run is tried once more.
        """
        raise NotImplementedError

    def headline(self, result: Mapping[str, Json]) -> str:
        """A short summary of a finished run."""
        raise NotImplementedError

    def leftovers(self, config: C) -> tuple[str, ...]:
        """Files and folders that a finished run no longer needs."""
        return self.records[:1]

    def unrecorded(self, config: C) -> list[str]:
        """Records that ``config`` requests but the finished run does not have."""
        return []


K = TypeVar("K", bound=type[Kind[Any, Any]])
DEFAULT = "class_incremental"
kinds: dict[str, Kind[Any, Any]] = {}  # by the ``kind`` of their configurations


def register_kind(name: str) -> Callable[[K], K]:
    """Register a :class:`Kind`. A file is of this kind if it has the key ``name``, or one below it.

    A class that completes the one registered before takes its place.
    """

    def decorate(cls: K) -> K:
        kinds[name] = cast("Kind[Any, Any]", cls())
        return cls

    return decorate


def kind_of(config: RunConfig) -> Kind[Any, Any]:
    """The kind of the run with this ``config``."""
    return kinds[config.kind]


def kind_of_keys(flat: Mapping[str, Json]) -> Kind[Any, Any]:
    """The kind of the runs that a file with these keys describes."""
    for name in flat:
        group = name.partition(".")[0]
        if group in kinds:
            return kinds[group]
    return kinds[DEFAULT]


def run_folder(config: RunConfig) -> Path:
    """The folder of the files of the run with this ``config``."""
    return kind_of(config).folder(config)


# ---- class-incremental learning --------------------------------------------------------------------------------------


@register_kind(DEFAULT)
class ClassIncrementalConfigs(Kind[Config, D]):
    """What the configurations of class-incremental runs are, and where the files of a run are."""

    def merge(self, file: Mapping[str, Json], overrides: Mapping[str, Json]) -> dict[str, Json]:
        if pilot_files.is_pilots(file):
            file = pilot_files.our_names(pilot_files.overridden(file, overrides))
            overrides = {}
        file, overrides = pycil_files.overridden(file, overrides)
        renamed = pycil_files.our_names(file, overrides.get("dataset"))
        return pycil_files.our_values({**renamed, **overrides})

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
        others may be added later, the first one names the folder: ``<task>-tasks``. With ``increments`` it is
        ``<dataset>-<number>tasks``, with ``domains`` ``<dataset>-<number>domains``.
        """
        unused, _ = config.memory_keys
        named = {name: getattr(config, name) for name in IN_FOLDER if name != unused}
        named["tasks"] = config.tasks[:1]
        named["memory_update"] = config.memory_update  # whose defaults are compared with
        usual = self.resolve(named).identity() | self.earlier()  # a changed default does not change folder names
        identity = config.identity() | {"tasks": usual["tasks"]}
        seed = f"seed{config.seed}{digest(identity, usual)}"
        return Path(config.out, config.prefix, _split(config), config.method, _memory(config), seed)


def _split(config: Config) -> str:
    """The name of the data and their tasks in the folder's path."""
    name = config.tasks[0] if config.tasks else config.dataset
    dataset = re.sub(r"[^\w.]+", "-", name).strip("-")[-60:]
    if config.tasks:
        return f"{dataset}-tasks"
    if config.domains:
        return f"{dataset}-{len(config.domains)}domains"
    if config.increments:
        return f"{dataset}-{len(config.increments)}tasks"
    return f"{dataset}-b{config.init_cls}-inc{config.increment}"


def _memory(config: Config) -> str:
    """The name of the memory's size in the folder's path."""
    if config.memory_bytes is not None:
        return f"bytes{config.memory_bytes}"
    if not config.fixed_memory:
        return f"total{config.memory_size}"
    return f"m{'all' if config.memory_per_class == ALL else config.memory_per_class}"
