"""Readers of results of earlier versions.

Schema 1 has no identity: it is derived here, once, when such a result is read. An identity of a later schema lacks the
keys that were added since: it is completed here. So are fields that were added without a new schema.

What earlier versions did not record stands here as it was then. It says nothing of today's methods and keys, which are
asked themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.image_config import CONSOLIDATED, INCIDENTAL, KEYS
from pycil_wsc.consolidation.options import WSCOptions
from pycil_wsc.data.data_options import memory_keys
from pycil_wsc.files import Json
from pycil_wsc.keys import Key, declared, plain
from pycil_wsc.results.identity import (
    NAMED,
    Identity,
    image_identity,
    is_own,
    language_identity,
    without_consolidation,
)

LANGUAGE = "llm"  # the kind of a language model's result
# the methods whose network grew with the tasks, or doubled, when results did not record it
EXPANDED = {"beef", "der", "foster", "memo", "rmm-foster", "tagfex"}
# the keys of language models that did not decide a result when schema 1 was written
LANGUAGE_INCIDENTAL = {
    *("prefix", "device", "threads", "data_root", "out", "save_weights", "label"),
    *("llm.micro_tokens", "llm.padding", "llm.packing", "llm.eval_batch", "llm.attn_implementation"),
    *("llm.gradient_checkpointing", "llm.shard", "llm.timeout_minutes", "llm.checkpoint_minutes"),
}
LANGUAGE_IDENTIFYING = {"method": "llm.method", "memory": "llm.replay_ratio", "seed": "seed"}
LANGUAGE_COMPARED = ("llm.data", "llm.model")
# the option by which runs of schema 1 read a memory key that `fixed_memory` left unused, and its values
READS_MEMORY = "validation"
MEMORY_READ = {"pycil": "memory_size", "per_class": "memory_per_class"}
# the keys that are in an identity's variant
_DECISIVE = {name: key for name, key in KEYS.items() if name not in INCIDENTAL | NAMED}


def completed(contents: Mapping[str, Json], identity: Identity | None) -> dict[str, Json]:
    """The fields of a result that are read otherwise than they were written: those that its version did not have.

    ``identity``: the recorded one; None in schema 1, which also wrote the name of one thread in the plural.
    """
    kind = contents["kind"]
    fields: dict[str, Json] = {}
    if identity is None:
        identity = _identity(contents)
        fields["device"] = _in_the_singular(contents.get("device"))
    else:
        identity = _up_to_date(identity, kind)
    fields["identity"] = identity
    if kind != LANGUAGE and contents.get("expands") is None:
        fields["expands"] = without_consolidation(identity.method) in EXPANDED
    return fields


def _in_the_singular(device: Json) -> Json:
    """The recorded name of a device, with ``1 thread`` for ``1 threads``."""
    if isinstance(device, str) and device.endswith(", 1 threads"):
        return device.removesuffix("s")
    return device


def _up_to_date(identity: Identity, kind: str) -> Identity:
    """A recorded ``identity`` of a run of this ``kind``, with the values that applied before other keys were added.

    The options of a learner are taken as they were recorded.
    """
    keys = declared(WSCOptions, "wsc.") if kind == LANGUAGE else _DECISIVE
    complete = with_earlier_values(identity.variant, keys)
    added = {name: value for name, value in complete.items() if name not in identity.variant}
    if not added:
        return identity
    shared = dict(identity.shared)
    own_keys = dict(identity.own)
    for name, value in added.items():
        group = own_keys if kind == LANGUAGE or is_own(name) else shared
        group[name] = value
    return Identity(**{**identity.model_dump(), "shared": shared, "own": own_keys})


def _identity(contents: Mapping[str, Json]) -> Identity:
    """The identity of a run from its recorded configuration.

    A key that the run's version did not have gets the value that applied before the key was added. The options of a
    learner are taken as they were recorded.
    """
    config = contents["config"]
    if contents["kind"] == LANGUAGE:
        decisive = with_earlier_values(_without(config, LANGUAGE_INCIDENTAL), declared(WSCOptions, "wsc."))
        return language_identity(decisive, config, LANGUAGE_IDENTIFYING, LANGUAGE_COMPARED)
    incidental = INCIDENTAL | _unused_memory(config)
    decisive = _without(with_earlier_values(config), incidental)
    method = config["model_name"]
    if config.get("consolidate") and method != "wsc":  # which consolidates anyhow
        method += CONSOLIDATED
    return image_identity(method, decisive, contents)


def with_earlier_values(values: Mapping[str, Json], keys: Mapping[str, Key] = KEYS) -> dict[str, Json]:
    """``values`` of an earlier version's keys, completed by those that applied before other ``keys`` were added.

    Keys that have been removed since, and have the value that applies now, are left out.

    The consolidation's keys are completed if the run consolidates.
    """
    consolidates = any(name.startswith("wsc.") for name in values)
    before = {name: key.earlier for name, key in keys.items() if consolidates or not name.startswith("wsc.")}
    return {**plain(before), **without_dropped(values)}


def _unused_memory(config: Mapping[str, Json]) -> set[str]:
    """The memory key without effect: the one that ``fixed_memory`` excludes, unless the method read it all the same."""
    unused, _ = memory_keys(config["fixed_memory"])
    read = MEMORY_READ.get(config.get(READS_MEMORY, ""))
    return set() if read == unused else {unused}


def _without(values: Mapping[str, Json], names: Set[str]) -> dict[str, Json]:
    return {name: value for name, value in values.items() if name not in names}
