"""The configuration that repeats some runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from pycil_wsc.files import Json
from pycil_wsc.results.identity import memory_keys
from pycil_wsc.results.store import Record

Configuration = dict[str, Json]


def experiment(records: Sequence[Record]) -> Configuration:
    """The keys shared by all runs and, under ``runs``, one entry per method variant with its other keys and seeds.

    The memory of all runs is per class, or that of all is in total.
    """
    _, memory = memory_keys(records[0].config["fixed_memory"])
    first: dict[str, Configuration] = {}
    seeds_of: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by settings and memory
    for record in records:
        settings = {name: value for name, value in record.decisive().items() if name not in (memory, "seed")}
        text = json.dumps(settings, sort_keys=True)
        first.setdefault(text, settings)
        seeds_of[text][record.config[memory]].append(record.seed)
    entries: list[Configuration] = []
    for text, seeds_by_size in seeds_of.items():
        sizes_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for size, seeds in sorted(seeds_by_size.items()):
            sizes_of[tuple(sorted(seeds))].append(size)
        for seeds, sizes in sizes_of.items():
            entries.append(first[text] | {memory: _axis(sizes), "seed": _axis(seeds)})
    shared = dict(entries[0])
    for name in entries[0]:
        values = {json.dumps(entry[name]) if name in entry else None for entry in entries}
        if len(values) > 1 or name in ("model_name", memory, "seed"):
            del shared[name]
    runs = [{name: value for name, value in entry.items() if name not in shared} for entry in entries]
    return {"prefix": "again", **shared, "runs": runs}


def _axis(values: Sequence[int]) -> Json:
    return values[0] if len(values) == 1 else list(values)
