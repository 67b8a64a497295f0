"""python -m pycil_wsc.report FOLDER...: tables and figures of the runs below the folders."""

import argparse
import os
import sys
from pathlib import Path

from pycil_wsc.errors import UserError
from pycil_wsc.report import find_runs, write_found


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m pycil_wsc.report", description="Write tables and figures of the runs below some folders."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="where result.json files are, at any depth")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the report goes (default: report, in the folder or in the one that holds all the folders)",
    )
    args = parser.parse_args(argv)
    try:
        print(f"Report: {run(args.folders, args.out)}")
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(folders, out):
    if absent := [folder for folder in folders if not Path(folder).exists()]:
        raise UserError(f"{absent[0]}: there is no such folder")
    found = find_runs(folders)
    for path, reason in found.problems:
        print(f"skipped: {path}: {reason}", file=sys.stderr)
    if not found.records and not found.language:
        raise UserError(
            f"{', '.join(folders)}: no finished run below (no usable result.json); name the folder that a sweep wrote, runs/<prefix>"
        )
    return write_found(
        found,
        folders,
        Path(out) if out else Path(os.path.commonpath([os.path.abspath(folder) for folder in folders])) / "report",
    )


if __name__ == "__main__":
    sys.exit(main())
