"""The command line: ``python main.py`` or ``pycil-wsc``. See README.md."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from pycil_wsc.errors import UserError, lack_of_memory, one_line
from pycil_wsc.files import Json
from pycil_wsc.launch.interrupts import interrupt, on_signals
from pycil_wsc.output import Parser, best_effort_output

if TYPE_CHECKING:
    from pycil_wsc.config.run_config import RunConfig

STOPPED = "\nstopped; the same command resumes from here"
DESCRIPTION = "Run the experiments that a JSON file describes. See README.md."
EXAMPLES = """examples:
  python main.py --config exps/quickstart.json                    Replay and WSC on scikit-learn's digits, two minutes
  python main.py --config exps/wsc.json --data-root ~/data        Weight Space Consolidation on CIFAR-100
  python main.py --config exps/wsc.json --set 'memory_per_class=[20,200]' --set wsc.retain=0.5
  python main.py --config exps/wsc.json --dry-run                 the runs and their cost in training images
  python main.py --config exps/wsc.json --workers 4               four runs at a time on this machine
  python main.py --config exps/wsc.json --workers 2 --ray         two on each GPU of a Ray cluster
  python main.py --config exps/wsc.json --gpus-per-run 8          each run on eight GPUs of this machine
  torchrun --nproc-per-node 8 main.py --config one_run.json       one run, also on several machines
To resume a stopped command, start it again: finished runs are skipped.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to run").add_argument
    text = "JSON file of the experiment; a list in place of a single value sweeps over its values"
    what("--config", required=True, metavar="FILE", help=text)
    text = "override a key of the file (repeatable); the value is JSON, a nested key has a dot"
    what("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    what("--data-root", metavar="DIR", help="folder of the data sets (default: data)")
    what("--out", metavar="DIR", help="folder of the results (default: runs)")
    text = "repeat finished runs, for example after a change of code; old results are kept as result.old.json"
    what("--redo", action="store_true", help=f"{text}, other files of the runs are removed")
    text = "write scalars for TensorBoard beside each run's results (needs tensorboard)"
    what("--tensorboard", action="store_true", help=text)
    text = "write the same scalars for Weights & Biases, offline: wandb sync uploads them (needs wandb)"
    what("--wandb", action="store_true", help=text)

    where = parser.add_argument_group("where to run it").add_argument
    where("--device", metavar="NAME", help="auto, cpu, cuda, mps, xpu, or one of several: cuda:1 (default: auto)")
    text = "runs at a time, in processes that share cores and GPUs (default: 1); with --ray, on each GPU"
    where("--workers", type=int, metavar="N", help=f"{text} or, without GPUs, on each node")
    text = "run on a Ray cluster: the one at ADDRESS, or one that is found or started here"
    where("--ray", nargs="?", const="", metavar="ADDRESS", help=f"{text} (needs requirements-cluster.txt)")
    text = "train each run in N processes, as torchrun does, on N GPUs of this machine or, with --ray, of one node"
    where("--gpus-per-run", type=int, metavar="N", help=f"{text}; without GPUs, on the CPU")

    instead = parser.add_argument_group("instead of running it").add_argument
    instead("--dry-run", action="store_true", help="check the file and the data, and list the tasks and the runs")
    text = "with --dry-run: train a few steps of each method and phase, and estimate the hours on this machine"
    instead("--measure", action="store_true", help=text)
    instead("--status", action="store_true", help="show which runs are done, running, waiting or failed")

    args = parser.parse_args(argv)
    if args.redo and (args.dry_run or args.status):
        parser.error("--redo cannot be combined with --dry-run or --status, which train nothing")
    if args.status and args.dry_run:
        parser.error("--status cannot be combined with --dry-run; give one of the two")
    if args.measure and not args.dry_run:
        parser.error("--measure needs --dry-run")
    if args.measure and args.ray is not None:
        parser.error("--measure is for this machine, not for Ray")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 if a run failed, 2 for invalid input, 130 after Ctrl-C."""
    with best_effort_output():
        if argv is None:
            on_signals(_leave)
        args = parse(argv)
        try:
            return _run(args, as_program=argv is None)
        except UserError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # the only process, or torchrun's first on this machine
                print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(STOPPED, file=sys.stderr)
            return 130
        except Exception as error:
            from pycil_wsc.devices import out_of_memory  # imported late: torch takes a second

            if not out_of_memory(error):
                raise
            print(f"error: {one_line(lack_of_memory(error))}", file=sys.stderr)
            return 2


def _leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal during imports, where an exception would turn into another one, with a traceback."""
    with contextlib.suppress(OSError):
        os.write(2, f"{STOPPED}\n".encode())
    os._exit(130)


def _run(args: argparse.Namespace, as_program: bool) -> int:
    from pycil_wsc.config.loading import load, parse_override  # imported late: --help does not need torch
    from pycil_wsc.llm.kind import LanguageModel  # noqa: F401  # registers it, for what `load` reads

    overrides: dict[str, Json] = dict(map(parse_override, args.set))
    overrides |= _keys_of_options(args)

    def configs() -> "list[RunConfig]":
        return load(args.config, overrides)

    def work(configs: "Sequence[RunConfig]") -> int:
        if as_program:
            on_signals(interrupt)
        if args.status:
            from pycil_wsc.launch.status import status

            return status(configs)
        from pycil_wsc.launch.sweep import Where, dry_run, sweep  # later still: once the file is valid

        where = Where(args.workers, args.ray, args.gpus_per_run)
        return dry_run(configs, where, args.measure) if args.dry_run else sweep(configs, where, args.redo)

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return work(configs())
    if (args.workers, args.ray, args.gpus_per_run) != (None, None, None):
        raise UserError(
            "torchrun: its processes train one run together; for --workers, --ray or --gpus-per-run use python"
        )
    from pycil_wsc.launch.torchrun import together

    return together(configs, work, trains=not args.status and not args.dry_run)


def _keys_of_options(args: argparse.Namespace) -> dict[str, Json]:
    """The keys that have an option of their own on the command line, and were given."""
    keys: dict[str, Json] = {}
    for name in ("data_root", "out", "device"):
        value = getattr(args, name)
        if value is not None:
            keys[name] = value
    for name in ("tensorboard", "wandb"):
        if getattr(args, name):
            keys[name] = True
    return keys
