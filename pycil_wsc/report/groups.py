"""Groups of runs that may be compared, and names that distinguish the runs of a group."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from pycil_wsc.errors import shown
from pycil_wsc.report import paper
from pycil_wsc.report.measures import rows_of
from pycil_wsc.report.names import clean, dataset_names, method_name
from pycil_wsc.report.options import DEFAULT, Options
from pycil_wsc.results import ALL, Problem, Record
from pycil_wsc.results.duplicates import Variant, distinct, variants
from pycil_wsc.results.identity import LEADING, OF_FIRST_TASK

ORDER = ["der", "foster", "memo", "finetune", "replay", "icarl", "bic", "wa", "joint", "wsc"]
SCHEDULE = ("init_epoch", "epochs")
STUDIED = {  # the keys that the paper's studies vary, with the values of the paper's method
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "exemplars": "herding",
}


def memory_text(memory: float) -> str:
    """A number of exemplars in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"


class Setting(NamedTuple):
    """The values that runs must share to be in one table. ``fixed_memory``: memory is per class, otherwise in total.

    For a stream of tasks, ``dataset`` is the first one, and ``init_cls`` and ``increment`` are 0.
    """

    dataset: str
    init_cls: int
    increment: int
    convnet_type: str
    fixed_memory: bool
    validation_split: float  # the share of the training data used as test set
    data: str  # a hash of the data, or "" if no run recorded it
    part: tuple[tuple[str, str], ...] = ()  # max_tasks and classes of runs that learn only a part of the data


Variants = Mapping[Record, Variant]


class Group:
    """Runs of one setting that may be compared: they differ only in the method and in the keys that a study varies.

    ``conditions``: keys for which the setting's other groups have other values. ``variants_of``: methods that have
    variants without a counterpart in any other method; their group holds all their runs and has no conditions.
    """

    def __init__(
        self,
        setting: Setting,
        comparison: Comparison,
        variant_of: Variants,
        options: Options = DEFAULT,
    ) -> None:
        self.setting, self.variant_of, self.options = setting, variant_of, options
        records, self.conditions, self.variants_of = comparison
        self.records = sorted(records, key=lambda record: (method_rank(record.method), record.memory, record.seed))
        self.dataset_name, self.number, self.only_tuning = clean(setting.dataset), 1, True
        self.standard = {name: self._standard(name) for name in STUDIED}
        self.reference = paper.tables(setting) if options.paper and not self.variants_of else {}
        self.custom_names = _custom_names(self.records, variant_of)
        self.labels = {own for record in self.records if (own := _label_of(record))}

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table of rows: a line per run."""
        return rows_of(self.records, paper.expands)

    def _standard(self, name: str) -> Hashable:
        """The paper's value of a studied key if any run has it, otherwise the most frequent value."""
        values = Counter(studied_value(record, name) for record in self.records if name in record.config)
        return STUDIED[name] if STUDIED[name] in values or not values else values.most_common(1)[0][0]

    def deviations(self, record: Record) -> set[str]:
        """The studied keys in which ``record`` differs from the group's standard values."""
        return {
            name for name in STUDIED if name in record.config and studied_value(record, name) != self.standard[name]
        }

    def base(self) -> list[Record]:
        """The runs that belong to no study, shown in the main tables and figures."""
        return [record for record in self.records if not self.deviations(record)]

    def names(
        self, records: Iterable[Record], base: Callable[[Record], str | None] | None = None, studied: Iterable[str] = ()
    ) -> dict[Record, str]:
        """``{record: name}``: the ``base`` name and the keys that distinguish runs with the same base name.

        By default, the base name is the label in the run's configuration, or its method. ``studied`` keys are already
        in the base name.
        """
        return distinct_names(records, base or self.name_of, self.variant_of, studied, brief=True)

    def name_of(self, record: Record) -> str:
        """The label in the run's configuration; else that of the same variant's runs, or the method."""
        return _label_of(record) or self.custom_names.get(
            (record.method, self.variant_of[record].frozen), record.method
        )

    def shown(self, name: str) -> str:
        """The display name of a row or line."""
        if any(name == own or name.startswith(f"{own} ") for own in self.labels):
            return clean(name)
        return method_name(name, self.options.labels)

    def rest(self, record: Record, studied: Iterable[str]) -> Hashable:
        """The values that decide the result, except ``studied`` keys, method, memory size and seed."""
        return Variant((name, value) for name, value in self.variant_of[record].items() if name not in studied).frozen

    @property
    def slug(self) -> str:
        """The part of file names that identifies the group."""
        share = 100 * self.setting.validation_split
        dataset, convnet = (_slug(name) for name in (self.setting.dataset, self.setting.convnet_type))
        split = f"b{self.setting.init_cls}-inc{self.setting.increment}" if self.setting.increment else "tasks"
        parts = [f"{dataset}-{split}-{convnet}"]
        parts += ["" if self.setting.fixed_memory else "-total", f"-validation{share:g}" if share else ""]
        parts += [f"-{_slug(name + value, 40)}" for name, value in self.setting.part]
        parts += [f"-{_slug(f'{name}{_as_text(value)}', 40)}" for name, value in self.conditions.items()]
        parts += ["-variants"] * bool(self.variants_of)
        return "".join(parts) + (f"-{self.number}" if self.number > 1 else "")

    @property
    def title(self) -> str:
        setting, share = self.setting, 100 * self.setting.validation_split
        tasks = Counter(len(record.data["curve"]) for record in self.records).most_common(1)[0][0]
        classes = f" of {setting.increment} classes" if setting.increment else ""
        parts = [self.dataset_name, f"{tasks} task{'s' * (tasks != 1)}{classes}"]
        parts += [f"the first of {setting.init_cls}"] if setting.init_cls != setting.increment else []
        parts += [clean(setting.convnet_type)]
        parts += [f"{name}={clean(shown(value))}" for name, value in setting.part]
        parts += [f"tested on {share:g} % held out of the training data"] if share else []
        parts += [f"{name}={clean(_as_text(value))}" for name, value in self.conditions.items()]
        parts += [f"variants of {', '.join(map(self.shown, self.variants_of))}"] if self.variants_of else []
        return ", ".join(parts)

    @property
    def memory_title(self) -> str:
        return "exemplars per class" if self.setting.fixed_memory else "exemplars in total"


def group_runs(records: Iterable[Record], options: Options = DEFAULT) -> tuple[list[Group], list[Problem]]:
    """The groups of runs that may be compared, and the duplicate results that were left out."""
    variant_of = variants(records)
    kept, problems = distinct(variant_of)
    settings = defaultdict(list)
    for record, setting in _settings(kept).items():
        settings[setting].append(record)
    groups = []
    for setting, found in sorted(settings.items(), key=lambda item: (item[0].dataset, -item[0].increment, item[0])):
        trials = [Comparison(found)]  # trials of a search are compared, whichever keys they vary
        parts = trials if setting.validation_split else _comparisons(found, variant_of)
        groups += [Group(setting, part, variant_of, options) for part in parts]
    names = dataset_names((group.setting.dataset for group in groups), options.labels)
    for group in groups:
        group.dataset_name = names[group.setting.dataset]
        group.only_tuning = sum(bool(setting.validation_split) for setting in settings) < 2
    number_slugs(groups)
    return groups, problems


def number_slugs(groups: Iterable[Any]) -> None:
    """Give groups with the same ``slug`` different ones, by setting their ``number``."""
    slugs: Counter[str] = Counter()
    for group in groups:
        slugs[group.slug] += 1
        group.number = slugs[group.slug]


def _settings(records: Iterable[Record]) -> dict[Record, Setting]:
    """The setting of each run.

    Data sets with the same hash are the same under any path. Runs that did not record a hash are grouped with runs of
    the same path that did.
    """
    contents: dict[str, set[str]] = defaultdict(set)
    first: dict[str, str] = {}
    for record in records:
        if content := _content(record):
            first.setdefault(content, record.dataset)
            contents[record.dataset].add(content)
    settings = {}
    for record in records:
        config, known = record.config, contents[record.dataset]
        content = _content(record) or (next(iter(known)) if len(known) == 1 else "")
        settings[record] = Setting(
            first.get(content) or record.dataset,
            *record.split,
            config["convnet_type"],
            config["fixed_memory"],
            config.get("validation_split") or 0.0,
            content,
            tuple((name, json.dumps(value)) for name, value in record.part.items()),
        )
    return settings


def _content(record: Record) -> str:
    data = record.data.get("data")
    return str(data.get("sha256", "")) if isinstance(data, dict) else ""


# ---- comparisons -----------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Runs of a setting that form a group; the fields are those of :class:`Group`."""

    records: list[Record]
    conditions: Mapping[str, Any] = {}
    variants_of: Sequence[str] = ()


def _comparisons(records: list[Record], variant_of: Variants) -> list[Comparison]:
    """Divide a setting's runs into groups that may be compared.

    The runs of a group share the schedule and every key that is not specific to a method. If only one method was
    trained with certain values of these, all its runs form another group.
    """
    schedule = _schedules(records)
    shared = {name for record in records for name in record.identity.shared if name not in Setting._fields}
    values = {name: {json.dumps(variant_of[record].get(name)) for record in records} for name in shared}
    varying = in_order(name for name in shared if len(values[name]) > 1)
    members: dict[tuple[tuple[int, int], Hashable], list[Record]] = defaultdict(list)
    for record in records:
        condition = tuple(json.dumps(variant_of[record].get(name)) for name in varying)
        members[schedule[record], condition].append(record)
    if len(members) == 1:
        return [Comparison(records)]
    together = {key: found for key, found in members.items() if len({record.method for record in found}) > 1}
    groups = []
    for (epochs, _), found in sorted(together.items(), key=lambda item: -len(item[1])):
        conditions = dict(zip(SCHEDULE, epochs)) if len(set(schedule.values())) > 1 else {}
        conditions |= {name: variant_of[found[0]].get(name) for name in varying}
        groups.append(Comparison(found, conditions))
    keys = set(distinguishing_keys([group.conditions for group in groups], set()))
    groups = [group._replace(conditions={k: v for k, v in group.conditions.items() if k in keys}) for group in groups]
    alone = {record.method for key, found in members.items() if key not in together for record in found}
    rest = [record for record in records if record.method in alone]
    return [*groups, Comparison(rest, variants_of=sorted(alone, key=method_rank))] if rest else groups


def _schedules(records: list[Record]) -> dict[Record, tuple[int, int]]:
    """The schedule that each run's is taken for.

    Methods have their own epochs, so schedules differ only where one method has several. Then those of the method with
    the most schedules count. Each other run joins the first of them that has the same epochs, the same share of the
    paper's epochs, or the same epochs for the first task.
    """
    own = {record: (record.config["init_epoch"], record.config["epochs"]) for record in records}
    by_method: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for record, epochs in own.items():
        by_method[record.method][epochs] += 1
    anchor = max(by_method, key=lambda method: (len(by_method[method]), sum(by_method[method].values())))
    known = sorted(by_method[anchor], reverse=True)
    if len(known) == 1:
        return dict.fromkeys(records, known[0])

    def taken_for(method: str, epochs: tuple[int, int]) -> tuple[int, int]:
        share = paper.share_of_schedule(method, epochs)
        tests: list[Callable[[tuple[int, int]], bool]] = [
            lambda other: other == epochs,
            lambda other: share is not None and share == paper.share_of_schedule(anchor, other),
            lambda other: other[0] == epochs[0],
        ]
        return next((other for test in tests for other in known if test(other)), epochs)

    return {record: taken_for(record.method, epochs) for record, epochs in own.items()}


# ---- names -----------------------------------------------------------------------------------------------------------


def distinct_names(
    records: Iterable[Record],
    base: Callable[[Record], str | None],
    variant_of: Variants,
    studied: Iterable[str] = (),
    brief: bool = False,
) -> dict[Record, str]:
    """``{record: name}``: the ``base`` name and the keys that distinguish runs with the same base name.

    Records for which ``base`` returns None are left out. ``brief``: omit values of the paper's method if the names
    remain distinct.
    """
    alike: dict[str, dict[Hashable, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if (name := base(record)) is not None:
            alike[name][variant_of[record].frozen].append(record)
    names, studied = {}, set(studied)
    for name, members in alike.items():
        first = [found[0] for found in members.values()]
        keys = distinguishing_keys([variant_of[record] for record in first], studied)
        wanted = [{*keys, *changed_keys(record) - studied} & variant_of[record].keys() for record in first]
        shown = [{k: variant_of[r].get(k) for k in in_order(keys)} for r, keys in zip(first, wanted)]
        shorter = [{k: v for k, v in each.items() if k not in STUDIED or v != STUDIED[k]} for each in shown]
        if brief and len({frozenset(map(str, each.items())) for each in shorter}) == len(shorter):
            shown = shorter
        for found, each in zip(members.values(), shown):
            text = " ".join([name, *(f"{key}={_as_text(value)}" for key, value in each.items())])
            names |= dict.fromkeys(found, text)
    return names


def distinguishing_keys(variants: Sequence[Mapping[str, Any]], skipped: set[str]) -> list[str]:
    """The keys that distinguish the variants, chosen greedily :func:`in_order`."""
    keys: list[str] = []
    parts: list[tuple[str, ...]] = [()] * len(variants)
    for name in in_order({name for variant in variants for name in variant}):
        if name in skipped:
            continue
        values = [json.dumps(variant.get(name)) for variant in variants]
        finer = [(*part, value) for part, value in zip(parts, values)]
        if len(set(finer)) > len(set(parts)):
            keys, parts = [*keys, name], finer
    return keys


def in_order(names: Iterable[str]) -> list[str]:
    """Keys in the order in which names of runs have them, whichever order their configurations have.

    Keys on which values of other keys depend come first, so that runs with two optimisers, each with its own learning
    rates, are told apart by the optimiser too. Then come the keys of the paper's studies, those of the first task, and
    all others, each by name.
    """
    first = [*LEADING, *STUDIED, *OF_FIRST_TASK]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name))


def _custom_names(records: Iterable[Record], variant_of: Variants) -> dict[Hashable, str]:
    """The first name set by ``label`` in the configurations of each variant: ``{(method, variant): name}``."""
    names: dict[Hashable, str] = {}
    for record in records:
        if own := _label_of(record):
            names.setdefault((record.method, variant_of[record].frozen), own)
    return names


def _label_of(record: Record) -> str:
    """The name set by ``label`` in the run's configuration, or ""."""
    own = record.config.get("label")
    return clean(own) if isinstance(own, str) else ""


def studied_value(record: Record, name: str) -> Any:
    """The value of a studied key. Random exemplars count as the paper's value: its studies do not vary this."""
    value = STUDIED[name] if (own := record.config.get(name)) is None else own
    if (name, value) == ("exemplars", "random"):
        return STUDIED[name]
    return value if isinstance(value, Hashable) else json.dumps(value)


def changed_keys(record: Record) -> set[str]:
    """The studied keys in which ``record`` differs from the paper's method."""
    return {name for name, value in STUDIED.items() if studied_value(record, name) != value}


def method_rank(method: str) -> tuple[Any, ...]:
    """A sort key for the paper's order: expanding methods, then the others, with consolidated ones and WSC last."""
    base = method.removesuffix("+wsc")
    return (ORDER.index(base) if base in ORDER else len(ORDER), method != base, method)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _slug(text: str, longest: int = 60) -> str:
    """``text`` as part of a file name."""
    return re.sub(r"[^\w.=-]+", "-", text, flags=re.ASCII).strip("-.")[-longest:]
