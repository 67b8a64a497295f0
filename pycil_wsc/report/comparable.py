"""Which results may be compared: those of runs on the same data and tasks, trained in the same way.

Runs may differ in the method, in the keys that it chooses, in the size of the memory and in the seed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pycil_wsc.files import Json
from pycil_wsc.report.duplicates import Variant, distinct, variants
from pycil_wsc.results.identity import distinguishing_keys, in_order, part_of, without_consolidation
from pycil_wsc.results.schema import LanguageResult
from pycil_wsc.results.store import Problem, Record

Schedule = tuple[int, int]  # epochs for the first task and for each later one


class Setting(NamedTuple):
    """The data and tasks of runs. ``fixed_memory``: memory is per class, otherwise in total.

    For a stream of tasks, ``dataset`` is the first one, and ``init_cls`` and ``increment`` are 0, as they are with
    ``increments`` and ``domains``.
    """

    dataset: str
    init_cls: int
    increment: int
    convnet_type: str  # or the language model
    fixed_memory: bool = True
    validation_split: float = 0.0  # the fraction of the training data used as test set
    data: str = ""  # a hash of the data, if a run recorded it
    part: tuple[tuple[str, str], ...] = ()  # max_tasks and classes of runs that learn only a part of the data
    tasks: tuple[str, ...] = ()  # the tasks of a language model
    increments: tuple[int, ...] = ()  # the classes of each task, if they are uneven
    domains: tuple[str, ...] = ()  # of the one data set, each with all classes


class Comparison(NamedTuple):
    """Runs of one setting that may be compared.

    ``variants``: the runs, each with its variant. ``conditions``: keys that no method chooses and for which other
    comparisons of the setting have other values. ``variants_of``: methods that have variants without a counterpart in
    any other method; all their runs are here.
    """

    setting: Setting
    variants: Mapping[Record, Variant]
    conditions: Mapping[str, Json]
    variants_of: Sequence[str] = ()


def comparisons(records: Iterable[Record], usual: Mapping[str, Schedule]) -> tuple[list[Comparison], list[Problem]]:
    """Divide runs into those that may be compared. Also returns the duplicates that were left out.

    ``usual``: the schedules that methods usually have.
    """
    variant_of = variants(records)
    settings: dict[Setting, dict[Record, Variant]] = defaultdict(dict)
    for record, setting in _settings(variant_of).items():
        settings[setting][record] = variant_of[record]
    compared: list[Comparison] = []
    problems: list[Problem] = []
    for setting in sorted(settings, key=_place):
        kept, duplicates = distinct(settings[setting])
        problems += duplicates
        if setting.validation_split or setting.tasks:  # trials are compared, whichever keys they vary
            compared.append(Comparison(setting, kept, {}))
        else:
            compared += _divided(setting, kept, usual)
    return compared, problems


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings(records: Iterable[Record]) -> dict[Record, Setting]:
    """The setting of each run.

    Data sets with the same hash are the same under any path. Runs that did not record a hash are grouped with runs of
    the same path that did.
    """
    settings = {record: _own_setting(record) for record in records}
    contents: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)  # of each path and its tasks
    first: dict[str, str] = {}  # the first path of each content
    for setting in settings.values():
        if setting.data:
            contents[setting.dataset, setting.tasks].add(setting.data)
            first.setdefault(setting.data, setting.dataset)
    for record, setting in settings.items():
        known = contents[setting.dataset, setting.tasks]
        data = next(iter(known)) if len(known) == 1 else setting.data
        settings[record] = setting._replace(dataset=first.get(data, setting.dataset), data=data)
    return settings


def _place(setting: Setting) -> tuple[bool, str, int, Setting]:
    """A sort key for the order of settings."""
    return bool(setting.tasks), setting.dataset, -setting.increment, setting


def _own_setting(record: Record) -> Setting:
    """The setting of a run, by itself."""
    config = record.config
    data = record.data.get("data")
    if isinstance(record.result, LanguageResult):
        tasks = tuple(record.data["tasks"])
        known = _content(data)
        return Setting(config["llm.data"], 0, 0, config["llm.model"], tasks=tasks, data=known)
    stream = config.get("tasks")
    uneven = tuple(config.get("increments") or ())
    domains = _in_short(config.get("domains") or ())
    even = not stream and not uneven and not domains
    return Setting(
        dataset=stream[0] if stream else config["dataset"],
        init_cls=config["init_cls"] if even else 0,
        increment=config["increment"] if even else 0,
        convnet_type=config["convnet_type"],
        fixed_memory=config["fixed_memory"],
        validation_split=config.get("validation_split") or 0.0,
        data=_content(data),
        part=tuple((name, json.dumps(value)) for name, value in part_of(record.data).items()),
        increments=uneven,
        domains=domains,
    )


def _in_short(domains: Iterable[str]) -> tuple[str, ...]:
    """``20 x rotated`` for as many in a row."""
    runs = [(domain, len(list(same))) for domain, same in itertools.groupby(domains)]
    return tuple(domain if number == 1 else f"{number} x {domain}" for domain, number in runs)


def _content(data):
    """The hash of the data that a result has noted, or ""."""
    return str(data.get("sha256", "")) if isinstance(data, dict) else ""


# ---- ways of training ------------------------------------------------------------------------------------------------


def _divided(setting: Setting, variant_of: Mapping[Record, Variant], usual: Mapping[str, Schedule]) -> list[Comparison]:
    """Divide the runs of a setting by their schedule and every key that is not specific to a method.

    If only one method was trained with certain values of these, all its runs form another comparison.
    """
    schedule = _schedules(list(variant_of), usual)
    shared = {name for record in variant_of for name in record.identity.shared} - set(Setting._fields)
    conditions: dict[Record, dict[str, Json]] = {}
    members: dict[str, list[Record]] = defaultdict(list)
    for record, variant in variant_of.items():
        conditions[record] = dict(zip(("init_epoch", "epochs"), schedule[record]))
        conditions[record] |= {name: variant.get(name) for name in in_order(shared)}
        members[json.dumps(conditions[record])].append(record)
    several: list[list[Record]] = []
    alone: set[str] = set()
    for same in sorted(members.values(), key=len, reverse=True):
        methods = {record.method for record in same}
        if len(methods) > 1 or len(members) == 1:
            several.append(same)
        else:
            alone |= methods
    keys = distinguishing_keys([conditions[same[0]] for same in several])
    compared: list[Comparison] = []
    for same in several:
        told = {key: value for key, value in conditions[same[0]].items() if key in keys}
        compared.append(Comparison(setting, {record: variant_of[record] for record in same}, told))
    rest = {record: variant for record, variant in variant_of.items() if record.method in alone}
    return [*compared, Comparison(setting, rest, {}, sorted(alone))] if rest else compared


def _schedules(records: list[Record], usual: Mapping[str, Schedule]) -> dict[Record, Schedule]:
    """The schedule that each run's is taken for.

    Methods have their own epochs, so schedules differ only where one method has several. Then those of the method with
    the most schedules count. Each run of another method joins the first of them that has the nearest fraction of its
    method's usual epochs, the same share up to rounding, or else the same epochs, or the same for the first task.
    """
    schedules = {record: (record.config["init_epoch"], record.config["epochs"]) for record in records}
    by_method: dict[str, Counter[Schedule]] = defaultdict(Counter)
    for record, epochs in schedules.items():
        by_method[record.method][epochs] += 1
    methods = sorted(by_method, key=lambda method: (method != "replay", method))  # of equals, the first one counts
    anchor = max(methods, key=lambda method: (len(by_method[method]), by_method[method].total()))
    known = sorted(by_method[anchor], reverse=True)
    if len(known) == 1:
        return dict.fromkeys(records, known[0])

    def distance(schedule: Schedule, record: Record) -> float:
        """How far two shares are from each other; infinite if by more than their rounding to whole epochs."""
        total = 0.0
        counts = zip(schedule, _usual(anchor, usual), schedules[record], _usual(record.method, usual))
        for other_length, usual_there, length, usual_here in counts:
            if not usual_there or not usual_here:
                return math.inf
            apart = abs(other_length / usual_there - length / usual_here)
            if apart > 0.5 / usual_there + 0.5 / usual_here:
                return math.inf
            total += apart
        return total

    taken = {}
    for record, epochs in schedules.items():
        same = [epochs] if record.method == anchor else []
        nearest = min(known, key=lambda schedule: distance(schedule, record))
        if distance(nearest, record) < math.inf:
            same.append(nearest)
        same += [other for other in known if other == epochs]
        same += [other for other in known if other[0] == epochs[0]]
        taken[record] = same[0] if same else epochs
    return taken


def _usual(method: str, usual: Mapping[str, Schedule]) -> Schedule:
    return usual.get(without_consolidation(method), (0, 0))
