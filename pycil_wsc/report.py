"""Runs -> tables. Reads ``result.json`` files and nothing else."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from utils.errors import UnusableRun


def read_result(path):
    """The contents of a ``result.json``; ``UnusableRun`` names a file that is not whole."""
    try:
        result = json.loads(Path(path).read_text())
        result["config"]["model_name"], result["avg_acc"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UnusableRun(f"{path}: is not a whole result; delete it to run this again") from None
    return result


def accuracy_table(results):
    """Average accuracy of each method (rows) at each memory size (columns), as text: mean and standard error over seeds."""
    cells, memories = defaultdict(list), {}
    varying = _varying_keys(results := list(results))
    for result in results:
        config = result["config"]
        memory = (config["fixed_memory"], config["memory_per_class"] if config["fixed_memory"] else config["memory_size"])
        memories[memory] = f"{memory[1]}/class" if memory[0] else f"{memory[1]} in all"
        cells[_row_name(config, varying), memory].append(result["avg_acc"])
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = sorted(memories)
    seeds = {len(values) for values in cells.values()}
    header = f"Average accuracy (CNN, top-1 %), mean ± standard error over {'/'.join(map(str, sorted(seeds)))} seed{'s' if seeds != {1} else ''}"
    lines = [["exemplars", *(memories[column] for column in columns)]]
    lines += [[row, *(_cell(cells.get((row, column))) for column in columns)] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    return "\n".join([header, *("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))]) for line in lines)])


def mean_and_error(values):
    """Mean and standard error of the mean; the error of a single value is None."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def _cell(values):
    if not values:
        return "-"
    mean, error = mean_and_error(values)
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def _varying_keys(results):
    """Keys, beside method, memory and seed, in which runs of one method differ."""
    seen = defaultdict(set)
    for result in results:
        for name, value in result["config"].items():
            seen[result["config"]["model_name"], name].add(json.dumps(value))
    own = {"model_name", "memory_size", "memory_per_class", "fixed_memory", "seed", "device", "out", "data_root", "num_workers", "threads"}
    return {name for (_, name), values in seen.items() if len(values) > 1} - own


def _row_name(config, varying):
    extra = [f"{name}={config[name]}" for name in sorted(varying) if name in config]
    return " ".join([config["model_name"], *extra])
