"""The paper's numbers, shown for reference beside ours."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def expands(method: str) -> bool:
    """Whether the method's network grows with the tasks (or doubles)."""
    return method.removesuffix("+wsc") in PAPER["expanding"]


def tables(setting: Any) -> dict[str, Any]:
    """``{study: {row: {memory: {"mean": ..., "se": ...}}}}`` of a setting; empty if the paper has no such numbers."""
    same = (
        setting.fixed_memory
        and not setting.validation_split
        and not setting.part
        and PAPER["backbones"].get(setting.dataset) == setting.convnet_type
    )
    return PAPER["tables"].get(f"{setting.dataset}-b{setting.init_cls}-inc{setting.increment}", {}) if same else {}


def same_schedule(record: Any) -> bool:
    """Whether the run was trained for the paper's number of epochs."""
    return [record.config["init_epoch"], record.config["epochs"]] == PAPER["schedules"].get(record.method)


def share_of_schedule(method: str, epochs: tuple[int, int]) -> tuple[Fraction, Fraction] | None:
    """A run's epochs of the first and of later tasks relative to the paper's; None for a method not in the paper."""
    theirs = PAPER["schedules"].get(method.removesuffix("+wsc"))
    return (Fraction(epochs[0], theirs[0]), Fraction(epochs[1], theirs[1])) if theirs else None
