"""Groups of runs that may be compared: of one setting, with the same schedule and keys that no method chooses."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pandas as pd

from pycil_wsc.report import names
from pycil_wsc.report.names import STUDIED, as_text, clean, in_order, method_name, method_rank, studied_value
from pycil_wsc.report.rows import PAPER, rows_of
from pycil_wsc.report.texts import texts
from pycil_wsc.results import LanguageResult, Problem, Record
from pycil_wsc.results.duplicates import Variant, distinct, variants

Variants = Mapping[Record, Variant]
Comparison = tuple[list[Record], Mapping[str, object], Sequence[str]]  # records, conditions, variants_of of a group


@dataclass(frozen=True)
class Options:
    """Options of a report."""

    spread: str = "se"  # what ± and error bars show: the standard error of the mean, or the standard deviation (sd)
    baseline: str = "replay"  # the method that the others are compared with over equal seeds
    labels: tuple[tuple[str, str], ...] = ()  # a shell pattern and the display name of methods or data sets it matches
    paper: bool = True  # show the paper's numbers beside ours
    all_figures: bool = False  # also draw the figures that are omitted from the report of a large sweep

    @property
    def spread_name(self) -> str:
        return {"se": "standard error", "sd": "standard deviation"}[self.spread]


DEFAULT = Options()


class Setting(NamedTuple):
    """The values that runs must share to be in one group. ``fixed_memory``: memory is per class, otherwise in total.

    For a stream of tasks, ``dataset`` is the first one, and ``init_cls`` and ``increment`` are 0.
    """

    dataset: str
    init_cls: int
    increment: int
    convnet_type: str  # or the language model
    fixed_memory: bool = True
    validation_split: float = 0.0  # the share of the training data used as test set
    data: str = ""  # a hash of the data, if a run recorded it
    part: tuple[tuple[str, str], ...] = ()  # max_tasks and classes of runs that learn only a part of the data
    tasks: tuple[str, ...] = ()  # of a language model


class Group:
    """Runs that may be compared: they differ only in the method and in the keys that a study varies.

    ``rows``: their table of rows, with the name of each run's method or label as ``own``, and whether it is one of the
    ``main`` runs, which belong to no study. ``reference``: the paper's numbers. ``conditions``: keys for which the
    setting's other groups have other values. ``variants_of``: methods that have variants without a counterpart in any
    other method; their group holds all their runs and has no conditions. ``only_tuning``: no other setting has trials.
    """

    def __init__(
        self, setting: Setting, comparison: Comparison, variant_of: Variants, options: Options, dataset: str
    ) -> None:
        records, self.conditions, self.variants_of = comparison
        self.records = sorted(records, key=lambda record: (method_rank(record.method), record.memory, record.seed))
        self.setting, self.options = setting, options
        self.only_tuning = True
        self.tasks = [clean(task) for task in setting.tasks]
        self.reference = _papers_numbers(setting) if options.paper and not self.variants_of else {}
        self.memory_title = "exemplars per class" if setting.fixed_memory else "exemplars in total"
        self.rows = rows_of(self.records, variant_of)
        self.labels = set(self.rows["label"].dropna())
        of_variant = cast(pd.Series, self.rows.groupby(["learner", "frozen"])["label"].transform("first"))
        self.rows["own"] = self.rows["label"].fillna(of_variant).fillna(self.rows["learner"])
        self.rows["main"] = self._in_no_study()
        self.slug = self._slug()
        tasks = Counter(len(record.curve) for record in self.records).most_common(1)[0][0]
        model = clean(setting.convnet_type)
        if setting.tasks:
            self.memory_title = "% of each earlier task replayed"
            dataset, model = method_name(dataset, options.labels), method_name(model, options.labels)
        variants_of = [self.shown(method) for method in self.variants_of]
        (self.title,) = texts("title", setting, dataset, model, tasks, self.conditions, variants_of)

    def _in_no_study(self) -> list[bool]:
        """Whether a run's studied keys have the paper's values or, where no run has it, the most frequent one."""
        usual = {}
        for name, papers in STUDIED.items():
            values = Counter(studied_value(record, name) for record in self.records if name in record.config)
            usual[name] = papers if papers in values or not values else values.most_common(1)[0][0]
        found = []
        for record in self.records:
            own = [name for name in STUDIED if name in record.config]
            found.append(all(studied_value(record, name) == usual[name] for name in own))
        return found

    def named(
        self,
        rows: pd.DataFrame,
        column: str = "method",
        base: str = "own",
        studied: Collection[str] = (),
        brief: bool = True,
    ) -> pd.DataFrame:
        """``rows`` with a name in a further ``column``, in the order of the names.

        A name is that in the column ``base`` and the keys that distinguish runs with the same one. Rows without a base
        are left out. ``studied`` keys are already in the base. ``brief``: omit values of the paper's method if the
        names remain distinct.
        """
        found: dict[Hashable, str] = {}  # by the index of the row
        for name, alike in rows.groupby(base, sort=False):
            runs = [own for _, own in alike.groupby("frozen", sort=False)]
            distinguishing = names.distinguishing_keys([own["variant"].iloc[0] for own in runs], studied)
            whole, shorter = [], []
            for own in runs:
                variant, changed = own["variant"].iloc[0], own["changed"].iloc[0]
                keys = in_order({*distinguishing, *changed.difference(studied)} & variant.keys())
                told = [key for key in keys if key not in STUDIED or variant[key] != STUDIED[key]]
                whole.append(_with_keys(str(name), variant, keys))
                shorter.append(_with_keys(str(name), variant, told))
            distinct = len(set(shorter)) == len(shorter)
            for own, text in zip(runs, shorter if brief and distinct and not self.tasks else whole):
                found |= dict.fromkeys(own.index, text)
        return rows.loc[list(found)].assign(**{column: list(found.values())})

    def shown(self, name: str) -> str:
        """The display name of a row or line."""
        if any(name == own or name.startswith(f"{own} ") for own in self.labels):
            return clean(name)
        return method_name(name, self.options.labels)

    def _slug(self) -> str:
        """The part of file names that identifies the group."""
        setting = self.setting
        if setting.tasks:
            return _as_slug(f"{clean(setting.dataset)}-{clean(setting.convnet_type)}-{len(setting.tasks)}", 80)
        split = f"b{setting.init_cls}-inc{setting.increment}" if setting.increment else "tasks"
        parts = [_as_slug(setting.dataset), split, _as_slug(setting.convnet_type)]
        if not setting.fixed_memory:
            parts.append("total")
        if setting.validation_split:
            parts.append(f"validation{100 * setting.validation_split:g}")
        for name, value in [*setting.part, *self.conditions.items()]:
            parts.append(_as_slug(name + as_text(value), 40))
        if self.variants_of:
            parts.append("variants")
        return "-".join(parts)


def _papers_numbers(setting: Setting) -> dict[str, Any]:
    """The paper's numbers of a setting: ``{study: {row: {memory: ...}}}``; empty if the paper has none."""
    if setting.tasks:
        same = list(setting.tasks) == PAPER["trace"]["tasks"] and "Llama-3.2" in setting.convnet_type
        return PAPER["trace"]["scores"] if same else {}
    usual = setting.fixed_memory and not setting.validation_split and not setting.part
    same = usual and PAPER["backbones"].get(setting.dataset) == setting.convnet_type
    return PAPER["tables"].get(f"{setting.dataset}-b{setting.init_cls}-inc{setting.increment}", {}) if same else {}


def _with_keys(name: str, variant: Variant, keys: Iterable[str]) -> str:
    return " ".join([name, *(f"{key}={as_text(variant[key])}" for key in keys)])


def _as_slug(text: str, longest: int = 60) -> str:
    """``text`` as part of a file name."""
    return re.sub(r"[^\w.=-]+", "-", text, flags=re.ASCII).strip("-.")[-longest:]


# ---- of which runs the groups are ------------------------------------------------------------------------------------


def group_runs(records: Iterable[Record], options: Options = DEFAULT) -> tuple[list[Group], list[Problem]]:
    """The groups of runs that may be compared, and the duplicate results that were left out."""
    variant_of = variants(records)
    settings: dict[Setting, list[Record]] = defaultdict(list)
    for record, setting in _settings(variant_of).items():
        settings[setting].append(record)
    ordered = sorted(settings, key=lambda setting: (bool(setting.tasks), setting.dataset, -setting.increment, setting))
    shown = names.dataset_names([setting.dataset for setting in ordered if not setting.tasks], options.labels)
    searched = sum(bool(setting.validation_split) for setting in ordered)
    slugs: Counter[str] = Counter()
    groups: list[Group] = []
    problems: list[Problem] = []
    for setting in ordered:
        found, duplicates = distinct({record: variant_of[record] for record in settings[setting]})
        problems += duplicates
        whole = setting.validation_split or setting.tasks  # trials are compared, whichever keys they vary
        for comparison in [(found, {}, ())] if whole else _comparisons(found, variant_of):
            dataset = clean(setting.dataset) if setting.tasks else shown[setting.dataset]
            group = Group(setting, comparison, variant_of, options, dataset)
            group.only_tuning = searched < 2
            slugs[group.slug] += 1
            if slugs[group.slug] > 1:
                group.slug += f"-{slugs[group.slug]}"
            groups.append(group)
    return groups, problems


def _settings(records: Iterable[Record]) -> dict[Record, Setting]:
    """The setting of each run.

    Data sets with the same hash are the same under any path. Runs that did not record a hash are grouped with runs of
    the same path that did.
    """
    contents: dict[str, set[str]] = defaultdict(set)
    first: dict[str, str] = {}
    settings = {}
    for record in records:
        content = _content(record)
        if content and not isinstance(record.result, LanguageResult):
            first.setdefault(content, record.dataset)
            contents[record.dataset].add(content)
    for record in records:
        config = record.config
        if isinstance(record.result, LanguageResult):
            data, model = config["llm.data"], config["llm.model"]
            settings[record] = Setting(data, 0, 0, model, tasks=tuple(record.data["tasks"]))
            continue
        known = contents[record.dataset]
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


def _comparisons(records: list[Record], variant_of: Variants) -> list[Comparison]:
    """Divide a setting's runs into groups that may be compared.

    The runs of a group share the schedule and every key that is not specific to a method. If only one method was
    trained with certain values of these, all its runs form another group.
    """
    schedule = _schedules(records)
    shared = {name for record in records for name in record.identity.shared if name not in Setting._fields}
    conditions: dict[Record, dict[str, object]] = {}
    members: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        conditions[record] = dict(zip(("init_epoch", "epochs"), schedule[record]))
        conditions[record] |= {name: variant_of[record].get(name) for name in in_order(shared)}
        members[json.dumps(conditions[record])].append(record)
    if len(members) == 1:
        return [(records, {}, ())]
    several: list[list[Record]] = []
    alone: set[str] = set()
    for found in sorted(members.values(), key=lambda found: -len(found)):
        methods = {record.method for record in found}
        if len(methods) == 1:
            alone |= methods
        else:
            several.append(found)
    keys = names.distinguishing_keys([conditions[found[0]] for found in several])
    told: list[Comparison] = []
    for found in several:
        told.append((found, {key: value for key, value in conditions[found[0]].items() if key in keys}, ()))
    rest = [record for record in records if record.method in alone]
    return [*told, (rest, {}, sorted(alone, key=method_rank))] if rest else told


def _schedules(records: list[Record]) -> dict[Record, tuple[int, int]]:
    """The schedule that each run's is taken for: its epochs for the first task and for later ones.

    Methods have their own epochs, so schedules differ only where one method has several. Then those of the method with
    the most schedules count. Each other run joins the first of them that has the same epochs, the same share of the
    paper's epochs, or the same epochs for the first task.
    """
    own = {record: (record.config["init_epoch"], record.config["epochs"]) for record in records}
    by_method: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for record, epochs in own.items():
        by_method[record.method][epochs] += 1
    anchor = max(by_method, key=lambda method: (len(by_method[method]), by_method[method].total()))
    known = sorted(by_method[anchor], reverse=True)
    if len(known) == 1:
        return dict.fromkeys(records, known[0])

    def share(method: str, epochs: tuple[int, int]) -> tuple[float, float] | str:
        first, later = PAPER["schedules"].get(method.removesuffix("+wsc"), (0, 0))
        return (epochs[0] / first, epochs[1] / later) if first else method

    taken = {}
    for record, epochs in own.items():
        same = [other for other in known if other == epochs]
        same += [other for other in known if share(anchor, other) == share(record.method, epochs)]
        same += [other for other in known if other[0] == epochs[0]]
        taken[record] = same[0] if same else epochs
    return taken
