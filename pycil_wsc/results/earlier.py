"""Readers of results of earlier versions.

Schema 1 has no identity: it is derived here, once, when such a result is read. An identity of a later schema lacks the
keys that were added since: it is completed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.options import INCIDENTAL, KEYS
from pycil_wsc.consolidation.options import WSCOptions
from pycil_wsc.data.options import memory_keys
from pycil_wsc.files import Json
from pycil_wsc.keys import Key, declared, plain
from pycil_wsc.results.identity import NAMED, Identity, image_identity, is_own, language_identity

# the keys of language models that did not decide a result when schema 1 was written
LANGUAGE_INCIDENTAL = {"prefix", "device", "threads", "data_root", "out", "save_weights", "label"} | {
    f"llm.{name}"
    for name in (
        *("micro_tokens", "padding", "packing", "eval_batch", "attn_implementation", "gradient_checkpointing"),
        *("shard", "timeout_minutes", "checkpoint_minutes"),
    )
}
# the keys that are in an identity's variant
_DECISIVE = {name: key for name, key in KEYS.items() if name not in INCIDENTAL | NAMED}


def completed(contents: Mapping[str, Json]) -> dict[str, Json]:
    """The fields of a result of schema 1 that are read differently now: its identity, and the name of one thread."""
    device = contents.get("device")
    if isinstance(device, str) and device.endswith(", 1 threads"):
        device = device.removesuffix("s")
    return {"identity": _identity(contents), "device": device}


def up_to_date(identity: Identity, kind: str) -> Identity:
    """A recorded ``identity`` of a run of this ``kind``, with the values that applied before other keys were added.

    The options of a learner are taken as they were recorded.
    """
    keys = declared(WSCOptions, "wsc.") if kind == "llm" else _DECISIVE
    complete = with_earlier_values(identity.variant, keys)
    added = {name: value for name, value in complete.items() if name not in identity.variant}
    own = {name: value for name, value in added.items() if kind == "llm" or is_own(name)}
    shared = {name: value for name, value in added.items() if name not in own}
    changes = {"shared": {**identity.shared, **shared}, "own": {**identity.own, **own}}
    return Identity(**{**identity.model_dump(), **changes}) if added else identity


def _identity(contents: Mapping[str, Json]) -> Identity:
    """The identity of a run from its recorded configuration.

    A key that the run's version did not have gets the value that applied before the key was added. The options of a
    learner are taken as they were recorded.
    """
    config = contents["config"]
    if contents.get("kind") == "llm":
        decisive = with_earlier_values(_without(config, LANGUAGE_INCIDENTAL), declared(WSCOptions, "wsc."))
        return language_identity(decisive, config)
    incidental = INCIDENTAL | _unused_memory(config)
    return image_identity(_without(with_earlier_values(config), incidental), contents)


def with_earlier_values(values: Mapping[str, Json], keys: Mapping[str, Key] = KEYS) -> dict[str, Json]:
    """``values`` of an earlier version's keys, completed by those that applied before other ``keys`` were added.

    Keys that have been removed since, and have the value that applies now, are left out.

    The consolidation's keys are completed if the run consolidates.
    """
    consolidates = any(name.startswith("wsc.") for name in values)
    before = {name: key.earlier for name, key in keys.items() if consolidates or not name.startswith("wsc.")}
    return {**plain(before), **without_dropped(values)}


def _unused_memory(config: Mapping[str, Json]) -> set[str]:
    """The memory keys without effect: the one that ``fixed_memory`` excludes, unless BiC's validation reads it."""
    unused = {memory_keys(config["fixed_memory"])[0]}
    reads = {"pycil": "memory_size", "per_class": "memory_per_class"}.get(config.get("validation", ""))
    return unused - {reads}


def _without(values: Mapping[str, Json], names: Set[str]) -> dict[str, Json]:
    return {name: value for name, value in values.items() if name not in names}
