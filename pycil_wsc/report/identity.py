"""Which results are of one and the same run: their configuration, complete, without what decides no result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pycil_wsc.config.options import INCIDENTAL, KEYS
from pycil_wsc.keys import plain
from pycil_wsc.report.runs import Problem, Record

MEMORY = ("memory_per_class", "memory_size", "memory_bytes")
APART = {"seed", "model_name", "consolidate", *MEMORY}  # read from a record by name, never part of a variant


class Variant(dict[str, Any]):
    """What decides a run's result besides the method, the memory size and the seed: ``{key: value}``."""

    @cached_property
    def frozen(self) -> tuple[tuple[str, str], ...]:
        """The variant as a key of dictionaries. Read once it is complete: it is not computed again."""
        return tuple(sorted((name, json.dumps(value)) for name, value in self.items()))


def variants(records: Iterable[Record]) -> dict[Record, Variant]:
    """Each record's :class:`Variant`.

    A key that an older version did not know gets the value that runs had before the key was added
    (:mod:`pycil_wsc.config.options`). A learner's option gets the value on which all other results of the method agree,
    if they do: the report knows no learner.
    """
    found = {record: _decisive(record) for record in records}
    options: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record, variant in found.items():
        for name in variant.keys() - KEYS.keys():
            options[record.method][name].add(json.dumps(variant[name]))
    for record, variant in found.items():
        for name, values in options[record.method].items():
            if name not in variant and len(values) == 1:
                variant[name] = json.loads(next(iter(values)))
    return found


def _decisive(record: Record) -> Variant:
    config = record.config
    consolidates = any(name.startswith("wsc.") for name in config)
    complete = {name: key.earlier for name, key in KEYS.items() if consolidates or not name.startswith("wsc.")}
    complete = plain(complete) | config
    complete["precision"] = record.data.get("precision") or complete["precision"]  # what "auto" was
    variant = {name: value for name, value in complete.items() if name not in INCIDENTAL | APART}
    if "validation" in complete:  # BiC's held-out samples are counted by the key that otherwise has no say
        also = "memory_size" if complete["validation"] == "pycil" else "memory_per_class"
        variant |= {also: complete[also]} if (also == "memory_size") == complete["fixed_memory"] else {}
    return Variant(variant)


def distinct(variants_of: Mapping[Record, Variant]) -> tuple[list[Record], list[Problem]]:
    """Each run once, and what was left out: of the results of one configuration and seed, the fullest counts.

    If two such results differ, the problem says so: the numbers of one of them are wrong, or the result depends on
    something that the configuration does not hold.
    """
    alike: dict[Any, list[Record]] = defaultdict(list)
    for record, variant in variants_of.items():
        alike[record.method, record.memory, record.seed, variant.frozen].append(record)
    kept = [max(records, key=_fullness) for records in alike.values()]
    others = [(record, counted) for counted, records in zip(kept, alike.values()) for record in records]
    return kept, [(record.path, _same(record, counted)) for record, counted in others if record is not counted]


def _fullness(record: Record) -> tuple[int, ...]:
    """How much was recorded: of the analyses, of the result and of the configuration."""
    contents = [*record.analyses, record.data, record.config]
    *analyses, result, config = (sum(value is not None for value in content.values()) for content in contents)
    return sum(analyses), result, config


def _same(record: Record, counted: Record) -> str:
    if record.curve == counted.curve:
        return f"the same run as {counted.path}; counted once"
    ours, theirs = (f"{result.average:.2f}" for result in (record, counted))
    apart = [name for name in ("device", "torch", "commit") if record.data.get(name) != counted.data.get(name)]
    other = f", and another {', '.join(apart)}" if apart else ""
    return (
        f"contradicts {counted.path}: the same configuration and seed{other}, but the average is {ours} here and "
        f"{theirs} there; the other is counted, move one of them away"
    )
