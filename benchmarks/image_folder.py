"""Start of a run on a folder of ImageNet-100's size, made of small JPEG files: seconds and memory.

    python benchmarks/image_folder.py --out results/benchmarks/image_folder/image-folder-cpu.json
    python benchmarks/image_folder.py --images 2600 --caches false memory

The folder has ``--images`` training files in 100 classes and one validation file for 26 of them. Of each class one
image is encoded (40x32 to 80x64 pixels); its files differ in a comment. They are opened, read and decoded as any
others, but take 4 kB each on the disk in place of 110.

With each value of ``cache_images`` the command line is started twice, at first without what the value keeps, and ends
after its first training step (ResNet-32, images of side 32). Reported are the seconds until then, and the CPU seconds
of all processes but the workers that decode for the step, of which

* imports: until the command line begins;
* listing: the walk through the folder;
* fingerprint: the sizes of all files;
* cache: what ``cache_images`` keeps is made, or compared with the files;
* step: from the beginning of the first epoch, workers included, to the end of its first step.

Memory is the most that the main process has had until then, and what it and the workers have at the first step, pages
that they share being counted once.
"""

import argparse
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BEGUN = time.time()
CLASSES, FOR_VALIDATION = 100, 26
CACHES = {"false": False, "memory": "memory", "device": "device"}
SETTINGS = {"model_name": "replay", "convnet_type": "resnet32", "image_size": 32, "init_cls": 10, "increment": 10}
SETTINGS |= {"device": "cpu", "cache_first_task": False}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=130_000, help="training files in the folder")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["false", "memory"])
    parser.add_argument("--workers", type=int, default=2, help="processes that decode")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "made_imagenet"), help="kept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first-step", nargs=2, help=argparse.SUPPRESS)  # what this command starts
    args = parser.parse_args()
    if args.first_step:
        return first_step(*args.first_step)
    made = args.folder / str(args.images)
    settings = SETTINGS | {"batch_size": args.batch_size}
    record = {"images": args.images, "making_seconds": make(made, args.images), "workers": args.workers}
    record["caches"] = {}
    for name in args.caches:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            record["caches"][name] = {
                when: started(settings, made, CACHES[name], args.workers, Path(scratch)) for when in ("first", "again")
            }
        print(name, json.dumps(record["caches"][name], indent=2), flush=True)
    from record import origin, write
    from torch import device

    write(record | settings | origin(device("cpu")), args.out)


# ---- the folder ------------------------------------------------------------------------------------------------------


def make(folder, images):
    """Write the files; returns the seconds that it took, or None if they are there."""
    if (folder / "made").exists():
        return None
    import numpy as np

    rng, begun = np.random.default_rng(0), time.perf_counter()
    for label in range(CLASSES):
        start, rest = encoded(rng)
        for part, count in (("train", images // CLASSES), ("val", images // CLASSES // FOR_VALIDATION)):
            place = folder / part / f"n{label:08}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                comment = f"{part} {number}".encode()
                segment = b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment
                (place / f"{place.name}_{number}.JPEG").write_bytes(start + segment + rest)
    (folder / "made").touch()
    return time.perf_counter() - begun


def encoded(rng):
    """A smooth random image as JPEG: the marker at its start, and the rest."""
    from PIL import Image

    width, height = (round(side * rng.uniform(1, 2)) for side in (40, 32))
    noise = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype="uint8"))
    noise.resize((width, height), Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=90)
    return buffer.getvalue()[:2], buffer.getvalue()[2:]


# ---- a run until its first step --------------------------------------------------------------------------------------


def started(settings, folder, cache, workers, scratch):
    """Start the command line with ``settings`` and ``cache_images`` as ``cache``; what :func:`first_step` measured."""
    keys = {"dataset": f"folder:{folder}", "cache_images": cache, "num_workers": workers}
    keys |= {"data_root": str(scratch / "data"), "out": str(scratch / "runs")}
    (config := scratch / "config.json").write_text(json.dumps(settings | keys))
    (measured := scratch / "measured.json").unlink(missing_ok=True)
    shutil.rmtree(scratch / "runs", ignore_errors=True)
    command = [sys.executable, __file__, "--first-step", str(config), str(measured)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not measured.exists():
        sys.exit(f"{' '.join(map(str, command))}:\n{ended.stdout}{ended.stderr}")
    return json.loads(measured.read_text())


def first_step(config, out):
    """Run the command line until its first training step; writes what that took to ``out``."""
    import torch

    import pycil_wsc.data.images.datasets
    import pycil_wsc.runs.class_incremental
    import pycil_wsc.runs.run
    from pycil_wsc.devices import peak_memory
    from pycil_wsc.launch.command import main as command

    device, peaks, spent = torch.device("cpu"), [], defaultdict(lambda: [0.0, 0.0], imports=clock())
    run, reset = pycil_wsc.runs.run, pycil_wsc.runs.run.reset_peak_memory

    def reset_peak(device):
        peaks.append(peak_memory(device))
        reset(device)

    def epoch_begins(run, *_):
        spent["step"] = clock()

    def step_ended(run, *_):
        spent["start"] = clock()
        spent["step"] = [now - then for now, then in zip(spent["start"], spent["step"])]
        measured = {
            kind: {name: both[number] for name, both in spent.items()}
            for number, kind in enumerate(("seconds", "cpu_seconds"))
        }
        memory = {"peak_memory_bytes": max(*peaks, peak_memory(device)), "all_memory_bytes": proportional_memory()}
        Path(out).write_text(json.dumps(measured | memory))
        raise KeyboardInterrupt

    with (
        patch.object(run, "reset_peak_memory", reset_peak),
        patch.object(run.Run, "phase_started", epoch_begins),
        patch.object(run.Run, "step", step_ended),
        timed(spent, "listing", pycil_wsc.data.images.datasets, "read_folder"),
        timed(spent, "fingerprint", pycil_wsc.data.images.datasets, "fingerprint"),
        timed(spent, "cache", pycil_wsc.runs.class_incremental, "for_training"),
    ):
        return command(["--config", config])


def clock():
    """Seconds since this process began, and CPU seconds of it and of its processes that have ended."""
    return [time.time() - BEGUN, sum(os.times()[:4])]


def timed(spent, name, module, function):
    """A context in which ``spent[name]`` adds up the two clocks' time in a function of ``module``."""
    work = getattr(module, function)

    def counted(*arguments):
        begun = clock()
        try:
            return work(*arguments)
        finally:
            spent[name] = [total + now - then for total, now, then in zip(spent[name], clock(), begun)]

    return patch.object(module, function, counted)


def proportional_memory():
    """Bytes of this process and its workers; a page that n processes share counts as 1/n in each. None: not Linux."""
    numbers = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    try:
        texts = [Path(f"/proc/{number}/smaps_rollup").read_text() for number in numbers]
    except OSError:
        return None
    return sum(1024 * int(re.findall(r"^Pss:\s*(\d+)", text, re.MULTILINE)[0]) for text in texts)


if __name__ == "__main__":
    sys.exit(main())
