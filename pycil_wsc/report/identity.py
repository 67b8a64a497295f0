"""Finds results of the same run, by their complete configuration without the keys that do not decide the result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pycil_wsc.config.options import BACKBONE_OPTION, INCIDENTAL, KEYS
from pycil_wsc.keys import plain
from pycil_wsc.report.runs import Problem, Record

MEMORY = ("memory_per_class", "memory_size", "memory_bytes")
SEPARATE = {"seed", "model_name", "consolidate", *MEMORY}  # attributes of a record, never part of a variant


class Variant(dict[str, Any]):
    """The values that decide a run's result, except method, memory size and seed: ``{key: value}``."""

    @cached_property
    def frozen(self) -> tuple[tuple[str, str], ...]:
        """The variant as a hashable. Cached, so read it only when the variant is complete."""
        return tuple(sorted((name, json.dumps(value)) for name, value in self.items()))


def variants(records: Iterable[Record]) -> dict[Record, Variant]:
    """The :class:`Variant` of each record.

    A key that the run's version did not have gets the value that applied before the key was added
    (:mod:`pycil_wsc.config.options`). A missing option of a learner gets the value of the method's other results if
    they all agree, because the report does not import learners. A memory of all images is part of the variant only if
    there is also a run whose memory is given as the same number.
    """
    found = {record: _decisive(record) for record in records}
    options: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record, variant in found.items():
        for name in variant.keys() - KEYS.keys():
            if not name.startswith(BACKBONE_OPTION):  # without which a network has the backbone's default
                options[record.method][name].add(json.dumps(variant[name]))
    for record, variant in found.items():
        for name, values in options[record.method].items():
            if name not in variant and len(values) == 1:
                variant[name] = json.loads(next(iter(values)))
    whole = [record for record in found if record.keeps_all]
    places = {(record.method, record.memory) for record in whole}
    counted = {
        (*place, Variant(variant).frozen)  # of a copy: the variants are not yet complete
        for record, variant in found.items()
        if not record.keeps_all and (place := (record.method, record.memory)) in places
    }
    for record in whole:
        if (record.method, record.memory, Variant(found[record]).frozen) in counted:
            found[record]["memory_per_class"] = "all"
    return found


def _decisive(record: Record) -> Variant:
    config = record.config
    consolidates = any(name.startswith("wsc.") for name in config)
    complete = {name: key.earlier for name, key in KEYS.items() if consolidates or not name.startswith("wsc.")}
    complete = plain(complete) | config
    complete["precision"] = record.data.get("precision") or complete["precision"]  # the value that "auto" selected
    variant = {name: value for name, value in complete.items() if name not in INCIDENTAL | SEPARATE}
    variant["max_tasks"] = record.part.get("max_tasks")
    if "validation" in complete:  # BiC's held-out samples depend on a memory key that is otherwise unused
        key = "memory_size" if complete["validation"] == "pycil" else "memory_per_class"
        variant |= {key: complete[key]} if (key == "memory_size") == complete["fixed_memory"] else {}
    return Variant(variant)


def distinct(variants_of: Mapping[Record, Variant]) -> tuple[list[Record], list[Problem]]:
    """Each run once, and the duplicates that were left out. Of several results of one run, the most complete is kept.

    A contradiction between duplicates is reported: one of them is wrong, or the result depends on something that is not
    in the configuration.
    """
    alike: dict[Any, list[Record]] = defaultdict(list)
    for record, variant in variants_of.items():
        alike[record.method, record.memory, record.seed, variant.frozen].append(record)
    kept = [max(records, key=_completeness) for records in alike.values()]
    others = [(record, counted) for counted, records in zip(kept, alike.values()) for record in records]
    return kept, [(record.path, _same(record, counted)) for record, counted in others if record is not counted]


def _completeness(record: Record) -> tuple[int, ...]:
    """The number of values recorded in the analyses, the result and the configuration."""
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
