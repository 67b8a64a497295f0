"""Cost of training a language model: tokens per second, fraction of the device's peak, peak memory; methods compared.

    python benchmarks/language_model.py --methods replay wsc slerp magmax --peak 989e12 --out
    results/benchmarks/language_model/language-model-gpu.json

A Llama of the given sizes (default: those of Llama-3.2-1B) with random weights learns one task of random tokens:
``--steps`` optimiser steps of ``--items`` sequences. The methods alternate, ``--repeats`` times. All steps count as
the replay epoch, so WSC is active in all of them. ``tokens_per_cpu_second`` counts the CPU time of this process, for a
machine that has other work.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from record import origin, write
from roofline import now
from transformers import TrainerCallback

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.loading import resolve
from pycil_wsc.devices import peak_memory, release_memory, reset_peak_memory, resolved_device
from pycil_wsc.llm.corpus import Epoch, Step
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.tokens import Example, Tokenizer
from pycil_wsc.llm.training import TaskTrainer, consolidation, training_arguments
from pycil_wsc.training.precision import resolved_precision
from pycil_wsc.training.processes import Processes

SIZES = {"hidden_size": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "mlp_size": 8192}


THREADS = torch.get_num_threads()
WARM = 2  # steps before those that are timed


class Vocabulary:
    """The attributes of a tokeniser that the model needs."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["replay", "wsc"],
        help="each may be followed by keys in the same word, such as 'replay llm.shard=true threads=2'",
    )
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--items", type=int, default=64, help="sequences per step")
    parser.add_argument(
        "--longest", type=int, default=1536, help="tokens of the longest sequence; a third of each is its answer"
    )
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peak", type=float, help="the device's peak in floating-point operations per second, at the precision used"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, timings = Processes().device(resolved_device(args.device)), {name: [] for name in args.methods}
    for _ in range(args.repeats):
        for name in args.methods:
            timings[name].append(timed(name, args, device))
            print(name, json.dumps(timings[name][-1]), flush=True)
    methods = {name: summary(records, args.peak) for name, records in timings.items()}
    for record in methods.values():
        record[f"time_over_{args.methods[0]}"] = (
            methods[args.methods[0]]["tokens_per_second"] / record["tokens_per_second"]
        )
    sizes = {name: getattr(args, name) for name in (*SIZES, "vocabulary", "steps", "items", "longest", "micro_tokens")}
    record = {"methods": methods, **sizes} | origin(device)
    print(json.dumps(record, indent=2))
    write(record, args.out)


def timed(method, args, device):
    """Tokens, seconds, peak memory and parameters of one task."""
    method, *more = method.split()
    sizes = {f"llm.{name}": getattr(args, name) for name in (*SIZES, "micro_tokens")}
    config = resolve(
        {
            "llm.model": "tiny-llama",
            "llm.method": method,
            "llm.batch_size": args.items,
            "device": args.device,
            "precision": args.precision,
            **sizes,
            **{name: json.loads(value) for name, value in (key.split("=") for key in more)},
        }
    )
    torch.set_num_threads(config.threads or THREADS)
    keep_freed_memory(device)
    release_memory()
    reset_peak_memory(device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        args.longest // 4, args.longest + 1, ((args.steps + WARM) * args.items,), generator=generator
    ).tolist()
    examples = [
        Example(tuple(torch.randint(3, args.vocabulary, (length,), generator=generator).tolist()), length - length // 3)
        for length in lengths
    ]
    epochs = [Epoch(0, 1, False, examples), Epoch(0, 1, True, examples)]
    steps = []
    for number in range(args.steps + WARM):
        chosen = examples[number * args.items : (number + 1) * args.items]
        task = int(number >= WARM)
        steps.append(Step(task, epochs[task], number, args.steps, chosen))
    timer, processes = Timer(device), Processes()
    trainer = TaskTrainer(
        config,
        load_model(config, cast(Tokenizer, Vocabulary(args.vocabulary))),
        Vocabulary.pad_token_id,
        steps,
        training_arguments(config, len(steps), device, processes),
        processes,
        [*consolidation(config, steps), timer],
    )
    timer.counts = trainer.counts
    trainer.train()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "tokens": trainer.counts["tokens"] - timer.before,
        "seconds": timer.seconds,
        "cpu_seconds": timer.cpu_seconds,
        "memory": peak_memory(device),
        "parameters": parameters,
        "precision": resolved_precision(config.precision, device),
    }


class Timer(TrainerCallback):
    """Times the steps after the warm ones, with the last average."""

    def __init__(self, device):
        self.device, self.counts = device, {}
        self.before, self.seconds, self.cpu_seconds = 0, 0.0, 0.0

    def on_step_end(self, args, state, control, **others):
        if state.global_step == WARM:
            self.before = self.counts["tokens"]
            self.started, self.cpu_started = now(self.device), time.process_time()
        elif state.global_step == state.max_steps:
            self.seconds, self.cpu_seconds = now(self.device) - self.started, time.process_time() - self.cpu_started


def summary(records, peak):
    """Medians. Operations are 6 per token and parameter; attention and recomputation are not counted."""
    speeds = [record["tokens"] / record["seconds"] for record in records]
    speed = statistics.median(speeds)
    share = 6 * records[0]["parameters"] * speed / peak if peak else None
    return {
        "tokens_per_second": speed,
        "range": [min(speeds), max(speeds)],
        "tokens_per_cpu_second": statistics.median(record["tokens"] / record["cpu_seconds"] for record in records),
        "share_of_peak": share,
        "peak_memory_bytes": max(record["memory"] for record in records),
        "parameters": records[0]["parameters"],
        "precision": records[0]["precision"],
    }


if __name__ == "__main__":
    main()
