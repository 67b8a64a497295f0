"""The table of docs/wsc.md on short tasks: gains over Replay in seven training loops, of results/studies/short_tasks.

python docs/scripts/generate.py
"""

from collections.abc import Iterator

from figure import gains  # beside this file

METHODS = {"replay": "Replay", "before": "before", "letter": "as in the paper", "default": "default"}


def rows() -> list[tuple[str, ...]]:
    """The table's lines, the header first: a line for each loop and method, a column for each number of epochs."""
    return list(_lines())


def _lines() -> Iterator[tuple[str, ...]]:
    for number, (loop, by_epochs) in enumerate(gains().items()):
        lengths = sorted(by_epochs)
        if number == 0:
            first, *others = lengths
            yield "loop", "method", f"{first} epochs", *map(str, others)
        for method, name in METHODS.items():
            yield loop, name, *(_cell(method, *by_epochs[epochs][method]) for epochs in lengths)


def _cell(method: str, mean: float, error: float) -> str:
    """Replay's accuracy, or another method's gain over it with the standard error."""
    return f"{mean:.1f}" if method == "replay" else f"{mean:+.1f} ± {error:.1f}"
