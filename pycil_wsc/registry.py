"""Registries, which map names in the JSON to objects.

Objects are registered with a decorator where they are defined, and found by their folder. Modules of other packages are
found by their entry points of the group ``pycil_wsc``. This module imports only ``errors`` from the package::

    @register_learner("replay", epochs=70, milestones=[30, 50])
    class Replay(BaseLearner): ...
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from pycil_wsc.errors import UserError, comparable, did_you_mean, first_line, place_of, shown

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
_groups = ["pycil_wsc"]  # groups of entry points that are still to be loaded
_broken: dict[str, str] = {}  # modules and entry points that cannot be imported: name -> what is wrong
MOST_BROKEN = 3  # of these that an error lists
_loading = threading.RLock()  # one thread at a time imports modules, the others wait for what it registers


class NameTaken(UserError):
    """A name is registered twice, in ``registry``."""

    def __init__(self, message: str, registry: Registry, name: str) -> None:
        super().__init__(message)
        self.registry = registry
        self.name = name


class Registry(UserDict):
    """A dict that raises a :class:`UserError` with the most similar known key if a key is missing.

    ``what`` names the entries in this error. ``modules`` are imported at the first look-up and register the package's
    own entries; then those of other packages are loaded. What cannot be imported is left out (:func:`left_out`).
    ``notes``: what to say of names that are not registered, as compared (:func:`pycil_wsc.errors.comparable`).
    """

    def __init__(self, what: str, modules: Iterable[str] = (), notes: Mapping[str, str] | None = None) -> None:
        self.what = what
        self.notes = notes or {}
        self._modules = list(modules)
        self._entries: dict[str, Any] = {}
        self._disputed: dict[str, str] = {}  # names that two modules register: name -> what to do

    @property
    def data(self) -> dict[str, Any]:  # used by all methods of UserDict
        with _loading:
            while self._modules:
                name = self._modules.pop()  # before the import, which may itself look something up
                try:
                    import_or_leave_out(name)
                except BaseException:  # Ctrl-C, for instance: the next look-up tries again
                    self._modules.append(name)
                    raise
            _load_entry_points()
        return self._entries

    def __getitem__(self, name: str) -> Any:
        entry = super().__getitem__(name)
        if name in self._disputed:  # neither of the two may pass for the other
            raise UserError(self._disputed[name])
        return entry

    def __missing__(self, name: str) -> NoReturn:
        if _broken:
            _check_torch()
        note = self.notes.get(comparable(str(name)), "")
        raise UserError(f"unknown {self.what} '{shown(name)}'{did_you_mean(name, self)}{note}{left_out_hint()}")

    def get(self, name: str, default: object = None) -> Any:
        return self.data.get(name, default)

    def __copy__(self) -> Registry:
        copy = Registry(self.what)
        copy._entries.update(self.data)
        return copy

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``; returns it.

        Raises a :class:`NameTaken` if the name is another's. A definition that is executed again, as in a notebook,
        takes the place of its former self.
        """
        origin, other = _origin(entry), _origin(self._entries.get(name, entry))
        if origin != other:
            message = f"{self.what} '{name}' is registered by {other} and by {origin}; rename one of them"
            raise NameTaken(message, self, name)
        self._entries[name] = entry
        return entry


def _origin(entry: object) -> str:
    """Where an entry is defined."""
    function = entry[0] if isinstance(entry, tuple) else entry
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"


def _check_torch() -> None:
    """Raise :class:`UserError` if torch cannot be imported, which nearly all modules need."""
    try:
        importlib.import_module("torch")
    except Exception as error:
        remedy = "repair it, for example by pip install --force-reinstall torch"
        raise UserError(f"torch cannot be imported ({_reason(error)}); {remedy}") from None


def left_out() -> list[str]:
    """A line for each module and entry point that could not be imported so far: where, what is wrong, what to do."""
    return list(_broken.values())


def left_out_hint() -> str:
    """What could not be imported, to end an error about a name that it may define; empty if there is nothing."""
    if not _broken:
        return ""
    lines = left_out()
    more = f"; and {len(lines) - MOST_BROKEN} more" if len(lines) > MOST_BROKEN else ""
    return f" (left out: {'; '.join(lines[:MOST_BROKEN])}{more})"


def import_or_leave_out(name: str) -> None:
    """Import a module of the package. One that cannot be imported is left out, so that it costs no other."""
    if name in _broken:
        return
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may also end the program
        _note_dispute(error)
        _broken[name] = f"{_file_of(name, error)}: cannot be imported ({_reason(error)}){_remedy(error)}"


def import_all_of(package: str, path: Iterable[str]) -> None:
    """Import the modules of a package that is found at ``path``, so that they register themselves."""
    for module in pkgutil.iter_modules(path):
        import_or_leave_out(f"{package}.{module.name}")


def _load_entry_points():
    """Load the modules that installed packages name as entry points, once in each process."""
    while _groups:
        group = _groups.pop()  # before loading, which may itself look something up
        try:
            _load_group(group)
        except KeyboardInterrupt:  # the next look-up tries again
            _groups.append(group)
            raise


def _load_group(group):
    """Load the modules that the entry points of a group name; what fails is added to ``_broken``."""
    try:
        entries = list(entry_points(group=group))
    except Exception as error:
        _broken[group] = f"the metadata of an installed package is broken ({_reason(error)}); find it with 'pip check'"
        return
    for entry in entries:
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            _note_dispute(error)
            hint = _remedy(error) or "; correct or uninstall that package"
            _broken[f"{entry.name} = {entry.value}"] = (
                f"entry point '{entry.name} = {entry.value}' of the package '{_package_of(entry)}' cannot be loaded "
                f"({_reason(error)}){hint}"
            )


def _package_of(entry):
    try:
        return entry.dist.name or "?"
    except Exception:  # without a name in its metadata, or without metadata
        return "?"


def _note_dispute(error):
    if isinstance(error, NameTaken):
        error.registry._disputed[error.name] = str(error)


def _file_of(name, error):
    """The file of a module of the package, and the line that failed: ``methods/mine.py:3``."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no module has such a name
        spec = None
    path = Path(spec.origin if spec and spec.origin else name)
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    return place_of(error, path, line)


def _reason(error):
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def _remedy(error):
    """What to do, where that is known."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing.partition(".")[0] == "models":  # as in a file of PyCIL
        return "; PyCIL's models.base is pycil_wsc.training.learner here (docs/extending.md)"
    return ""


def _modules_in(subpackage: str) -> list[str]:
    """All modules of a subpackage and of the folders in it."""
    here = Path(__file__).parent
    paths = sorted((here / subpackage).rglob("*.py"))
    names = [".".join(path.relative_to(here).with_suffix("").parts) for path in paths if path.name != "__init__.py"]
    return [f"{here.name}.{name}" for name in names]


def own_modules() -> list[str]:
    """The package's modules that register something, all imported; without those that cannot be."""
    several = [name for subpackage in ("methods", "data", "studies") for name in _modules_in(subpackage)]
    modules = [*several, "pycil_wsc.networks.backbones", "pycil_wsc.training.optimizers", "pycil_wsc.results.metrics"]
    for name in modules:
        import_or_leave_out(name)
    return [name for name in modules if name not in _broken]


NOTES = {
    "derpp": " ('der' is PyCIL's, which expands the network; Mammoth's der is dark_er)",
}
learners = Registry("model_name", _modules_in("methods"), NOTES)
learner_defaults = Registry("model_name", _modules_in("methods"))
backbones = Registry("convnet_type", ["pycil_wsc.networks.backbones"])
optimizers = Registry("optimizer", ["pycil_wsc.training.optimizers"])
optimizer_defaults = Registry("optimizer", ["pycil_wsc.training.optimizers"])
datasets = Registry("dataset", _modules_in("data"))
exemplars = Registry("exemplars", _modules_in("data"))
importances = Registry("wsc.importance", _modules_in("studies"))
resets = Registry("wsc.reset", _modules_in("studies"))
analyses = Registry("analysis", _modules_in("studies"))
metrics = Registry("metric", ["pycil_wsc.results.metrics"])


def spelled(name: str) -> str:
    """The learner that ``name`` is a spelling of: ``er_ace`` of ``ER-ACE``, ``derpp`` of ``der++``; else ``name``."""
    if name in learners:
        return name
    alike = [known for known in learners if comparable(known) == comparable(name)]
    return alike[0] if len(alike) == 1 else name


def check_dataset(name: str) -> None:
    """Raise :class:`UserError` unless a data set ``name`` is registered; for a folder or file, say how to name it."""
    if name in datasets:
        return
    if os.path.exists(name):
        prefix = "folder" if os.path.isdir(name) else "npz"
        raise UserError(f"unknown {datasets.what} '{name}'; did you mean '{prefix}:{name}'?")
    near = did_you_mean(name, [*datasets, "folder:PATH", "npz:PATH"])
    raise UserError(f"unknown {datasets.what} '{shown(name)}'{near}{left_out_hint()}")


def register_learner(name: str, **defaults: object) -> Callable[[type[T]], type[T]]:
    """Register a learner class under ``name``.

    ``defaults`` are its defaults for shared keys of the configuration. Its own keys are fields of its dataclass
    ``Options``, declared with :func:`pycil_wsc.keys.key`; their values are in ``config.options``.

    Raises:
        UserError: the name is another learner's, the class is not derived from ``BaseLearner``, or its ``Options`` are
            not a dataclass of keys.
    """

    def decorate(cls: type[T]) -> type[T]:
        _check_learner(cls)
        learners.add(name, cls)
        learner_defaults.add(name, defaults)
        return cls

    return decorate


def _check_learner(cls):
    options = getattr(cls, "Options", None)
    if options is None:
        raise UserError(f"{_origin(cls)}: a learner is derived from pycil_wsc.training.learner.BaseLearner")
    if not is_dataclass(options):
        raise UserError(f"{_origin(options)}: is not a dataclass; put @dataclass(frozen=True) before it")
    if plain := [option.name for option in fields(options) if not option.metadata]:
        raise UserError(f"{_origin(options)}.{plain[0]}: is not a key; declare it with key(default, description)")


def register_backbone(name: str) -> Callable[[T], T]:
    """Register ``build(**keywords) -> nn.Module``: (B, 3, H, W) images -> (B, ``out_dim``) features.

    Its keyword arguments are the keys in ``convnet_options``. Each has a default, whose type is checked; ``build``
    raises a ValueError for invalid values. MEMO needs a module with ``split() -> (trunk, block)``.
    """
    return lambda build: backbones.add(name, build)


def check_backbone_options(name: str, options: Mapping[str, object]) -> None:
    """Raise :class:`UserError` unless ``options`` are keyword arguments of the backbone, with their defaults' types."""
    build = backbones[name]
    parameters = inspect.signature(build).parameters if options else {}
    for option, value in options.items():
        if option not in parameters:
            known = did_you_mean(option, parameters) if parameters else f"; '{name}' has no options"
            raise UserError(f"convnet_options: unknown option '{option}' of '{name}'{known}")
        wanted = type(parameters[option].default)
        if parameters[option].default in (None, inspect.Parameter.empty):
            continue  # any type
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UserError(
                f"convnet_options.{option}: expected {wanted.__name__}, got {json.dumps(value, default=str)}"
            )


def register_optimizer(name: str, **defaults: object) -> Callable[[T], T]:
    """Register ``build(groups, config) -> torch.optim.Optimizer``.

    ``groups`` are parameter groups with ``params``, ``lr`` and ``weight_decay``; the training loop sets ``lr``.
    ``defaults`` are defaults for keys of the configuration with this optimiser, such as learning rates and weight
    decays. They take precedence over those of a learner that has another optimiser by default.
    """

    def decorate(build: T) -> T:
        optimizers.add(name, build)
        optimizer_defaults.add(name, defaults)
        return build

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

    build: Callable[..., object]
    ranks: bool


def register_reset(name: str, *, ranks: bool) -> Callable[[T], T]:
    """Register ``build(training) -> rule`` for ``wsc.reset``.

    ``training``: :class:`pycil_wsc.studies.rival_resets.Training`.

    The rule is a :class:`pycil_wsc.consolidation.Reset`, or an object that follows the optimiser by itself, as
    :class:`pycil_wsc.studies.continual_backprop.ContinualBackprop`. ``ranks``: whether it keeps the weights with the
    highest scores. ``build`` raises a ValueError if the rule does not fit the network.
    """

    def decorate(build: T) -> T:
        resets.add(name, RegisteredReset(build, ranks))  # pyright: ignore[reportArgumentType]
        return build

    return decorate


class RegisteredExemplars(NamedTuple):
    """A registered choice of exemplars; see :func:`register_exemplars`."""

    choose: Callable[..., dict[int, np.ndarray]]
    by_class: bool


def register_exemplars(name: str, by_class: bool = True) -> Callable[[T], T]:
    """Register ``choose(pool) -> {class: indices}`` for the key ``exemplars``.

    ``pool`` is a :class:`~pycil_wsc.data.memory.memory.Pool`: the candidates, the quota of each class, features and
    random numbers. ``choose`` returns the exemplars of the candidates' classes, most important first: as many as the
    quota says, or all of a smaller class. With ``by_class=False`` it chooses from the whole stream, and returns the
    exemplars of all classes seen.
    """

    def decorate(choose: T) -> T:
        exemplars.add(name, RegisteredExemplars(choose, by_class))  # pyright: ignore[reportArgumentType]
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
