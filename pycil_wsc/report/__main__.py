"""python -m pycil_wsc.report FOLDER...: tables and figures of the runs below the folders."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pycil_wsc.errors import UserError
from pycil_wsc.output import best_effort_output
from pycil_wsc.report import find_runs, write_found
from pycil_wsc.report.groups import DEFAULT, Options, group_runs
from pycil_wsc.report.names import clean
from pycil_wsc.report.studies import STUDIES
from pycil_wsc.report.views import baseline_of
from pycil_wsc.results import Record


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code: 0, 2 for invalid input, or 130 after Ctrl-C."""
    with best_effort_output():
        args = _parse(argv)
        try:
            labels = tuple(map(_label, args.label))
            options = Options(args.spread, args.baseline, labels, args.paper, args.all_figures)
            print(f"Report: {clean(run(args.folders, args.out, options))}")
            return 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped; run the same command to write the report", file=sys.stderr)
            return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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
    add("--label", action="append", default=[], metavar="PATTERN=NAME", help=of_label)
    add("--no-paper", dest="paper", action="store_false", help="do not show the paper's numbers beside ours")
    add("--all-figures", action="store_true", help=of_figures)
    return parser.parse_args(argv)


def _label(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name.strip():
        raise UserError(f"--label {clean(text)}: expected PATTERN=NAME")
    return pattern, name


def run(folders: Sequence[str], out: str | None, options: Options) -> Path:
    """Write the report of the folders and print the problems of their files; returns the page's path."""
    for folder in folders:
        if not os.path.lexists(folder):
            raise UserError(f"{clean(folder)}: no such file or folder")
    found = find_runs(folders)
    for path, reason in found.problems:
        print(f"problem: {clean(path)}: {clean(reason)}", file=sys.stderr)
    if not found.records and not found.language:
        raise UserError(
            f"{clean(', '.join(folders))}: no finished run found (no usable result.json); "
            "give the folder of a sweep, runs/<prefix>"
        )
    if options.baseline != DEFAULT.baseline:
        _check_baseline(found.records, options)
    common = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))
    beside = (common if common.is_dir() else common.parent) / "report"
    return write_found(found, folders, Path(out) if out else beside, options)


def _check_baseline(records: Sequence[Record], options: Options) -> None:
    present: set[str] = set()
    for group in group_runs(records, options)[0]:
        rows = STUDIES[0].rows_of(group)
        if baseline_of(group, rows):
            return
        present |= set(rows["own"])
    raise UserError(
        f"--baseline {clean(options.baseline)}: no method or row of the table of average accuracies; "
        f"available: {clean(', '.join(sorted(present))) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
