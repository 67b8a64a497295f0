"""Run the experiments that a JSON file describes. See README.md."""

import argparse
import logging
import os
import signal
import sys

EXAMPLES = """examples:
  python main.py --config exps/quickstart.json                    Replay and WSC on scikit-learn's digits, two minutes
  python main.py --config exps/wsc.json --data-root ~/data        WSC as in the paper, on CIFAR-100
  python main.py --config exps/wsc.json --set memory_per_class=[20,200] --set wsc.retain=0.5
  python main.py --config exps/wsc.json --dry-run                 the runs and their cost in training images
  python main.py --config exps/wsc.json --workers 4               four runs at a time on this machine
  python main.py --config exps/wsc.json --workers 2 --ray         two on each GPU of a Ray cluster
  torchrun --nproc-per-node 8 main.py --config exps/trace.json    a language model on eight GPUs
Starting the same command again goes on where it stopped and skips what is finished.
"""


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="JSON file of the experiment; a list where one value is expected is an axis of the sweep",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the file (JSON value; repeatable; nested keys with a dot)",
    )
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets (default: data)")
    parser.add_argument("--out", metavar="DIR", help="folder of the results (default: runs)")
    parser.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="write scalars for TensorBoard beside each run's results (needs tensorboard)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="runs at a time, in processes that share cores and GPUs (default: 1); with --ray on each GPU, or each node without one",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on a Ray cluster: the one at ADDRESS, or one that is found or started here (needs requirements-cluster.txt)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their cost, and stop")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # several processes on each run
        from pycil_wsc.llm.torchrun import together  # an extra

        return together(lambda: work(args))
    return work(args)


def work(args):
    from pycil_wsc.config.loading import load, parse_override  # after parsing: --help need not wait for torch
    from pycil_wsc.errors import UserError
    from pycil_wsc.runs.sweep import dry_run, sweep

    logging.raiseExceptions = False  # a log line that cannot be written stops nothing
    try:
        overrides = dict(map(parse_override, args.set))
        overrides |= {key: value for key in ("data_root", "out", "device") if (value := getattr(args, key)) is not None}
        overrides |= {"tensorboard": True} if args.tensorboard else {}
        configs = load(args.config, overrides)
        return dry_run(configs) if args.dry_run else sweep(configs, args.workers, args.ray)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what clusters send: like Ctrl-C
    sys.exit(main())
