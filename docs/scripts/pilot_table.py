"""The table of docs/pretrained.md beside PILOT itself, from the records of differences and of times."""

import json

from speed_tables import RECORDS  # beside this file

HEADER = ("method", "largest difference", "weights move by", "lines", "lines of PILOT's", "time")
COMPARED = ("weights", "kept", "losses", "predictions")


def rows() -> list[tuple[str, ...]]:
    """Header and rows: the largest difference of weights, statistics, losses and scores; lines; time over PILOT's."""
    differences, times = (
        json.loads((RECORDS / f"{name}/{name.replace('_', '-')}-cpu.json").read_text(encoding="utf-8"))["methods"]
        for name in ("pilot_fidelity", "pilot_speed")
    )
    lines: list[tuple[str, ...]] = [HEADER]
    for name, method in differences.items():
        largest = max(method[part] for part in COMPARED if part in method)
        moved = one_digit(method["moved"]) if "moved" in method else ""
        time = f"{times[name]['ours_over_pilot']:.2f}" if name in times else ""
        lines.append((f"`{name}`", one_digit(largest), moved, f"{method['lines']}", f"{method['pilot_lines']}", time))
    return lines


def one_digit(number: float) -> str:
    return f"{float(f'{number:.1g}'):g}"
