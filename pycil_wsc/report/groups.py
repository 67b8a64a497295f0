"""Runs that may be compared: one setting, one way of training; and the names that tell them apart."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pycil_wsc.config.options import KEYS
from pycil_wsc.report import paper
from pycil_wsc.report.identity import MEMORY, Variant, distinct, variants
from pycil_wsc.report.names import clean, dataset_names, method_name
from pycil_wsc.report.options import USUAL, Options
from pycil_wsc.report.runs import STUDIED, Problem, Record

ORDER = ["der", "foster", "memo", "finetune", "replay", "icarl", "bic", "wa", "joint", "wsc"]
SCHEDULE = ("init_epoch", "epochs")
# keys for which methods have their own defaults: a difference in them is part of the method, not of the comparison
OF_THE_METHOD = {
    *("init_milestones", "init_weight_decay", "milestones", "weight_decay", "scheduler", "nme"),
}


class Setting(NamedTuple):
    """What runs must share to stand in one table. ``fixed_memory``: memory is counted per class, otherwise in all.

    Of a stream of tasks, ``dataset`` is the first, and ``init_cls`` and ``increment`` are 0.
    """

    dataset: str
    init_cls: int
    increment: int
    convnet_type: str
    fixed_memory: bool
    validation_split: float  # the share of the training data that was tested on in place of the test set
    data: str  # a hash of the data's content, "" where no run recorded it


Variants = Mapping[Record, Variant]


class Group:
    """Runs of one setting that may be compared: their training differs in the method alone, and in what a study varies.

    ``conditions``: keys for which the setting's other groups have other values. ``variants_of``: methods that were
    trained in ways in which no other method was; a group of them holds all their runs and has no conditions.
    """

    def __init__(
        self,
        setting: Setting,
        comparison: Comparison,
        variant_of: Variants,
        options: Options = USUAL,
    ) -> None:
        self.setting, self.variant_of, self.options = setting, variant_of, options
        records, self.conditions, self.variants_of = comparison
        self.records = sorted(records, key=lambda record: (method_rank(record.method), record.memory, record.seed))
        self.dataset_name, self.number, self.alone = clean(setting.dataset), 1, True
        self.usual = {name: self._usual(name) for name in STUDIED}
        self.reference = paper.tables(setting) if options.paper and not self.variants_of else {}
        self.own_names = _own_names(self.records, variant_of)

    def _usual(self, name: str) -> Hashable:
        """The paper's value where there is a run with it, else the value that most runs have."""
        values = Counter(position(record, name) for record in self.records if name in record.config)
        return STUDIED[name] if STUDIED[name] in values or not values else values.most_common(1)[0][0]

    def deviations(self, record: Record) -> set[str]:
        """The studied keys in which ``record`` is not as usual."""
        return {name for name in STUDIED if name in record.config and position(record, name) != self.usual[name]}

    def base(self) -> list[Record]:
        """The runs that belong to no study: what the main tables and figures show."""
        return [record for record in self.records if not self.deviations(record)]

    def names(
        self, records: Iterable[Record], base: Callable[[Record], str | None] | None = None, studied: Iterable[str] = ()
    ) -> dict[Record, str]:
        """``{record: name}``: the ``base`` name, and the keys that tell apart runs of one base name.

        Without ``base``, the base name is the label in the run's configuration, or its method. ``studied`` keys are
        already in the base name.
        """
        return label(records, base or self.name_of, self.variant_of, studied, brief=True)

    def name_of(self, record: Record) -> str:
        return self.own_names.get((record.method, self.variant_of[record].frozen), record.method)

    def shown(self, name: str) -> str:
        """A row's or line's name as a reader sees it."""
        if any(name == own or name.startswith(f"{own} ") for own in self.own_names.values()):
            return clean(name)
        return method_name(name, self.options.labels)

    def rest(self, record: Record, studied: Iterable[str]) -> Hashable:
        """What decides the result beside the ``studied`` keys, the method, the memory size and the seed."""
        return Variant((name, value) for name, value in self.variant_of[record].items() if name not in studied).frozen

    @property
    def slug(self) -> str:
        """Names the files of the group."""
        share = 100 * self.setting.validation_split
        dataset, convnet = (_slug(name) for name in (self.setting.dataset, self.setting.convnet_type))
        split = f"b{self.setting.init_cls}-inc{self.setting.increment}" if self.setting.increment else "tasks"
        parts = [f"{dataset}-{split}-{convnet}"]
        parts += ["" if self.setting.fixed_memory else "-total", f"-validation{share:g}" if share else ""]
        parts += [f"-{_slug(f'{name}{_plain(value)}', 40)}" for name, value in self.conditions.items()]
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
        parts += [f"tested on {share:g} % held out of the training data"] if share else []
        parts += [f"{name}={clean(_plain(value))}" for name, value in self.conditions.items()]
        parts += [f"variants of {', '.join(map(self.shown, self.variants_of))}"] if self.variants_of else []
        return ", ".join(parts)

    @property
    def memory_title(self) -> str:
        return "exemplars per class" if self.setting.fixed_memory else "exemplars in all"


def group_runs(records: Iterable[Record], options: Options = USUAL) -> tuple[list[Group], list[Problem]]:
    """The groups of runs that may be compared, and the results that were left out because they are there already."""
    variant_of = variants(records)
    kept, problems = distinct(variant_of)
    settings = defaultdict(list)
    for record, setting in _settings(kept).items():
        settings[setting].append(record)
    groups = []
    for setting, found in sorted(settings.items(), key=lambda item: (item[0].dataset, -item[0].increment, item[0])):
        one = [Comparison(found)]  # to choose among trials, whatever they vary
        parts = one if setting.validation_split else _comparisons(found, variant_of)
        groups += [Group(setting, part, variant_of, options) for part in parts]
    names = dataset_names((group.setting.dataset for group in groups), options.labels)
    slugs: Counter[str] = Counter()
    for group in groups:
        group.dataset_name = names[group.setting.dataset]
        group.alone = sum(bool(setting.validation_split) for setting in settings) < 2
        slugs[group.slug] += 1
        group.number = slugs[group.slug]
    return groups, problems


def _settings(records: Iterable[Record]) -> dict[Record, Setting]:
    """Each run's setting.

    Data with the same content are the same under every path. Runs that did not record a hash of the content are grouped
    with those that did.
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
        )
    return settings


def _content(record: Record) -> str:
    data = record.data.get("data")
    return str(data.get("sha256", "")) if isinstance(data, dict) else ""


# ---- what may be compared --------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Runs of a setting that stand together, and why: see :class:`Group`."""

    records: list[Record]
    conditions: Mapping[str, Any] = {}
    variants_of: Sequence[str] = ()


def _comparisons(records: list[Record], variant_of: Variants) -> list[Comparison]:
    """What of a setting's runs may be compared.

    The runs of a group share the schedule and every key that is not specific to a method. If only one method was
    trained in some way, its runs form a further group together with all its other runs.
    """
    schedule = _schedules(records)
    shared = {name for record in records for name in variant_of[record] if _is_shared(name)}
    values = {name: {json.dumps(variant_of[record].get(name)) for record in records} for name in shared}
    varying = [name for name in variant_of[records[0]] if name in shared and len(values[name]) > 1]
    members: dict[tuple[tuple[int, int], Hashable], list[Record]] = defaultdict(list)
    for record in records:
        way = tuple(json.dumps(variant_of[record].get(name)) for name in varying)
        members[schedule[record], way].append(record)
    if len(members) == 1:
        return [Comparison(records)]
    together = {key: found for key, found in members.items() if len({record.method for record in found}) > 1}
    groups = []
    for (epochs, _), found in sorted(together.items(), key=lambda item: -len(item[1])):
        conditions = dict(zip(SCHEDULE, epochs)) if len(set(schedule.values())) > 1 else {}
        conditions |= {name: variant_of[found[0]].get(name) for name in varying}
        groups.append(Comparison(found, conditions))
    told = set(telling_keys([group.conditions for group in groups], set()))
    groups = [group._replace(conditions={k: v for k, v in group.conditions.items() if k in told}) for group in groups]
    alone = {record.method for key, found in members.items() if key not in together for record in found}
    rest = [record for record in records if record.method in alone]
    return [*groups, Comparison(rest, variants_of=sorted(alone, key=method_rank))] if rest else groups


def _is_shared(name: str) -> bool:
    """Whether runs that differ in this key cannot be compared, whatever their methods."""
    own = name.startswith("wsc.") or name in OF_THE_METHOD or name in MEMORY or name not in KEYS
    return not own and name not in STUDIED and name not in SCHEDULE and name not in Setting._fields


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


def label(
    records: Iterable[Record],
    base: Callable[[Record], str | None],
    variant_of: Variants,
    studied: Iterable[str] = (),
    brief: bool = False,
) -> dict[Record, str]:
    """``{record: name}``: the ``base`` name, and the keys that tell apart runs with the same base name.

    Records for which ``base`` returns None are left out. ``brief``: what the paper's method has goes without saying.
    """
    alike: dict[str, dict[Hashable, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if (name := base(record)) is not None:
            alike[name][variant_of[record].frozen].append(record)
    names, studied = {}, set(studied)
    for name, members in alike.items():
        first = [found[0] for found in members.values()]
        keys = telling_keys([variant_of[record] for record in first], studied)
        wanted = [{*keys, *unusual(record) - studied} for record in first]
        told = [{k: v for k, v in variant_of[r].items() if k in shown} for r, shown in zip(first, wanted)]
        shorter = [{k: v for k, v in each.items() if k not in STUDIED or v != STUDIED[k]} for each in told]
        if brief and len({frozenset(map(str, each.items())) for each in shorter}) == len(shorter):
            told = shorter
        for found, each in zip(members.values(), told):
            text = " ".join([name, *(f"{key}={_plain(value)}" for key, value in each.items())])
            names |= dict.fromkeys(found, text)
    return names


def telling_keys(variants: Sequence[Mapping[str, Any]], skipped: set[str]) -> list[str]:
    """The fewest keys, in the configuration's order, that tell the variants apart."""
    keys: list[str] = []
    parts: list[tuple[str, ...]] = [()] * len(variants)
    for name in dict.fromkeys(name for variant in variants for name in variant):
        if name in skipped:
            continue
        values = [json.dumps(variant.get(name)) for variant in variants]
        finer = [(*part, value) for part, value in zip(parts, values)]
        if len(set(finer)) > len(set(parts)):
            keys, parts = [*keys, name], finer
    return keys


def _own_names(records: Iterable[Record], variant_of: Variants) -> dict[Hashable, str]:
    """The names that ``label`` in a configuration gives: ``{(method, variant): name}``."""
    names: dict[Hashable, str] = {}
    for record in records:
        if isinstance(own := record.config.get("label"), str) and own:
            names.setdefault((record.method, variant_of[record].frozen), clean(own))
    return names


def position(record: Record, name: str) -> Any:
    """The value of a studied key; exemplars chosen at random are no study of the paper."""
    value = STUDIED[name] if (own := record.config.get(name)) is None else own
    if (name, value) == ("exemplars", "random"):
        return STUDIED[name]
    return value if isinstance(value, Hashable) else json.dumps(value)


def unusual(record: Record) -> set[str]:
    """The studied keys in which ``record`` is not as the paper's method is."""
    return {name for name, value in STUDIED.items() if position(record, name) != value}


def method_rank(method: str) -> tuple[Any, ...]:
    """The paper's order: expanding methods first, then the others, consolidated ones and WSC last."""
    base = method.removesuffix("+wsc")
    return (ORDER.index(base) if base in ORDER else len(ORDER), method != base, method)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _slug(text: str, longest: int = 60) -> str:
    """``text`` as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "-", text, flags=re.ASCII).strip("-.")[-longest:]
