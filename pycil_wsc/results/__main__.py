"""python -m pycil_wsc.results pack|unpack: keep many finished runs in one file, or take them from it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycil_wsc.errors import UserError, lack_of_memory
from pycil_wsc.output import Parser, best_effort_output
from pycil_wsc.results.packed import pack, unpack


def main(argv: Sequence[str] | None = None) -> int:
    """Pack or unpack; returns the exit code: 0, 1 if a result could not be read, 2 for invalid input, 130: Ctrl-C."""
    with best_effort_output():
        try:
            return _carry_out(_parse(argv))
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
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the finished runs below a folder into a file, a line each")
    packing.add_argument("runs", metavar="FOLDER", type=Path, help="the folder of a sweep, runs/<prefix>")
    packing.add_argument("file", metavar="FILE", type=Path, help="runs that the file already has are kept")
    unpacking = commands.add_parser("unpack", help="write the runs of a file into a folder, where a sweep finds them")
    unpacking.add_argument("file", metavar="FILE", type=Path)
    unpacking.add_argument("runs", metavar="FOLDER", type=Path, help="the folder of a sweep; its own results are kept")
    return parser.parse_args(argv)


def _carry_out(args: argparse.Namespace) -> int:
    if args.command == "unpack":
        written, kept = unpack(args.file, args.runs)
        print(f"{args.runs}: {written} runs written, {kept} were there")
        return 0
    number, problems = pack(args.runs, args.file)
    for path, problem in problems:
        print(f"problem: {path}: {problem}", file=sys.stderr)
    print(f"{args.file}: {number} runs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
