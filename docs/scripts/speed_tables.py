"""The generated tables of docs/speed.md, from their records in results/."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent.parent / "results"
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


TABLES = {"scaling-cpu": scaling, "image-folder-cpu": image_folder}


def rows(name: str) -> Rows:
    """The table of results/``name``.json; empty if there is no such record."""
    path = RESULTS / f"{name}.json"
    return list(TABLES[name](json.loads(path.read_text(encoding="utf-8")))) if path.exists() else []
