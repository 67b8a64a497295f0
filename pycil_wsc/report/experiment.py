"""The experiment file that reproduces the runs of a group."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from pycil_wsc.report.groups import Group

Settings = dict[str, object]


def experiment(group: Group) -> Settings:
    """The keys shared by all runs and, under ``runs``, one entry per method variant with its other keys and seeds."""
    memory = "memory_per_class" if group.setting.fixed_memory else "memory_size"
    first: dict[str, Settings] = {}
    alike: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # seeds by settings and memory
    for record in group.records:
        settings = {name: value for name, value in record.decisive().items() if name not in (memory, "seed")}
        text = json.dumps(settings, sort_keys=True)
        first.setdefault(text, settings)
        alike[text][record.config[memory]].append(record.seed)
    entries: list[Settings] = []
    for text, seeds_of in alike.items():
        sizes_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for size in sorted(seeds_of):
            sizes_of[tuple(sorted(seeds_of[size]))].append(size)
        for seeds, sizes in sizes_of.items():
            entries.append(first[text] | {memory: _axis(sizes), "seed": _axis(seeds)})
    shared: Settings = {}
    for name, value in entries[0].items():
        same = all(name in entry and json.dumps(entry[name]) == json.dumps(value) for entry in entries)
        if same and name not in ("model_name", memory, "seed"):
            shared[name] = value
    runs = [{name: value for name, value in entry.items() if name not in shared} for entry in entries]
    return {"prefix": "again", **shared, "runs": runs}


def _axis(values: Sequence[int]) -> object:
    return values[0] if len(values) == 1 else list(values)
