"""A seeded fuzzer of configurations, command lines, data files and run folders.

    python tests/fuzz.py --minutes 60 [--seed N]

Whatever is asked for, the command line must answer with an exit code of its own (0, 1, 2 or 130), without a traceback,
and bad input (2) with one line. First come the attacks that once succeeded (``tests/support/findings.py``), then new
ones. Each follows from its number, which is printed where a case fails: ``--seed`` begins with it.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.attacks import Fault, Place, answer, new_place
from support.damage import damaged, outcome
from support.small_runs import small_data

from pycil_wsc.config.completion import known_keys

HARMLESS_TO_RUN = [
    "seed",
    "shuffle",
    "model_name",
    "memory_per_class",
    "exemplars",
    "batch_size",
    "precision",
    "analyse",
    "optimizer",
    "betas",
    "clip_norm",
    "label_smoothing",
    "warmup_epochs",
    "min_lr",
    "scheduler",
    "schedule_unit",
    "backbone_lr_factor",
    "layer_decay",
    "freeze",
    "wsc.retain",
    "wsc.reset",
    "wsc.importance",
    "wsc.trigger",
]
HOSTILE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    0.5,
    -0.5,
    1e300,
    1e-300,
    10**6,
    2**32,
    2**63,
    10**30,
    "",
    "x",
    "none",
    "auto",
    "../..",
    "a/b",
    "a\0b",
    "a\nb",
    "\ud800",
    "é",
    "x" * 300,
    "npz:",
    "folder:",
    "npz:~nosuchuser/x",
    [],
    [[]],
    [None],
    [1],
    [0, 1],
    [2, 1],
    [1, 1.5],
    [""],
    {},
    {"a": 1},
    {"updates_like": "replay"},
    {"epochs_times": 0.5},
    [[1], [2]],
    "every",
    "replay",
    "wsc",
    "foster",
    "cuda:7",
    ["0", "1"],
    "=",
    "1e5",
    "adamw",
    "cosine",
    "iteration",
    ["backbone"],
    ["stage1"],
    [0.5, 0.9],
    [0.5],
    "drift",
    ["drift"],
    "random",
    "held_out",
    "hessian",
]
OPTIONS = [
    "--set",
    "--device",
    "--workers",
    "--gpus-per-run",
    "--out",
    "--data-root",
    "--dry-run",
    "--status",
    "--measure",
    "--tensorboard",
    "--nonsense",
    "--config",
]


def hostile_keys(place: Place, rng: random.Random) -> None:
    """Keys with invalid values; only a dry run."""
    names = rng.choices([*known_keys(), "runs", "budget", "wsc", "nonsense", ""], k=rng.randint(1, 3))
    place.run({name: rng.choice(HOSTILE) for name in names}, "--dry-run")


def hostile_run(place: Place, rng: random.Random) -> None:
    """Invalid keys that cannot lead to hours of training; the run is executed."""
    place.run({name: rng.choice(HOSTILE) for name in rng.choices(HARMLESS_TO_RUN, k=2)})


def hostile_tasks(place: Place, rng: random.Random) -> None:
    """Lists of data sets as tasks, some of which are invalid."""
    for name in ("dataset", "init_cls", "increment"):
        del place.settings[name]
    other = small_data(place.folder / "other.npz", classes=rng.choice([1, 3]), per_class=2, size=rng.choice([8, 8, 10]))
    names = [f"npz:{place.data}", f"npz:{other}", rng.choice(HOSTILE)]
    place.run({"tasks": rng.choices(names, weights=[3, 3, 1], k=rng.randint(1, 3))}, *rng.choice([[], ["--dry-run"]]))


def hostile_command(place: Place, rng: random.Random) -> None:
    arguments = ["--config", place.config({}), "--dry-run"]
    for _ in range(rng.randint(1, 3)):
        arguments.append(rng.choice(OPTIONS))
        value = rng.choice(HOSTILE)
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += rng.choice([[], [text], [f"{rng.choice([*known_keys(), '', 'wsc'])}={text}"]])
    answer(arguments)


def hostile_config_file(place: Place, rng: random.Random) -> None:
    """A file that is not valid JSON, or not an object."""
    path = Path(place.config({}))
    path.write_bytes(damaged(path.read_bytes(), rng))
    answer(["--config", str(path), "--dry-run"])


def hostile_bytes(place: Place, rng: random.Random) -> None:
    """The data file, damaged at a random place."""
    place.data.write_bytes(damaged(place.data.read_bytes(), rng))
    place.run({}, "--dry-run")


def hostile_arrays(place: Place, rng: random.Random) -> None:
    """Arrays of other shapes and types, with correct checksums."""
    with np.load(place.data) as file:
        arrays: dict[str, Any] = dict(file)
    name = rng.choice([*arrays, "classes"])
    usual = arrays.get(name, np.array(["a", "b"]))
    arrays[name] = rng.choice(
        [
            usual[:0],
            usual[:1],
            usual[None],
            usual[..., None],
            usual.astype("U3"),
            np.array(3),
            np.array("x"),
            usual.astype(bool),
            usual[::-1],
            usual.repeat(2, -1),
            *(
                []
                if usual.dtype.kind == "U"
                else [usual.astype(float) * np.nan, -usual.astype(int), usual.astype(">u8") + 2**62]
            ),
        ]
    )
    np.savez(place.data, **arrays)
    place.run({}, "--dry-run")


def hostile_header(place: Place, rng: random.Random) -> None:
    """A wrong array header, in an archive with correct checksums."""
    with zipfile.ZipFile(place.data) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(parts))
    lies = [
        ("(6,", "(-1,"),
        ("(6,", "(10**20,"),
        ("(6,", f"({10**20},"),
        ("6", "7"),
        ("|u1", "|O8"),
        ("False", "None"),
        ("'", "["),
        ("{", "{" * 90),
    ]
    old, new = (text.encode() for text in rng.choice(lies))
    header = parts[name][:128].replace(old, new, 1)[:127]
    parts[name] = header.rstrip(b"\n ").ljust(127) + b"\n" + parts[name][128:]
    with zipfile.ZipFile(
        place.data, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    ) as archive:
        for entry, content in parts.items():
            archive.writestr(entry, content)
    place.run({}, "--dry-run")


def hostile_folder(place: Place, rng: random.Random) -> None:
    """A run's files, damaged: they are refused, the run is repeated, or its result stays as it was.

    Only ``result.json`` itself has no checksum: with other digits it is taken for the result.
    """
    place.run({"save_weights": rng.choice([True, False])})
    (result,), harms = place.out.rglob("result.json"), {}
    before = outcome(result)
    files = sorted(path for path in place.out.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in rng.sample(files, min(len(files), 2)):
        harms[path] = harm = rng.choice(["damage", "damage", "remove", "folder", "loop"])
        content = path.read_bytes()
        path.unlink()
        if harm == "damage":
            path.write_bytes(damaged(content, rng))
        elif harm == "folder":
            path.mkdir()
        elif harm == "loop":
            path.symlink_to(path.name)
    code, *printed = place.run({}, *rng.choice([[], ["--dry-run"]]))
    used = code == 0 and result.is_file() and harms.get(result) != "damage"
    if used and outcome(result) != before:
        raise Fault(f"another result than before {harms}: {printed}")


ATTACKS: list[Callable[[Place, random.Random], None]] = [
    *(6 * [hostile_keys]),
    *(4 * [hostile_command]),
    *(2 * [hostile_config_file]),
    *(3 * [hostile_bytes]),
    *(3 * [hostile_arrays]),
    *(3 * [hostile_header]),
    hostile_run,
    hostile_tasks,
    hostile_folder,
]


def attack(number: int) -> str:
    """Run case ``number`` in a folder of its own; returns its name."""
    rng = random.Random(number)
    chosen = rng.choice(ATTACKS)
    with (
        new_place() as place,
        contextlib.chdir(place.folder) if hasattr(contextlib, "chdir") else contextlib.nullcontext(),
    ):
        try:
            chosen(place, rng)
        except Fault as fault:
            raise Fault(f"case {number}, {chosen.__name__}: {fault}") from None
    return chosen.__name__


def fuzz(minutes: float, first: int) -> int:
    """Attack for the given time, starting with case ``first``; returns the number of faults."""
    from support.findings import FIXED, check  # which need not be there to attack at random

    end, faults, number = time.monotonic() + 60 * minutes, 0, first
    for finding in FIXED:
        try:
            check(finding)
        except AssertionError as fault:
            faults += 1
            print(f"{finding}: {fault}\n", flush=True)
    for number in itertools.count(first):
        if time.monotonic() > end:
            break
        try:
            attack(number)
        except Fault as fault:
            faults += 1
            print(f"{fault}\n", flush=True)
    print(f"{number - first} cases, {faults} faults")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first case")
    args = parser.parse_args()
    sys.exit(bool(fuzz(args.minutes, args.seed)))
