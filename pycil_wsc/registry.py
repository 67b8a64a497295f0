"""Registries, which map names in the JSON to objects.

Objects are registered with a decorator where they are defined, and found by their folder. Modules of other packages are
found by their entry points of the group ``pycil_wsc``. This module imports only ``errors`` from the package::

    @register_learner("replay", epochs=70, milestones=[30, 50])
    class Replay(BaseLearner): ...
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pycil_wsc.errors import UserError, did_you_mean

T = TypeVar("T")
_groups = ["pycil_wsc"]  # of entry points that are still to be loaded
_broken: list[str] = []  # messages on those that cannot be


class Registry(UserDict):
    """A dict that raises a :class:`UserError` with the most similar known key if a key is missing.

    ``kind`` names the entries in this error. ``modules`` are imported at the first look-up and register the package's
    own entries; then those of other packages are loaded.
    """

    def __init__(self, kind: str, modules: Iterable[str] = ()) -> None:
        self.kind, self._modules, self._entries = kind, list(modules), {}

    @property
    def data(self) -> dict[str, Any]:  # used by all methods of UserDict
        while self._modules:  # popped before the import, which may itself look something up
            importlib.import_module(self._modules.pop())
        _load_entry_points()
        return self._entries

    def __missing__(self, name: str) -> Any:
        raise UserError(f"unknown {self.kind} '{name}'{did_you_mean(name, self)}")

    def get(self, name: str, default: Any = None) -> Any:
        return self.data.get(name, default)

    def __copy__(self) -> Registry:
        copy = Registry(self.kind)
        copy._entries.update(self.data)
        return copy

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``, which must be new; returns it."""
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._entries[name] = entry
        return entry


def _load_entry_points():
    """Load the modules that installed packages name as entry points, once in each process."""
    while _groups:  # popped before loading, which may itself look something up
        _load_group(_groups.pop())
    if _broken:
        raise UserError(_broken[0])


def _load_group(group):
    """Load the modules that the entry points of a group name; what fails is added to ``_broken``."""
    try:
        found = list(entry_points(group=group))
    except Exception as error:
        _broken.append(f"the metadata of an installed package is broken ({_reason(error)}); find it with 'pip check'")
        return
    for entry in found:
        try:
            entry.load()
        except BaseException as error:  # a module may also end the program, or raise KeyboardInterrupt
            _broken.append(
                f"entry point '{entry.name} = {entry.value}' of the package '{_package_of(entry)}' cannot be loaded "
                f"({_reason(error)}); correct or uninstall that package"
            )


def _package_of(entry):
    try:
        return entry.dist.name or "?"
    except Exception:  # without a name in its metadata, or without metadata
        return "?"


def _reason(error):
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _modules_named(name: str) -> list[str]:
    """The modules ``name`` of the package's subpackages."""
    here = Path(__file__).parent
    return [f"{here.name}.{path.parent.name}.{name}" for path in sorted(here.glob(f"*/{name}.py"))]


def _modules_in(subpackage: str) -> list[str]:
    """All modules of a subpackage."""
    here = Path(__file__).parent
    return [f"{here.name}.{subpackage}.{path.stem}" for path in sorted((here / subpackage).glob("*.py"))]


learners = Registry("model_name", _modules_in("learners"))
learner_defaults = Registry("model_name", _modules_in("learners"))
backbones = Registry("convnet_type", ["pycil_wsc.networks.backbones"])
optimizers = Registry("optimizer", ["pycil_wsc.engine.optimizers"])
optimizer_defaults = Registry("optimizer", ["pycil_wsc.engine.optimizers"])
datasets = Registry("dataset", _modules_in("data"))
exemplars = Registry("exemplars", _modules_in("data"))
importances = Registry("wsc.importance", _modules_in("studies"))
resets = Registry("wsc.reset", _modules_in("studies"))
analyses = Registry("analysis", _modules_in("studies"))
metrics = Registry("metric", ["pycil_wsc.runs.metrics"])
kinds = Registry("kind of run", _modules_named("kind"))


def check_dataset(name: str) -> None:
    """Raise :class:`UserError` unless a data set ``name`` is registered; for a folder or file, say how to name it."""
    if name not in datasets and os.path.exists(name):
        kind = "folder" if os.path.isdir(name) else "npz"
        raise UserError(f"unknown {datasets.kind} '{name}'; did you mean '{kind}:{name}'?")
    datasets[name]


def register_learner(name: str, **defaults: Any) -> Callable[[type[T]], type[T]]:
    """Register a learner class under ``name``.

    ``defaults``: its defaults for keys of ``Config``. A learner's own keys are fields of its dataclass ``Options``,
    declared with :func:`pycil_wsc.keys.key`; their values are in ``config.options``.
    """

    def decorate(cls: type[T]) -> type[T]:
        learner_defaults.add(name, defaults)
        return learners.add(name, cls)

    return decorate


def register_backbone(name: str) -> Callable[[T], T]:
    """Register ``build(**keywords) -> nn.Module``: (B, 3, H, W) images -> (B, ``out_dim``) features.

    Its keyword arguments are the keys in ``convnet_options``. Each has a default, whose type is checked; ``build``
    raises a ValueError for invalid values. MEMO needs a module with ``split() -> (trunk, block)``.
    """
    return lambda build: backbones.add(name, build)


def check_backbone_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` unless ``options`` are keyword arguments of the backbone, with their defaults' types."""
    parameters = inspect.signature(backbones[name]).parameters
    for option, value in options.items():
        if option not in parameters:
            known = did_you_mean(option, parameters) if parameters else f"; '{name}' has no options"
            raise UserError(f"convnet_options: unknown option '{option}' of '{name}'{known}")
        wanted = type(parameters[option].default)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UserError(
                f"convnet_options.{option}: expected {wanted.__name__}, got {json.dumps(value, default=str)}"
            )


def register_optimizer(name: str, **defaults: Any) -> Callable[[T], T]:
    """Register ``build(groups, config) -> torch.optim.Optimizer``.

    ``groups`` are parameter groups with ``params``, ``lr`` and ``weight_decay``; the training loop sets ``lr``.
    ``defaults``: defaults for keys of ``Config`` with this optimiser, such as learning rates and weight decays. They
    take precedence over the learner's defaults.
    """

    def decorate(build: T) -> T:
        optimizer_defaults.add(name, defaults)
        return optimizers.add(name, build)

    return decorate


def register_dataset(name: str) -> Callable[[T], T]:
    """Register ``load(root) -> Dataset``, where ``root`` is the ``data_root`` of the configuration."""
    return lambda load: datasets.add(name, load)


def register_importance(name: str) -> Callable[[T], T]:
    """Register ``score(network, params, previous, batches, options) -> {name: scores}`` for ``wsc.importance``.

    ``network`` is in evaluation mode and returns logits. ``params`` and ``previous`` are {name: tensor}: the current
    weights to rank, and those before the task. ``batches`` can be iterated many times, over (images, targets) from the
    task's training data and the memory, without augmentation. ``options`` are the keys ``wsc.*``. Weights with the
    highest scores are retained.
    """
    return lambda score: importances.add(name, score)


class RegisteredReset(NamedTuple):
    """A registered reset rule; see :func:`register_reset`."""

    build: Callable[[Any], Any]
    ranks: bool


def register_reset(name: str, *, ranks: bool) -> Callable[[T], T]:
    """Register ``build(training) -> rule`` for ``wsc.reset``; ``training``: :class:`pycil_wsc.studies.resets.Training`.

    The rule is a :class:`pycil_wsc.consolidation.Reset`, or an object that follows the optimiser by itself, as
    :class:`pycil_wsc.studies.continual_backprop.ContinualBackprop`. ``ranks``: whether it keeps the weights with the
    highest scores. ``build`` raises a ValueError if the rule does not fit the network.
    """

    def decorate(build: T) -> T:
        resets.add(name, RegisteredReset(build, ranks))  # pyright: ignore[reportArgumentType]
        return build

    return decorate


class Choice(NamedTuple):
    """A registered choice of exemplars; see :func:`register_exemplars`."""

    choose: Callable[[Any], dict[int, Any]]
    by_class: bool


def register_exemplars(name: str, by_class: bool = True) -> Callable[[T], T]:
    """Register ``choose(pool) -> {class: indices}`` for the key ``exemplars``.

    ``pool`` is a :class:`pycil_wsc.data.exemplars.Pool`: the candidates, the quota of each class, features and random
    numbers. ``choose`` returns the exemplars of the candidates' classes, most important first: as many as the quota
    says, or all of a smaller class. With ``by_class=False`` it chooses from the whole stream, and returns the exemplars
    of all classes seen.
    """

    def decorate(choose: T) -> T:
        exemplars.add(name, Choice(choose, by_class))  # pyright: ignore[reportArgumentType]
        return choose

    return decorate


def register_analysis(name: str) -> Callable[[T], T]:
    """Register a class like :class:`pycil_wsc.studies.observer.Observer`, used by runs that list it in ``analyse``."""
    return lambda observer: analyses.add(name, observer)


def register_metric(name: str) -> Callable[[T], T]:
    """Register ``measure(history) -> JSON value``, which ``result.json`` stores under ``name``.

    ``history`` has the line of ``metrics.jsonl`` for each task: a dict with ``cnn_top1``, ``cnn_tasks`` (the accuracy
    on each task so far), ``cnn_top5``, ``nme_top1`` (if there are exemplars), ``num_seen`` and others.
    """
    return lambda measure: metrics.add(name, measure)


class Kind:
    """A kind of run: class-incremental learning, or the continual training of a language model.

    A subpackage registers its kind of run in a module ``kind``; other code uses only this interface. A configuration is
    a frozen dataclass whose class attribute ``kind`` is the name of its kind. It has ``prefix``, ``seed``, ``device``,
    ``threads``, ``out``, ``method`` (the name in tables), ``run_folder``, ``to_dict()`` (plain JSON values, which
    :meth:`resolve` accepts) and ``identity()`` (the values that decide the result).
    """

    unit: str  # the unit of a run's cost
    checkpoint: str  # the file in a run's folder from which a stopped run resumes
    records: tuple[str, ...] = ()  # patterns of what a run writes in its folder beside the result and the log

    def merge(self, file: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the keys of a JSON file (nested ones with dots) with those of the command line, which override them."""
        return {**file, **overrides}

    def takes_list(self, name: str) -> bool:
        """Whether a value of the key is itself a list; for other keys, a list is an axis of the sweep."""
        raise NotImplementedError

    def resolve(self, flat: Mapping[str, Any]) -> Any:
        """Build a complete, checked configuration from one value per key."""
        raise NotImplementedError

    def earlier(self) -> dict[str, Any]:
        """Values that applied before keys were added whose defaults differ from them."""
        return {}

    def loader(self) -> Callable[[Any], Any]:
        """A function from a configuration to the data of its run, which reads shared data only once."""
        raise NotImplementedError

    def plan(self, config: Any, data: Any) -> int:
        """The cost of a whole run, in ``unit``."""
        raise NotImplementedError

    def measurer(self) -> Callable[[Any, Any], float]:
        """A function that estimates the training time on this machine, in seconds, from a configuration and its data.

        It measures a few steps of each phase; runs whose steps take equally long share a measurement.
        """
        raise UserError(f"--measure: training on {self.unit} cannot be measured yet; leave it out")

    def execute(self, config: Any, data: Any, on_progress: Callable[[Any], None]) -> dict[str, Any]:
        """Execute a run, resuming it if it was stopped; returns the contents of its ``result.json``.

        ``on_progress`` is called with every :class:`pycil_wsc.runs.progress.Progress`.

        Raises:
            UnusableRun, TrainingDiverged, WrongPlan: this run fails and is not tried again; the others continue.
            UserError: none of the runs can work; the sweep ends.
            Exception: any other; the run is tried once more.
        """
        raise NotImplementedError

    def headline(self, result: Mapping[str, Any]) -> str:
        """A short summary of a finished run."""
        raise NotImplementedError

    def extends(self, config: Any) -> bool:
        """Whether the result in the run's folder is that of a run with fewer tasks, which ``config`` extends."""
        return False

    def leftovers(self, config: Any) -> tuple[str, ...]:
        """Files that a finished run no longer needs."""
        return (self.checkpoint,)

    def unrecorded(self, config: Any) -> list[str]:
        """Records that ``config`` requests but the finished run does not have."""
        return []

    def check_model(self, config: Any, data: Any) -> None:
        """Raise a :class:`UserError` if the run's model cannot be built, or not trained as configured.

        Called before any run of a sweep starts.
        """

    def check_processes(self, config: Any, count: int) -> None:
        """Raise a :class:`UserError` if ``count`` processes cannot share the run of ``config``."""


DEFAULT_KIND = "class_incremental"


def register_kind(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Register a :class:`Kind`. A configuration is of this kind if it has the key ``name``, or one below it."""

    def decorate(cls: type[Kind]) -> type[Kind]:
        kinds.add(name, cls())
        return cls

    return decorate


def kind_for_keys(flat: Mapping[str, Any]) -> Kind:
    """The kind of run that these keys describe."""
    named = [first for first in (key.partition(".")[0] for key in flat) if first in kinds]
    return kinds[named[0] if named else DEFAULT_KIND]
