"""What a sweep prints of its runs of language models. Reads results and nothing else."""

import json
import statistics
from pathlib import Path

from utils.errors import UnusableRun

MEASURES = {  # title -> (value of a result, format)
    "average": (lambda result: result["avg_score"], ".3f"),
    "new task": (lambda result: result["scores"]["trace"]["new_score"], ".3f"),
    "forgetting": (lambda result: result["scores"]["trace"]["forgetting"], ".3f"),
    "minutes": (lambda result: result["train_minutes"], ".1f"),
    "rel. VRAM": (lambda result: result["relative_vram_minutes"], ".1f"),
}


def read_result(path):
    """The contents of a ``result.json``; ``UnusableRun`` names a file that is not whole."""
    try:
        result = json.loads(Path(path).read_text())
        result["config"]["llm.method"], [value(result) for value, _ in MEASURES.values()]
    except (OSError, ValueError, KeyError, TypeError):
        raise UnusableRun(f"{path}: is not a whole result; delete it to run this again") from None
    return result


def score_table(results):
    """Scores after the last task: a row for each method and memory, a column for each task, the mean over seeds."""
    groups = {}
    for result in results:
        groups.setdefault((tuple(result["tasks"]), _row(result)), []).append(result)
    tables = {}
    for (tasks, row), members in groups.items():
        tables.setdefault(tasks, []).append([*row, *(_mean(members, lambda r: r["scores"]["trace"]["matrix"][-1][i], ".3f") for i in range(len(tasks))),
                                             *(_mean(members, value, style) for value, style in MEASURES.values())])  # fmt: skip
    seeds = sorted({len(members) for members in groups.values()})
    header = f"Scores after the last task (TRACE's metrics), mean over {'/'.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"
    return "\n\n".join(_aligned([[header], ["method", "memory", *tasks, *MEASURES], *rows]) for tasks, rows in tables.items())


def _row(result):
    config = result["config"]
    return config["llm.method"], f"{config['llm.replay_ratio']:.0%}"


def _mean(results, value, style):
    return format(statistics.fmean(map(value, results)), style)


def _aligned(lines):
    header, *lines = lines
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join([*header, *("  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) for line in lines)])
