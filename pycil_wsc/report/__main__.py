"""python -m pycil_wsc.report FOLDER...: tables and figures of the runs below the folders."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pycil_wsc.errors import UserError, lack_of_memory, one_line
from pycil_wsc.output import Parser, best_effort_output
from pycil_wsc.report import DEFAULT, Options, find_runs, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code: 0, 2 for invalid input, or 130 after Ctrl-C."""
    with best_effort_output():
        try:
            args = _parse(argv)
            options = Options(args.spread, args.baseline, tuple(args.labels), args.paper, args.all_figures)
            print(f"Report: {one_line(_write(args.folders, args.out, options))}")
            return 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except MemoryError as error:
            print(f"error: {lack_of_memory(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped; run the same command to write the report", file=sys.stderr)
            return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pycil_wsc.report", description="Write tables and figures of the runs below some folders."
    )
    add = parser.add_argument
    of_folders = "folders with result.json files, at any depth; or such files themselves"
    of_out = "output folder (default: report, in the folder or in the common parent of the folders)"
    of_spread = "what ± and error bars show: standard error of the mean, or standard deviation (default: se)"
    of_baseline = "the method that the others are compared with over equal seeds (default: replay, if it has runs)"
    of_label = (
        "show methods or data sets that match the pattern under this name (repeatable, the first match is used), "
        "as in --label 'wsc=WSC (ours)' --label 'npz:*/pets.npz=Pets'"
    )
    of_figures = "draw every figure; by default, the report of a large sweep omits some and says which"
    add("folders", nargs="+", metavar="FOLDER", help=of_folders)
    add("--out", metavar="DIR", help=of_out)
    add("--spread", choices=("se", "sd"), default="se", help=of_spread)
    add("--baseline", metavar="NAME", default=DEFAULT.baseline, help=of_baseline)
    add("--label", dest="labels", type=_label, action="append", default=[], metavar="PATTERN=NAME", help=of_label)
    add("--no-paper", dest="paper", action="store_false", help="do not show the paper's numbers beside ours")
    add("--all-figures", action="store_true", help=of_figures)
    return parser.parse_args(argv)


def _label(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name.strip():
        raise UserError(f"--label {text}: expected PATTERN=NAME")
    return pattern, name


def _write(folders: Sequence[str], out: str | None, options: Options) -> Path:
    """Write the report of the folders and print the problems of their files; returns the page's path."""
    for folder in folders:
        if not os.path.lexists(folder):
            raise UserError(f"{folder}: no such file or folder")
    runs = find_runs(folders)
    for path, reason in runs.problems:
        print(f"problem: {one_line(path)}: {one_line(reason)}", file=sys.stderr)
    if not runs.records and not runs.language:
        unusable = "no finished run found (no usable result.json); give the folder of a sweep, runs/<prefix>"
        raise UserError(f"{', '.join(folders)}: {unusable}")
    common = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))
    beside = (common if common.is_dir() else common.parent) / "report"
    return write_report(*folders, out=out or beside, options=options, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
