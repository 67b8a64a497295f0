"""The benchmarks' records: medians and ranges, device and versions, as JSON."""

import json
import statistics

import torch

from pycil_wsc.devices import device_name
from pycil_wsc.reproducibility import commit


def spread(values) -> dict:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def origin(device):
    """Device, torch version and commit of a measurement."""
    return {"device": device_name(device), "torch": torch.__version__, "commit": commit()}


def write(record, out):
    """Write to the path ``out``, unless it is None."""
    if out:
        out.write_text(json.dumps(record, indent=2) + "\n")
