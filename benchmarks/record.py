"""What the benchmarks write: medians with ranges, the machine and the versions, as JSON."""

import json
import statistics

import torch

from pycil_wsc.engine.environment import commit, device_name


def spread(values):
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def origin(device):
    """What a record was made with."""
    return {"device": device_name(device), "torch": torch.__version__, "commit": commit()}


def write(record, out):
    """Into the file ``out``, a path, or nowhere if it is None."""
    if out:
        out.write_text(json.dumps(record, indent=2) + "\n")
