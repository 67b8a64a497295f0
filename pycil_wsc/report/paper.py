"""The paper's numbers, which stand beside ours: reference data, never a result of ours."""

import json
from pathlib import Path

PAPER = json.loads(Path(__file__).with_name("paper.json").read_text())


def expands(method):
    """Whether the method's network grows with the tasks (or doubles)."""
    return method.removesuffix("+wsc") in PAPER["expanding"]


def tables(setting):
    """``{study: {row: {memory: {"mean": ..., "se": ...}}}}`` of a setting; empty where the paper has none."""
    same = (
        setting.fixed_memory
        and not setting.validation_split
        and PAPER["backbones"].get(setting.dataset) == setting.convnet_type
    )
    return PAPER["tables"].get(f"{setting.dataset}-b{setting.init_cls}-inc{setting.increment}", {}) if same else {}


def same_schedule(record):
    """Whether the run has as many epochs as the paper's."""
    return [record.config["init_epoch"], record.config["epochs"]] == PAPER["schedules"].get(record.method)
