"""What the report reads of a record."""

from __future__ import annotations

from pycil_wsc.results import ALL, Found, Problem, Record

__all__ = ["ALL", "STUDIED", "Found", "Problem", "Record", "memory_text"]
STUDIED = {  # the keys that the paper's studies vary, with the values of the paper's method
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "exemplars": "herding",
}


def memory_text(memory: float) -> str:
    """A number of exemplars in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"
