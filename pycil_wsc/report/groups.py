"""Groups of runs that may be compared, and the names of their rows."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

import pandas as pd

from pycil_wsc.errors import UserError, described, one_line
from pycil_wsc.report.comparable import Comparison, Setting, comparisons
from pycil_wsc.report.duplicates import Variant
from pycil_wsc.report.rows import PAPER, SCHEDULES, rows_of
from pycil_wsc.report.studies import STUDIES, Study
from pycil_wsc.report.texts import as_text, dataset_names, method_name, method_rank, texts
from pycil_wsc.results import Problem, Record
from pycil_wsc.results.identity import STUDIED, distinguishing_keys, in_order

LONGEST_PART = 30  # characters of a part of a file name, which is seen in papers and terminals
LONGEST_SLUG = 80  # characters of a file name


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


class Group:
    """Runs that may be compared: they differ only in the method and in the keys that a study varies.

    ``rows``: their table of rows, with the name of each run's method or label as ``own``, and whether it is one of the
    ``main`` runs, which no study shows. ``reference``: the paper's numbers. ``conditions``: keys for which the
    setting's other groups have other values. ``variants_of``: methods that have variants without a counterpart in any
    other method; their group holds all their runs and has no conditions. ``only_tuning``: no other setting has trials.
    ``failed``: tables and figures with an error, and the error.
    """

    def __init__(self, comparison: Comparison, dataset: str, options: Options) -> None:
        setting = comparison.setting
        self.options = options
        self.setting = setting
        self.conditions = comparison.conditions
        self.variants_of = sorted(comparison.variants_of, key=method_rank)
        self.only_tuning = True
        self.failed: list[Problem] = []
        self.rows = rows_of(comparison.variants)
        self.records: list[Record] = list(self.rows["record"])
        # runs that differ in the seed alone have one label, that of the last seed
        alike = self.rows.groupby(["learner", "frozen", "memory"])
        self.rows["label"] = cast(pd.Series, alike["label"].transform("last"))
        self.labels = set(self.rows["label"].dropna())
        of_variant = cast(pd.Series, self.rows.groupby(["learner", "frozen"])["label"].transform("first"))
        self.rows["own"] = self.rows["label"].fillna(of_variant).fillna(self.rows["learner"])
        learners = cast(pd.Series, self.rows.groupby("own")["learner"].transform("nunique"))
        self.rows["own"] = self.rows["own"].where(learners < 2, self.rows["own"] + " (" + self.rows["learner"] + ")")
        self.rows["main"] = self._shown_in_no_study()
        model = one_line(setting.convnet_type)
        self.tasks = [one_line(task) for task in setting.tasks]
        self.reference = _papers_numbers(setting) if options.paper and not self.variants_of else {}
        self.memory_title = "exemplars per class" if setting.fixed_memory else "exemplars in total"
        self.slug = self._slug()
        if setting.tasks:
            self.memory_title = "% of each earlier task replayed"
            dataset = method_name(dataset, options.labels)
            model = method_name(model, options.labels)
        tasks = Counter(len(record.curve) for record in self.records).most_common(1)[0][0]
        variants_of = [self.shown(method) for method in self.variants_of]
        (self.title,) = texts("title", setting, dataset, model, tasks, self.conditions, variants_of)

    def rows_in(self, study: Study) -> pd.DataFrame:
        """The study's runs with their ``entry`` and, as ``corner``, its name, in order; none if all are plain."""
        rows = self.rows.loc[self.rows["main"]] if study.main else self.rows
        entries = [study.row(record) for record in rows["record"]]
        if not set(entries) - {None, *study.plain}:
            entries = [None] * len(entries)  # plain rows alone make no table
        names = zip(entries, rows["learner"], rows["own"])
        base = [name if entry == method else entry for entry, method, name in names]
        rows = self.named(rows.assign(entry=entries, base=base), study.corner, "base", study.studied)
        place = {entry: number for number, entry in enumerate(study.in_order(set(rows["entry"])))}
        return rows.sort_values("entry", key=lambda entries: entries.map(place).fillna(len(place)), kind="stable")

    def _shown_in_no_study(self) -> list[bool]:
        """For each run, whether it is in no study, or has the usual values of all studied keys.

        The usual value is the paper's or, if no run of the method has it, the most frequent one.
        """
        values: dict[tuple[str, str], Counter[Any]] = defaultdict(Counter)
        for record in self.records:
            for name in STUDIED.keys() & record.config.keys():
                values[record.method, name][record.studied(name)] += 1
        usual = {}
        for (method, name), counts in values.items():
            usual[method, name] = STUDIED[name] if STUDIED[name] in counts else counts.most_common(1)[0][0]
        flags = []
        for record in self.records:
            varied = STUDIED.keys() & record.config.keys()
            is_usual = all(record.studied(name) == usual[record.method, name] for name in varied)
            shown = [study for study in STUDIES if not study.main and study.row(record) not in (None, *study.plain)]
            flags.append(is_usual or not shown)
        return flags

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
        names: dict[Hashable, str] = {}  # index of a row -> its name
        for name, alike in rows.groupby(base, sort=False):
            runs = [repeats for _, repeats in alike.groupby("frozen", sort=False)]
            distinguishing = distinguishing_keys([repeats["variant"].iloc[0] for repeats in runs], studied)
            whole = []
            shorter = []
            for repeats in runs:
                variant = repeats["variant"].iloc[0]
                changed = repeats["changed"].iloc[0]
                keys = in_order({*distinguishing, *changed.difference(studied)} & variant.keys())
                told = [key for key in keys if key not in STUDIED or variant[key] != STUDIED[key]]
                whole.append(_with_keys(str(name), variant, keys))
                shorter.append(_with_keys(str(name), variant, told))
            distinct = len(set(shorter)) == len(shorter)
            for repeats, text in zip(runs, shorter if brief and distinct and not self.tasks else whole):
                names |= dict.fromkeys(repeats.index, text)
        return rows.loc[list(names)].assign(**{column: list(names.values())})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A context in which an error is noted in ``failed``, so that the rest of the report is written."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.failed.append((f"{what} of {self.title}", described(error)))

    def shown(self, name: str) -> str:
        """The display name of a row or line."""
        if any(name == label or name.startswith(f"{label} ") for label in self.labels):
            return one_line(name)
        return method_name(name, self.options.labels)

    def _slug(self) -> str:
        """The part of file names that identifies the group."""
        setting = self.setting
        if setting.tasks:
            return file_name([setting.dataset, _last_of(setting.convnet_type), str(len(setting.tasks))])
        split = f"b{setting.init_cls}-inc{setting.increment}" if setting.increment else "tasks"
        if setting.increments or setting.domains:
            split = "-".join(map(str, setting.increments or setting.domains))
        parts = [_last_of(setting.dataset).removesuffix(".npz"), split, setting.convnet_type]
        if not setting.fixed_memory:
            parts.append("total")
        if setting.validation_split:
            parts.append(f"validation{100 * setting.validation_split:g}")
        if self.variants_of:
            parts.append("variants")
        return file_name(parts, dict([*setting.part, *self.conditions.items()]))


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


def file_name(parts: Sequence[str], keys: Mapping[str, object] | None = None) -> str:
    """A readable name of files: ``parts``, then ``keys`` with their values.

    Long parts end after a word, long values are left out, and so are the keys for which there is no more room. If
    something is missing, a hash of the whole ends the name.
    """
    whole = [slug for slug in map(_as_slug, parts) if slug]
    kept = "-".join(map(_up_to_a_word, whole))
    for key, value in (keys or {}).items():
        with_value = _as_slug(key + as_text(value))
        whole.append(with_value)
        shown = with_value if len(with_value) <= LONGEST_PART else _up_to_a_word(_as_slug(key))
        kept += f"-{shown}" if len(kept) + len(shown) < LONGEST_SLUG else ""
    complete = "-".join(whole)
    return kept if kept == complete else f"{kept}-{hashlib.sha256(complete.encode()).hexdigest()[:8]}"


def _as_slug(text: str) -> str:
    """``text`` with the characters that file names may have."""
    return re.sub(r"[^\w.=-]+", "-", text, flags=re.ASCII).strip("-.")


def _up_to_a_word(slug: str) -> str:
    """The words of ``slug`` that fit into ``LONGEST_PART``; a longer first word is cut."""
    if len(slug) <= LONGEST_PART:
        return slug
    words = re.match(rf".{{1,{LONGEST_PART}}}(?=[-_.])", slug)
    return words[0].rstrip("-_.") if words else slug[:LONGEST_PART]


def _last_of(path: str) -> str:
    """The last part of a path, such as that of a data set; anything else is returned as it is."""
    return PurePath(path.partition(":")[2] or path).name or path


def group_runs(records: Iterable[Record], options: Options = DEFAULT) -> tuple[list[Group], list[Problem]]:
    """The groups of runs that may be compared, and the duplicate results that were left out."""
    compared, problems = comparisons(records, SCHEDULES)
    settings = [comparison.setting for comparison in compared]
    shown = dataset_names([setting.dataset for setting in settings if not setting.tasks], options.labels)
    searched = {setting for setting in settings if setting.validation_split}
    slugs: Counter[str] = Counter()
    groups: list[Group] = []
    for comparison in compared:
        setting = comparison.setting
        dataset = one_line(setting.dataset) if setting.tasks else shown[setting.dataset]
        group = Group(comparison, dataset, options)
        group.only_tuning = len(searched) < 2
        slugs[group.slug] += 1
        if slugs[group.slug] > 1:
            group.slug += f"-{slugs[group.slug]}"
        groups.append(group)
    titles = Counter(group.title for group in groups)
    for group in groups:
        if titles[group.title] > 1 and group.setting.data:  # the files under one path have changed
            group.title += f", data {group.setting.data[:8]}"
    return groups, problems
