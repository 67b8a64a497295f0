"""The generated tables of docs/speed.md, from their records in results/benchmarks/."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent.parent.parent / "results" / "benchmarks"
NAMES = {"cifar": "CIFAR, ResNet-32", "imagenet": "ImageNet, ResNet-18"}
PARTS = ("imports", "listing", "fingerprint", "cache", "step")
Rows = list[tuple[str, ...]]


def scaling(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Header and rows: so many processes of one thread each, and one process with as many threads."""
    yield (
        "shape",
        "batch size",
        "number",
        "processes: images per second",
        "over perfect",
        "communication",
        "threads: images per second",
        "over perfect",
    )
    for shape, measured in record["shapes"].items():
        one = measured["one"]
        name = (NAMES[shape], str(measured["batch_size"]))
        yield *name, "1", f"{one['images_per_second']:,.1f}", "1.00", "", "", ""
        for number in sorted({*measured["processes"], *measured["threads"]}, key=int):
            together, threads = (measured[kind].get(number) for kind in ("processes", "threads"))
            share = f"{100 * together['communication']:.0f} %" if together else ""
            yield *name, number, *_speed(together), share, *_speed(threads)


def _speed(measured: dict[str, Any] | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    return f"{measured['images_per_second']:,.1f}", f"{measured['over_perfect']:.2f}"


def image_folder(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Header and rows: the seconds until the first step, the CPU seconds and what took them, and memory."""
    cpu = ("CPU, s", *(f"{part}, CPU s" for part in PARTS))
    yield "`cache_images`", "start", "first step after, s", *cpu, "main process, MiB", "with its workers, MiB"
    for name, starts in record["caches"].items():
        value = name if name == "false" else f'"{name}"'
        for start, measured in starts.items():
            spent = (f"{measured['cpu_seconds'][part]:.1f}" for part in ("start", *PARTS))
            memory = (f"{measured[each] / 2**20:,.0f}" for each in ("peak_memory_bytes", "all_memory_bytes"))
            yield f"`{value}`", start, f"{measured['seconds']['start']:.0f}", *spent, *memory


def speeds(record: dict[str, Any], *columns: str) -> Iterator[tuple[str, ...]]:
    """Header and rows: the engine's images per second, and its speed over that of the other loops."""
    yield "method", "images per second", "range", *columns
    first = next(iter(record["methods"].values()))["images_per_second"]["engine"]["median"]
    for name, measured in record["methods"].items():
        if name == "wsc" and record["tasks"] == 1:  # its first task is Replay's
            continue
        rate = measured["images_per_second"]["engine"]
        further = {
            "time over Replay's": f"{first / rate['median']:.2f}",
            "peak memory, MiB": f"{measured['peak_memory_bytes']['engine'] / 2**20:,.0f}",
        }
        for column in columns:
            if column.startswith("over"):
                further[column] = f"{measured['engine_' + column.replace(' ', '_')]:.2f}"
        yield (
            name,
            _rate(rate["median"]),
            f"{_rate(rate['min'])} to {_rate(rate['max'])}",
            *(further[column] for column in columns),
        )


def _rate(images_per_second: float) -> str:
    return f"{images_per_second:,.0f}" if images_per_second > 100 else f"{images_per_second:.1f}"


def ablation(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Header and rows: the engine with one part replaced by what stands after the colon."""
    yield "removed", "images per second", "range", "relative to the full engine"
    for part in record["images_per_second"].values():
        if part["removed"].startswith("fused optimiser"):  # this variant was corrected after the measurement
            continue
        rates = f"{_rate(part['min'])} to {_rate(part['max'])}"
        yield part["removed"], _rate(part["median"]), rates, f"{part['over_whole']:.2f}"


def costs(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Header and rows: the seconds of a task and of its parts."""
    parts = ("training", "end of training", "exemplars", "test", "checkpoints")
    yield "method", "task", "range", *parts, "overhead", "over Replay"
    for name, measured in record["methods"].items():
        task = measured["seconds"]["task"]
        places = 1 if task["median"] > 20 else 2
        cells = [f"{task['median']:.{places}f}", f"{task['min']:.{places}f} to {task['max']:.{places}f}"]
        cells += [f"{measured['seconds'][part]['median']:.2f}" for part in parts]
        overhead = f"{100 * measured['overhead_share']['median']:.1f} %"
        yield name, *cells, overhead, f"{measured['over_replay']:.3f}"


def peaks(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Header and rows: MiB by task. Methods that need the same, to a MiB, share a row."""
    tasks = (1, 2, 4, 6, 8, 10)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, peak in record["peak_bytes"].items():
        rows.setdefault(tuple(f"{peak[task - 1] / 2**20:,.0f}" for task in tasks), []).append(name)
    yield "method", *map(str, tasks)
    for cells, names in rows.items():
        yield ", ".join(names), *cells


CIFAR = ("over bare", "over plain", "time over Replay's", "peak memory, MiB")
IMAGENET = ("over bare", "over in turn", "over plain", "peak memory, MiB")
TABLES: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, ...]]]] = {
    "scaling-cpu": scaling,
    "image-folder-cpu": image_folder,
    "throughput-methods-cpu": lambda record: speeds(record, *CIFAR),
    "throughput-imagenet-cpu": lambda record: speeds(record, *IMAGENET),
    "throughput-imagenet-cached-cpu": lambda record: speeds(record, *IMAGENET),
    "throughput-night-chunks-cpu": lambda record: speeds(record, "over bare", "over plain"),
    "engine-ablation-cpu": ablation,
    "engine-ablation-imagenet-cpu": ablation,
    "run-cost-cpu": costs,
    "run-cost-short-cpu": costs,
    "run-cost-night-fp32-m1-cpu": costs,
    "run-cost-night-fp32-m25-cpu": costs,
    "peak-memory-cpu": peaks,
}


def rows(name: str) -> Rows:
    """The table of the record ``name``, in the folder of its script; empty if there is no such record."""
    for path in RECORDS.glob(f"*/{name}.json"):
        return list(TABLES[name](json.loads(path.read_text(encoding="utf-8"))))
    return []
