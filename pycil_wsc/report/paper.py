"""The paper's numbers, shown for reference beside ours."""

from __future__ import annotations

import json
from pathlib import Path

from pycil_wsc.results import Record

PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def expands(method: str) -> bool:
    """Whether the method's network grows with the tasks (or doubles)."""
    return method.removesuffix("+wsc") in PAPER["expanding"]


def same_schedule(record: Record) -> bool:
    """Whether the run was trained for the paper's number of epochs."""
    return [record.config["init_epoch"], record.config["epochs"]] == PAPER["schedules"].get(record.method)


def share_of_schedule(method: str, epochs: tuple[int, int]) -> tuple[float, float] | None:
    """A run's epochs of the first and of later tasks relative to the paper's; None for a method not in the paper."""
    theirs = PAPER["schedules"].get(method.removesuffix("+wsc"))
    return (epochs[0] / theirs[0], epochs[1] / theirs[1]) if theirs else None
