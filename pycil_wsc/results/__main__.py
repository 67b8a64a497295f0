"""python -m pycil_wsc.results FOLDER... --out TABLE: keep the finished runs of a study as one table, a row each."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycil_wsc.errors import UserError, lack_of_memory
from pycil_wsc.output import Parser, best_effort_output
from pycil_wsc.results.run_table import add, finished


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; returns the exit code: 0, 1 if a result could not be read, 2 for invalid input, 130: Ctrl-C."""
    with best_effort_output():
        try:
            return _write(_parse(argv))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except OSError as error:  # of a path that is too long, or that this user may not look at
            print(f"error: {error.filename}: {error.strerror}; choose another path", file=sys.stderr)
        except MemoryError as error:
            print(f"error: {lack_of_memory(error)}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            return 130
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m pycil_wsc.results", description=__doc__)
    parser.add_argument("runs", metavar="FOLDER", type=Path, nargs="+", help="folders of sweeps, runs/<prefix>")
    parser.add_argument(
        "--out",
        metavar="TABLE",
        type=Path,
        required=True,
        help="a CSV file; runs that it has and that are in none of the folders are kept",
    )
    return parser.parse_args(argv)


def _write(args: argparse.Namespace) -> int:
    runs, problems = finished(args.runs)
    number = add(runs, args.out)
    for path, problem in problems:
        print(f"problem: {path}: {problem}", file=sys.stderr)
    print(f"{args.out}: {number} runs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
