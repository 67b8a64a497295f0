"""Keys of earlier versions, which their files and records may still have."""

from collections.abc import Mapping
from dataclasses import dataclass

from pycil_wsc.errors import UserError
from pycil_wsc.files import Json


@dataclass(frozen=True)
class Dropped:
    """A key that is no longer declared.

    Args:
        reason: what is said of it, with what to use instead.
        decided: whether it decided results. A key that did not says nothing in a record, whatever its value.
        now: the value that applies now, which a file may still give; of keys that decided results.
    """

    reason: str
    decided: bool = True
    now: Json = None


def _gone(now: Json, instead: str) -> Dropped:
    return Dropped(f"is no longer a key; use {instead}", now=now)


DROPPED = {
    "cuda_graph": Dropped("is replaced by 'compile'; set that instead", decided=False),
    "sync_batch_norm": _gone(True, "batch_norm_parts, with the number of processes"),
    "wsc.score_abs": _gone(False, "moment_score(absolute=True) in a loop of your own"),
    "wsc.reset_head": _gone(True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_norm": _gone(True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_new_rows": _gone(True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_momentum": _gone(False, "Blend(momentum=True) in a loop of your own"),
    "wsc.reset_buffers": _gone(False, "Blend(buffers=True) in a loop of your own"),
    "wsc.average_unit": _gone("epoch", "wsc.average_every below 1, a fraction of the warm-up's steps"),
    "wsc.average_start": _gone("reset", "Average(start='first') in a loop of your own"),
    "llm.packing": _gone(False, "llm.padding, the largest fraction of padding"),
    "llm.loss": _gone("item", "WSCCallback in a Trainer of your own, whose loss is a mean over tokens"),
    "wsc.moments": _gone("carried", "WSCCallback with moment_score() in a Trainer of your own"),
    "llm.replay_choice": _gone("head", "a train.json whose first items are those to replay"),
    "llm.average": _gone("mean", "OnlineAverage(decay=...) in a loop of your own"),
    "llm.ema_decay": _gone(0.5, "OnlineAverage(decay=...) in a loop of your own"),
    "llm.slerp_weight": _gone(0.5, "Slerp(weight=...) in a loop of your own"),
    "llm.slerp_on": _gone("weights", "Slerp(space=...) in a loop of your own"),
    "task_seconds": _gone(None, "the budget {'flops_like': 'replay'}"),
    "wsc.bn_update": _gone("recompute", "recompute_batch_norm, or leave it out, in a loop of your own"),
}


def without_dropped(recorded: Mapping[str, Json]) -> dict[str, Json]:
    """``recorded`` values without dropped keys, but for those with a value that no longer applies."""
    kept = {}
    for name, value in recorded.items():
        dropped = DROPPED.get(name)
        if dropped is None or dropped.decided and value != dropped.now:
            kept[name] = value
    return kept


def refuse_dropped(given: Mapping[str, Json]) -> dict[str, Json]:
    """``given`` values of a file without dropped keys that say what applies now.

    Raises a :class:`UserError` for any other dropped key.
    """
    kept = {}
    for name, value in given.items():
        dropped = DROPPED.get(name)
        if dropped is None:
            kept[name] = value
        elif not dropped.decided or value != dropped.now:
            raise UserError(f"{name}: {dropped.reason}")
    return kept
