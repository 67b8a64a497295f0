"""Results of runs: what a ``result.json`` contains, which runs are the same or comparable, and how to find them."""

from pycil_wsc.results.identity import ALL, Identity
from pycil_wsc.results.schema import SCHEMA, ImageResult, LanguageResult, Result
from pycil_wsc.results.store import (
    REPLACED,
    RESULT,
    Found,
    Problem,
    Record,
    find_runs,
    finished_result,
    has_result,
    is_finished,
    read_result,
    set_result_aside,
    write_result,
)

__all__ = [
    "ALL",
    "REPLACED",
    "RESULT",
    "SCHEMA",
    "Found",
    "Identity",
    "ImageResult",
    "LanguageResult",
    "Problem",
    "Record",
    "Result",
    "find_runs",
    "has_result",
    "is_finished",
    "read_result",
    "finished_result",
    "set_result_aside",
    "write_result",
]
