"""Which results are of one and the same run: their configuration, complete, without what decides no result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pycil_wsc.config.options import INCIDENTAL, KEYS
from pycil_wsc.report.runs import Problem, Record

MEMORY = ("memory_per_class", "memory_size")
APART = {"seed", "model_name", "consolidate", *MEMORY}  # read from a record by name, never part of a variant

Variant = tuple[tuple[str, str], ...]  # key and value as JSON, in a configuration's order


def variants(records: Iterable[Record]) -> dict[Record, dict[str, Any]]:
    """For each record, what decides its result besides the method, the memory size and the seed: ``{key: value}``.

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


def _decisive(record: Record) -> dict[str, Any]:
    config = record.config
    consolidates = any(name.startswith("wsc.") for name in config)
    complete = {name: key.earlier for name, key in KEYS.items() if consolidates or not name.startswith("wsc.")}
    complete = {name: list(value) if isinstance(value, tuple) else value for name, value in complete.items()} | config
    complete["precision"] = record.data.get("precision") or complete["precision"]  # what "auto" was
    variant = {name: value for name, value in complete.items() if name not in INCIDENTAL | APART}
    if "validation" in complete:  # BiC's held-out samples are counted by the key that otherwise has no say
        also = "memory_size" if complete["validation"] == "pycil" else "memory_per_class"
        variant |= {also: complete[also]} if (also == "memory_size") == complete["fixed_memory"] else {}
    return variant


def frozen(variant: Mapping[str, Any]) -> Variant:
    """A variant as a key of dictionaries."""
    return tuple(sorted((name, json.dumps(value)) for name, value in variant.items()))


def distinct(variants_of: dict[Record, dict[str, Any]]) -> tuple[list[Record], list[Problem]]:
    """Each run once, and what was left out: a result of the same configuration and seed counts once.

    If two such results differ, the problem says so: the numbers of one of them are wrong, or the result depends on
    something that the configuration does not hold.
    """
    first: dict[Any, Record] = {}
    problems: list[Problem] = []
    for record, variant in variants_of.items():
        same = first.setdefault((record.method, record.memory, record.seed, frozen(variant)), record)
        if same is not record:
            problems.append((record.path, _same(record, same)))
    return list(first.values()), problems


def _same(record: Record, first: Record) -> str:
    if record.curve == first.curve:
        return f"the same run as {first.path}; counted once"
    ours, theirs = (f"{result.average:.2f}" for result in (record, first))
    apart = [name for name in ("device", "torch", "commit") if record.data.get(name) != first.data.get(name)]
    other = f", and another {', '.join(apart)}" if apart else ""
    return (
        f"contradicts {first.path}: the same configuration and seed{other}, but the average is {ours} here and "
        f"{theirs} there; the other is counted, move one of them away"
    )
