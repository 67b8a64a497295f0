"""What a figure shows: the runs of a group by name and memory size."""

from collections import defaultdict
from dataclasses import dataclass

from pycil_wsc.report.groups import label
from pycil_wsc.report.paper import expands
from pycil_wsc.report.style import line_styles


@dataclass(frozen=True)
class Plot:
    """A figure and what to say below it."""

    slug: str
    title: str
    figure: object
    notes: tuple = ()
    folded: bool = False  # the page shows it on demand


class Series:
    """The runs of a group outside its studies. A name has the same style in every figure."""

    def __init__(self, group):
        self.group, self.records = group, group.base()
        names = label(self.records, lambda record: record.method, group.not_named)
        self.methods = {name: record.method for record, name in names.items()}
        self.styles = line_styles(self.methods)
        self.cells = defaultdict(list)
        for record, name in names.items():
            self.cells[name, record.memory].append(record)
        self.memories = sorted({memory for _, memory in self.cells})

    def of(self, name, read=None):
        """``{memory: records}`` of one name; with ``read``, only those in which it finds something."""
        found = {
            memory: [r for r in self.cells[name, memory] if read is None or read(r) is not None]
            for memory in self.memories
            if (name, memory) in self.cells
        }
        return {memory: records for memory, records in found.items() if records}

    def notes(self, *notes, read=None, errors=False):
        """Over how many seeds, ``notes``, what bars and dashes mean if there are any, and the runs that are missing or in which ``read`` finds nothing."""
        seeds = sorted({len(records) for records in self.cells.values()})
        over = (
            "One seed"
            if seeds == [1]
            else f"Means over {' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
        )
        bars = "; bars are one standard error." if errors and seeds != [1] else "."
        dashes = (
            ["Dashed lines and hollow markers: methods that expand."]
            if any(map(expands, self.methods.values()))
            else []
        )
        return (over + bars, *notes, *dashes, *self._missing(read))

    def _missing(self, read):
        parts = []
        for name in self.methods:
            wanted = [memory for memory in self.memories if memory and any(self.of(name))] or list(self.of(name))
            if gaps := [f"{memory:,}" for memory in wanted if memory not in self.of(name, read)]:
                parts.append(f"{name} at {', '.join(gaps)}")
        return [f"Missing: {'; '.join(parts)}."] if parts else []
