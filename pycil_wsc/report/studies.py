"""The paper's tables. A run's row in each is determined by its configuration; ``studies.json`` declares them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pycil_wsc.report.texts import data_file
from pycil_wsc.results import Record

WITHOUT = " without averaging"


@dataclass(frozen=True)
class Study:
    """A table of average accuracies, with a row for each name that :meth:`row` gives to a run."""

    slug: str
    title: str
    corner: str = "method"  # the heading of the rows, which are methods or the values of this key
    rows: Mapping[str, list[object]] = field(default_factory=dict)  # or these: the method and its changed keys
    number: str = "{:g}"  # the form of a value that is a number
    methods: Sequence[str] = ()  # the methods that the study compares; empty: all
    main: bool = False  # whether its runs are those of no study, which may change any key
    studied: Sequence[str] = ()  # keys that its runs may change
    changed: Mapping[str, object] = field(default_factory=dict)  # keys that its runs must change, and to what
    most: int = 9  # keys that a run may change at once
    with_memory: bool = True  # whether its runs have exemplars
    options: Sequence[str] = ()  # further keys that apply to some of the rows only
    without: Sequence[str] = ()  # rows that it does not have
    plain: Sequence[str] = ()  # rows that do not make a study without others
    order: Sequence[str] = ()  # the order of the rows; others follow
    note: str = ""
    costs: str = ""  # the kind of measures that it also has, over all memory sizes

    def row(self, record: Record) -> str | None:
        """The row of a run: None, a method, one of ``rows``, or a value like ``0.5`` or ``0.5 without averaging``."""
        changed = record.changed
        if self.methods and record.method not in self.methods or bool(record.memory) != self.with_memory:
            return None
        if any(record.studied(key) != value for key, value in self.changed.items()):
            return None
        if not self.main and not changed <= set(self.studied) or len(changed) > self.most:
            return None
        if self.rows:
            wanted = [record.method, {key: record.studied(key) for key in changed}]
            return next((name for name, row in self.rows.items() if row == wanted), None)
        name = record.method
        if self.corner != "method":
            value = record.studied(self.corner)
            name = self.number.format(value) if isinstance(value, (int, float)) else str(value)
            name += "" if record.studied("wsc.average") else WITHOUT
        return None if name in self.without else name

    def in_order(self, entries: Iterable[str]) -> list[str]:
        """The rows in the table's order; others follow."""
        if self.order or self.rows or self.corner == "method":
            return list(self.order or self.rows)
        return sorted(entries, key=lambda entry: (WITHOUT in entry, float(entry.removesuffix(WITHOUT))))


STUDIES = [Study(**study) for study in data_file("studies.json")]
