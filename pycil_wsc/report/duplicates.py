"""Results of the same run, of which one is counted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pycil_wsc.files import Json
from pycil_wsc.results.store import Problem, Record


class Variant(dict[str, Json]):
    """The values that decide a run's result, except method, memory size and seed: ``{key: value}``."""

    @cached_property
    def frozen(self) -> tuple[tuple[str, str], ...]:
        """The variant as a hashable. Cached, so read it only when the variant is complete."""
        return tuple(sorted((name, json.dumps(value)) for name, value in self.items()))


def variants(records: Iterable[Record]) -> dict[Record, Variant]:
    """The :class:`Variant` of each record.

    A memory of all images is part of the variant only if there is also a run whose memory is given as the same number.
    """
    variant_of = {record: Variant(record.identity.variant) for record in records}
    for variant in variant_of.values():
        variant.pop("dataset", None)  # part of the setting, in which equal data are equal under any path
    places = {(record.method, record.memory) for record in variant_of if record.identity.keeps_all}
    beside = [record for record in variant_of if (record.method, record.memory) in places]
    counted = {_key(record) for record in beside if not record.identity.keeps_all}
    for record, variant in variant_of.items():
        if record.identity.keeps_all and _key(record) in counted:
            variant["memory_per_class"] = "all"
    return variant_of


def _key(record: Record) -> tuple[Any, ...]:
    """What runs share that differ in how the size of their memory is given."""
    return record.method, record.memory, record.identity.frozen


def distinct(variants_of: Mapping[Record, Variant]) -> tuple[dict[Record, Variant], list[Problem]]:
    """Each run once, and the duplicates that were left out. Of several results of one run, the most complete is kept.

    A contradiction between duplicates is reported: one of them is wrong, or the result depends on something that is not
    in the configuration.
    """
    alike: dict[tuple[str, float, int, tuple[tuple[str, str], ...]], list[Record]] = defaultdict(list)
    for record, variant in variants_of.items():
        alike[record.method, record.memory, record.seed, variant.frozen].append(record)
    kept: dict[Record, Variant] = {}
    problems: list[Problem] = []
    for records in alike.values():
        counted = max(records, key=_completeness)
        kept[counted] = variants_of[counted]
        problems += [(record.path, _same(record, counted)) for record in records if record is not counted]
    return kept, problems


def _completeness(record: Record) -> tuple[int, ...]:
    """The number of values recorded in the analyses, the result and the configuration."""
    contents = [*record.analyses, record.data, record.config]
    known = [[value for value in content.values() if value is not None] for content in contents]
    *analyses, result, config = map(len, known)
    return sum(analyses), result, config


def _same(record: Record, counted: Record) -> str:
    if record.curve == counted.curve:
        return f"the same run as {counted.path}; counted once"
    average, counted_average = (f"{result.average:.2f}" for result in (record, counted))
    apart = [name for name in ("device", "torch", "commit") if record.data.get(name) != counted.data.get(name)]
    other = f", and another {', '.join(apart)}" if apart else ""
    return (
        f"contradicts {counted.path}: the same configuration and seed{other}, but the average is {average} here and "
        f"{counted_average} there; the other is counted, move one of them away"
    )
