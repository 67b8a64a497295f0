"""Registries: a name in the JSON becomes an object here.

A leaf: it imports nothing of the package but the error type. What registers itself does so with a decorator where it is
defined, and is found by the folder that it lies in::

    @register_learner("replay", epochs=70, milestones=[30, 50])
    class Replay(BaseLearner): ...
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pycil_wsc.errors import UserError, did_you_mean

T = TypeVar("T")


class Registry(UserDict):
    """A dict whose look-up failure is a :class:`UserError` that names the nearest known key.

    ``kind`` is what an entry is, for that error. ``modules`` are imported at the first look-up: they register the
    entries that come with the package.
    """

    def __init__(self, kind: str, modules: Iterable[str] = ()) -> None:
        self.kind, self._modules, self._entries = kind, list(modules), {}

    @property
    def data(self) -> dict[str, Any]:  # all that UserDict does goes through it
        while self._modules:  # what they import may look something up, and must find this list shorter
            importlib.import_module(self._modules.pop())
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


def _modules_named(name: str) -> list[str]:
    """The modules ``name`` of the package's rooms."""
    here = Path(__file__).parent
    return [f"{here.name}.{path.parent.name}.{name}" for path in sorted(here.glob(f"*/{name}.py"))]


def _modules_in(room: str) -> list[str]:
    """All modules of a room of the package."""
    here = Path(__file__).parent
    return [f"{here.name}.{room}.{path.stem}" for path in sorted((here / room).glob("*.py"))]


learners = Registry("model_name", ["pycil_wsc.learners"])
learner_defaults = Registry("model_name", ["pycil_wsc.learners"])
backbones = Registry("convnet_type", ["pycil_wsc.networks.backbones"])
optimizers = Registry("optimizer", ["pycil_wsc.engine.optimizers"])
optimizer_defaults = Registry("optimizer", ["pycil_wsc.engine.optimizers"])
datasets = Registry("dataset", _modules_in("data"))
importances = Registry("wsc.importance", ["pycil_wsc.learners"])
analyses = Registry("analysis", ["pycil_wsc.analysis"])
metrics = Registry("metric", ["pycil_wsc.runs.metrics"])
kinds = Registry("kind of run", _modules_named("kind"))


def register_learner(name: str, **defaults: Any) -> Callable[[type[T]], type[T]]:
    """Register a learner class under ``name``.

    ``defaults``: the values that keys of ``Config`` have for it if absent from the JSON. Keys that it alone has are
    fields of its dataclass ``Options``, declared with :func:`pycil_wsc.keys.key`; they are found in ``config.options``.
    """

    def decorate(cls: type[T]) -> type[T]:
        learner_defaults.add(name, defaults)
        return learners.add(name, cls)

    return decorate


def register_backbone(name: str) -> Callable[[T], T]:
    """Register ``build(**keywords) -> nn.Module``: (B, 3, H, W) images -> (B, ``out_dim``) features.

    Its keywords are the keys ``convnet_options`` of the JSON; each has a default, by whose type a value is checked,
    and a ValueError says which values there are. A module with ``split() -> (trunk, block)`` also serves MEMO.
    """
    return lambda build: backbones.add(name, build)


def check_backbone_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` unless ``options`` are keywords of the backbone ``name``, of their defaults' types."""
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
    ``defaults``: the values that keys of ``Config`` have with this optimiser if absent from the JSON, whatever the
    learner: rates and decays that suit it.
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

    ``network`` is in evaluation mode and gives logits; ``params`` and ``previous`` are {name: tensor}, the weights to
    rank now and before the task; ``batches`` is the task's training data with the memory, a list-like of
    (images, targets) without augmentation; ``options`` are the keys ``wsc.*``. What has the highest scores is kept.
    """
    return lambda score: importances.add(name, score)


def register_analysis(name: str) -> Callable[[T], T]:
    """Register a class like :class:`pycil_wsc.analysis.observer.Observer`; runs whose ``analyse`` names it have one."""
    return lambda observer: analyses.add(name, observer)


def register_metric(name: str) -> Callable[[T], T]:
    """Register ``measure(history) -> JSON value``, which ``result.json`` then has under ``name``.

    ``history`` holds the line of ``metrics.jsonl`` for each task: dicts with ``cnn_top1``, ``cnn_tasks`` (the accuracy
    on each task so far), ``cnn_top5``, ``nme_top1`` where there are exemplars, ``num_seen`` and others.
    """
    return lambda measure: metrics.add(name, measure)


class Kind:
    """A kind of run: class-incremental learning, or the continual training of a language model.

    A room of the package with a module ``kind`` registers its own there; all else knows nothing but this interface.
    A configuration is a frozen dataclass whose class attribute ``kind`` is the name of its kind. It has ``prefix``,
    ``seed``, ``device``, ``threads``, ``out``, ``method`` (the name that tables have), ``run_folder``, ``to_dict()``
    (plain JSON values, from which :meth:`resolve` makes it again) and ``identity()`` (those that decide the result).
    """

    unit: str  # what the cost of a run is counted in

    def merge(self, file: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a JSON file, nested ones with dots, and over them those of the command line."""
        return {**file, **overrides}

    def takes_list(self, name: str) -> bool:
        """Whether one value of the key is itself a list; for other keys a list is an axis of the sweep."""
        raise NotImplementedError

    def resolve(self, flat: Mapping[str, Any]) -> Any:
        """One complete, checked configuration from one value per key."""
        raise NotImplementedError

    def earlier(self) -> dict[str, Any]:
        """Values of keys that were added with another default than what runs had done until then."""
        return {}

    def loader(self) -> Callable[[Any], Any]:
        """A function from a configuration to the data of its run, which reads what several runs use once."""
        raise NotImplementedError

    def plan(self, config: Any, data: Any) -> int:
        """What a whole run costs, in ``unit``."""
        raise NotImplementedError

    def measurer(self) -> Callable[[Any, Any], float]:
        """A function from a configuration and its data to the seconds that training takes on this machine.

        From a few measured steps of each phase; what several runs have in common is measured once.
        """
        raise UserError(f"--measure: training on {self.unit} cannot be measured yet; leave it out")

    def execute(self, config: Any, data: Any, report: Callable[[Any], None]) -> dict[str, Any]:
        """Bring a run to its end, from where a stopped one stood; returns the contents of its ``result.json``.

        ``report`` is called with each :class:`pycil_wsc.runs.progress.Progress`.
        """
        raise NotImplementedError

    def headline(self, result: Mapping[str, Any]) -> str:
        """A finished run in a few words."""
        raise NotImplementedError

    def extends(self, config: Any) -> bool:
        """Whether the result in the run's folder is that of a shorter run, which ``config`` goes on with."""
        return False

    def leftovers(self, config: Any) -> tuple[str, ...]:
        """Files that a finished run does not need any more."""
        return ("checkpoint.pt",)

    def unrecorded(self, config: Any) -> list[str]:
        """What ``config`` asks to be recorded beside the result, and a run that finished before did not record."""
        return []

    def check_processes(self, config: Any, count: int) -> None:
        """Raise :class:`UserError` if ``count`` processes cannot share the run of ``config``."""


DEFAULT_KIND = "class_incremental"


def register_kind(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Register a :class:`Kind`. A configuration is of this kind if a key of it begins with ``name`` and a dot."""

    def decorate(cls: type[Kind]) -> type[Kind]:
        kinds.add(name, cls())
        return cls

    return decorate


def kind_for_keys(flat: Mapping[str, Any]) -> Kind:
    """The kind of run that these keys describe."""
    named = [first for first in (key.partition(".")[0] for key in flat) if first in kinds]
    return kinds[named[0] if named else DEFAULT_KIND]
