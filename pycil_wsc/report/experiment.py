"""The experiment file that reproduces the runs of a group."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

from pycil_wsc.report.groups import Group
from pycil_wsc.results import Record


def experiment(group: Group) -> dict[str, Any]:
    """The keys shared by all runs and, under ``runs``, one entry per method variant with its other keys and seeds."""
    memory = "memory_per_class" if group.setting.fixed_memory else "memory_size"
    settings: dict[str, list[Record]] = defaultdict(list)
    for record in group.records:
        settings[json.dumps(_settings(record, memory), sort_keys=True)].append(record)
    entries = []
    for records in settings.values():
        by_memory: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for size in sorted({record.config[memory] for record in records}):
            by_memory[tuple(sorted(record.seed for record in records if record.config[memory] == size))].append(size)
        for seeds, sizes in by_memory.items():
            entries.append(_settings(records[0], memory) | {memory: _axis(sizes), "seed": _axis(seeds)})
    first = entries[0]
    shared = {
        name: value
        for name, value in first.items()
        if name not in ("model_name", memory, "seed")
        and all(name in entry and json.dumps(entry[name]) == json.dumps(value) for entry in entries)
    }
    runs = [{name: value for name, value in entry.items() if name not in shared} for entry in entries]
    return {"prefix": "again"} | shared | {"runs": runs}


def command(path: Path) -> str:
    """The command that runs the experiment file."""
    return f"python main.py --config {shlex.quote(str(path))}"


def _settings(record: Record, memory: str) -> dict[str, Any]:
    return {name: value for name, value in record.decisive().items() if name not in (memory, "seed")}


def _axis(values: Any) -> Any:
    values = list(values)
    return values[0] if len(values) == 1 else values
