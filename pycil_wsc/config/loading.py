"""Loads JSON files as the configurations of their runs.

Keys are flat and keep PyCIL's names and meanings. A list where a single value is expected is an axis of the sweep.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config.completion import known_keys
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.image_config import Config
from pycil_wsc.config.kinds import kind_of_keys, run_folder
from pycil_wsc.config.pycil_files import our_values
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.config.unknown import DIRECTIVES
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import Json, read_json
from pycil_wsc.keys import RESULT, declared
from pycil_wsc.output import watched

LOG = logging.getLogger("pycil_wsc")
PARTS = (
    "%s: device: PyCIL's batch norm normalises the part of a batch on each of the %d GPUs of this list separately; "
    "here it normalises the whole batch, unless you set batch_norm_parts to %d"
)
ITEM = r'\s*("(?:[^"\\]|\\.)*"|[^][{}",]+?)\s*'  # list item on the command line: a string, a bare word or a number


def load(path: str | Path, overrides: Mapping[str, Json] | None = None) -> list[RunConfig]:
    """Return the configurations of the runs in the JSON file at ``path``, seeds outermost.

    ``overrides`` maps keys, nested or dotted (``wsc.retain``), to values that take precedence over the file's. If the
    file has ``runs``, a list of sets of keys, each set is merged into the file's other keys and gives runs of its own.

    Raises :class:`UserError`, with the path, for a file that cannot be read, an unknown key or a wrong value.
    """
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object of keys and values")
    given: set[str] = set()
    try:
        runs = _all_runs(raw, flatten(overrides or {}), given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for line in registry.left_out():
        LOG.warning("left out: %s", line)
    for name in sorted(unread(given, runs)):
        LOG.warning("%s: %s: has no effect; it is a key of %s, which no run of this file uses", path, name, owner(name))
    gpus = _listed_gpus(raw, overrides or {})
    if gpus > 1 and any(hasattr(run, "batch_norm_parts") for run in runs):
        LOG.warning(PARTS, path, gpus, gpus)
    return _distinct(runs, path)


def _distinct(runs: Sequence[RunConfig], path: str | Path) -> list[RunConfig]:
    """The runs, each once. Raises a :class:`UserError` for two that would share a folder but differ."""
    paths = [run_folder(config) for config in watched(runs, len(runs), "naming the folders")]
    folders = dict(zip(paths, runs))  # drops duplicate runs
    for folder, config in zip(paths, runs):
        other = folders[folder]
        if other is config:
            continue
        if other.identity() != config.identity():
            raise UserError(f"{path}: two runs would share {folder}; give them different values of 'prefix'")
        values = config.to_dict()
        other_values = other.to_dict()
        for name in (name for name, key in config.keys.items() if key.decides not in RESULT):
            if values.get(name) != other_values.get(name):
                both = f"{json.dumps(values.get(name))} and {json.dumps(other_values.get(name))}"
                raise UserError(
                    f"{path}: {name}: {both} for one run, {folder}; this key does not distinguish runs, so give a "
                    "single value"
                )
    return list(folders.values())


def _listed_gpus(raw: Mapping[str, Json], overrides: Mapping[str, Json]) -> int:
    """The number of GPUs in PyCIL's list, the longest one; 0 without a list, or where ``batch_norm_parts`` is given."""
    most = 0
    for entry in raw.get("runs", [{}]):
        given = {**raw, **entry, **overrides}
        device = our_values({"device": given.get("device")})["device"]
        if isinstance(given.get("device"), list) and str(device).startswith("gpu:") and "batch_norm_parts" not in given:
            most = max(most, len(given["device"]))
    return most


def resolve_recorded(flat: Mapping[str, Json], path: Path) -> Any:
    """:func:`resolve` for the keys of the finished run whose result is at ``path``.

    A key added since then gets the value that applied before. Raises :class:`UnusableRun` for the keys of another
    version.
    """
    kind = kind_of_keys(flat)
    try:
        return kind.resolve({**kind.earlier(), **without_dropped(flat)})
    except UserError as error:
        raise UnusableRun(
            f"{path}: was made by another version of pycil_wsc ({error}); use that one, or move the file away"
        ) from None


def resolve(flat: Mapping[str, Json]) -> Any:
    """Build a complete, checked configuration from one value per key; absent keys get their defaults.

    Class-incremental runs return a :class:`pycil_wsc.config.image_config.Config`; other kinds of runs have their own
    class.

    Raises:
        UserError: a key is unknown, or a value is invalid or does not fit the others.
    """
    return kind_of_keys(flat).resolve(flat)


def parse_override(text: str) -> tuple[str, Json]:
    """Parse ``key=value`` from the command line: the value is JSON, a list that may contain bare words, or a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: expected key=value")
    if re.fullmatch(rf"\s*\[{ITEM}(,{ITEM})*\]\s*", value):
        return name, [_value(item) for item in re.findall(ITEM + r"[],]", value.strip()[1:])]
    return name, _value(value)


def _value(text: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unread(given: Iterable[str], runs: Iterable[RunConfig]) -> set[str]:
    """The keys of ``given`` that other methods read, but none of the ``runs``; none of language models."""
    if not all(isinstance(config, Config) for config in runs):
        return set()
    read = set().union(*(config.to_dict() for config in runs))
    return {name for name in given if name not in read and name in known_keys()}


def owner(name: str) -> str:
    """Whose key it is, in words."""
    if name.startswith("wsc."):
        return "Weight Space Consolidation (model_name wsc, or consolidate)"
    methods = [method for method, learner in registry.learners.items() if name in declared(learner.Options)]
    return ", ".join(sorted(methods))


def _all_runs(raw: dict[str, Json], overrides: Mapping[str, Json], given: set[str]) -> list[RunConfig]:
    """The runs of all entries of ``runs``, or of the file itself: every entry's first seed, then its second, ...

    The names of the keys that they have in all, by our names, are added to ``given``.
    """
    shared = {name: value for name, value in raw.items() if name != "runs"}
    if "runs" in overrides:
        raise UserError("runs: belongs to the file, and cannot be overridden; edit the file")
    if "runs" not in raw:
        return _grid(flatten(shared), overrides, given)
    entries = raw["runs"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("runs: expected a list of objects of keys and values, at least one")
    ranked = []
    for number, entry in enumerate(entries):
        try:
            if "runs" in entry:
                raise UserError("runs: stands only at the top level of the file; write the entries one after the other")
            keys_of_entry = flatten(entry)
            others = without_emptied(flatten(shared), keys_of_entry)
            configs = _grid(others | keys_of_entry, overrides, given)
        except UserError as error:
            raise UserError(f"runs[{number}]: {error}") from None
        seeds = list(dict.fromkeys(config.seed for config in configs))
        ranked += [(seeds.index(config.seed), config) for config in configs]
    return [config for _, config in sorted(ranked, key=lambda pair: pair[0])]


def _grid(file: Mapping[str, Json], overrides: Mapping[str, Json], given: set[str]) -> list[RunConfig]:
    """One run for each point of the sweep over list-valued keys."""
    file = without_emptied(file, overrides)
    kind = kind_of_keys({**file, **overrides})
    merged = kind.merge(file, overrides)
    given.update(merged)
    axes = _axes(merged, kind.takes_list)
    number = math.prod(map(len, axes.values()))
    return [kind.resolve(merged | point) for point in watched(_points(axes), number, "checking the settings")]


def _points(axes: Mapping[str, list[Json]]) -> Iterator[dict[str, Json]]:
    """All combinations of the values of the ``axes``, one value per key, seeds outermost."""
    order = sorted(axes, key=lambda name: name != "seed")
    return (dict(zip(order, point)) for point in itertools.product(*(axes[name] for name in order)))


def _axes(flat: dict[str, Json], takes_list: Callable[[str], bool]) -> dict[str, list[Json]]:
    """The list-valued keys. If a value of the key is itself a list (``takes_list``), an axis is a list of lists."""
    axes = {name: value for name, value in flat.items() if _is_axis(value, takes_list(name))}
    empty = [name for name, value in axes.items() if not value]
    if empty:
        raise UserError(f"{empty[0]}: an empty list has no runs; give at least one value")
    return axes


def _is_axis(value: Json, takes_list: bool) -> bool:
    if not isinstance(value, list):
        return False
    if not takes_list:
        return True
    return bool(value) and all(isinstance(item, list) for item in value)


def flatten(raw: Mapping[str, Json]) -> dict[str, Json]:
    """Nested groups become dotted keys: {"wsc": {"retain": 0.2}} -> {"wsc.retain": 0.2}. An empty one stays.

    Raises a :class:`UserError` for a key that is given in both forms.
    """
    flat = {}
    for name, value in raw.items():
        nested = isinstance(value, dict) and value and name not in DIRECTIVES
        given = {f"{name}.{inner}": v for inner, v in value.items()} if nested else {name: value}
        twice = sorted(flat.keys() & given.keys())
        if twice:
            raise UserError(f"{twice[0]}: is given twice, in a group and with a dot; leave one of the two out")
        flat |= given
    return flat


def without_emptied(flat: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    """``flat`` without the keys of groups that are empty in ``over``, which so get their defaults."""
    emptied = tuple(f"{name}." for name, value in over.items() if value == {})
    return {name: value for name, value in flat.items() if not name.startswith(emptied)}
