"""Updates of one photograph, by the number of classes; and what many files take of the memory.

    python benchmarks/small_updates.py --out results/benchmarks/small_updates/small-updates-cpu.json

**Updates**: learners of random pictures of 224 pixels on EfficientNet-Lite0 with random weights, which costs what the
pre-trained one does. Each update brings one picture of a known class. In CPU seconds of one thread: the forward pass of
the picture and the update (medians of pairs), one in which RanPAC chooses its ridge again, and a save after an update,
with the bytes that it writes; and the bytes of the learner's files.

**In a row**: the same on a small network, over many updates that are each saved; and the memory of the
process, which is a new one for each method.

**Files**: in a new process for each number of JPEGs of 32 x 32 pixels in a folder, the peaks of its memory while they
are listed, checked and learned (NCM), and while the learner is saved; and its bytes.

What is not measured stays as it is in the record, which names the commit of each part.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from record import origin, write

from pycil_wsc import Learner
from pycil_wsc.data.images.sources import read_source

KEYS = {"adapt": False, "device": "cpu", "threads": 1, "quiet": True, "num_workers": 0}
LARGE = {"convnet_type": "timm:efficientnet_lite0", "image_size": 224}
SMALL = {"convnet_type": "resnet8", "image_size": 16}
METHODS = {"ncm": {}, "slda": {}, "ranpac": {"projection": 2000}}
FOLDERS = 100  # classes of the files
CONTENTS = 300  # pictures of the files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--classes", nargs="*", type=int, default=[10, 1000], help="none: not measured")
    parser.add_argument("--in-a-row", type=int, default=1000, help="0: not measured")
    parser.add_argument("--files", nargs="*", type=int, default=[10_000, 100_000, 1_000_000], help="none: not measured")
    parser.add_argument("--of-folder", type=Path, help="measure the files of this folder, and print what they take")
    parser.add_argument("--of-method", choices=list(METHODS), help="measure updates of it in a row, and print them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.of_folder:
        print(json.dumps(of_files(args.of_folder)))
        return
    if args.of_method:
        print(json.dumps(in_a_row(args.of_method, args.in_a_row)))
        return
    record = {"updates": {}, "in_a_row": {}, "files": {}, "commits": {}}
    if args.out and args.out.exists():
        record |= {part: measured for part, measured in json.loads(args.out.read_text()).items() if part in record}
    measured_now = {"updates": args.classes, "in_a_row": args.in_a_row, "files": args.files}
    for method in args.methods:
        for classes in args.classes:
            record["updates"][f"{method}, {classes} classes"] = measured = of_updates(method, classes)
            print(method, classes, json.dumps(measured), flush=True)
    if args.in_a_row:
        for method in args.methods:
            command = "--of-method", method, "--in-a-row", str(args.in_a_row)
            record["in_a_row"][method] = in_new_process(*command)
            print(f"{args.in_a_row} in a row", method, json.dumps(record["in_a_row"][method]), flush=True)
    for number in args.files:
        record["files"][str(number)] = measured = with_so_many_files(number)
        print(f"{number} files", json.dumps(measured), flush=True)
    place = origin(torch.device("cpu"))
    commit = place.pop("commit")
    record["commits"] |= {part: commit for part, asked in measured_now.items() if asked}
    write(record | place, args.out)


def pictures(labels: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    """Noise around a mean colour that tells the class."""
    colours = np.random.default_rng(0).integers(60, 196, (int(labels.max()) + 1, 1, 1, 3))
    return (colours[labels] + rng.integers(-60, 60, (len(labels), side, side, 3))).astype(np.uint8)


def of_updates(method: str, classes: int) -> dict:
    """The cost of one-picture updates of a learner with this many classes."""
    rng = np.random.default_rng(1)
    learner = Learner(method, **KEYS, **LARGE, **METHODS[method])
    labels = np.repeat(np.arange(classes), 20 if classes < 100 else 2)
    learner.learn((pictures(labels, LARGE["image_size"], rng), labels))
    picture = pictures(np.array([0]), LARGE["image_size"], rng)
    learner.predict(picture)

    def update():
        learner.learn((pictures(np.array([0]), LARGE["image_size"], rng), np.array([0])))

    update()
    pairs = [(*seconds_of(lambda: learner.predict(picture)), *seconds_of(update)) for _ in range(9)]
    forward, updated = (statistics.median(column) for column in zip(*pairs, strict=True))
    measured = {"forward_seconds": forward, "update_seconds": updated}
    if method == "ranpac":
        learner._state["learner"]["network.head.chosen"].zero_()
        measured["update_with_choice_seconds"] = seconds_of(update)[0]
    with tempfile.TemporaryDirectory() as folder:
        learner.save(folder)
        saves = []
        for _ in range(3):
            update()
            before = set(files_in(folder))
            seconds = seconds_of(lambda: learner.save(folder))
            written = sum(size for _, _, size in set(files_in(folder)) - before)
            saves.append((*seconds, written))
        measured["save_seconds"], measured["written_bytes"] = map(statistics.median, zip(*saves, strict=True))
        measured["bytes"] = learner.versions(folder)[-1]["bytes"]
    return measured


def files_in(folder: str) -> Iterator[tuple[int, int, int]]:
    """The inode, the time and the bytes of each file, which links to it share."""
    for path in Path(folder).rglob("*"):
        status = path.stat()
        if path.is_file():
            yield status.st_ino, status.st_mtime_ns, status.st_size


def in_a_row(method: str, updates: int) -> dict:
    """Seconds of update and save around each tenth of so many updates, medians of ten; the memory, and bytes saved."""
    rng = np.random.default_rng(1)
    learner = Learner(method, held_out=20, **KEYS, **SMALL, **METHODS[method])
    labels = np.repeat(np.arange(10), 30)
    learner.learn((pictures(labels, 16, rng), labels))
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for number in range(1, updates + 1):
            label = np.array([number % 10])
            image = pictures(np.arange(10), 16, rng)[label]
            update = seconds_of(lambda image=image, label=label: learner.learn((image, label)))
            times.append((*update, *seconds_of(lambda: learner.save(folder))))
            if number % (updates // 10) == 0:
                update, save = (statistics.median(column) for column in zip(*times[-10:], strict=True))
                measured[number] = {
                    "update_seconds": update,
                    "save_seconds": save,
                    "memory_mb": memory("VmRSS"),
                    "bytes": learner.versions(folder)[-1]["bytes"],
                }
    return measured


def seconds_of(function, times=1) -> list[float]:
    measured = []
    for _ in range(times):
        start = time.process_time()
        function()
        measured.append(time.process_time() - start)
    return measured


def in_new_process(*arguments: str) -> dict:
    """What this script prints with these arguments."""
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def with_so_many_files(number: int) -> dict:
    """What so many files take of the memory of a new process."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(1)
        for name in range(FOLDERS):
            Path(folder, f"class{name}").mkdir()
        contents = [jpeg(rng.integers(0, 256, (32, 32, 3), np.uint8)) for _ in range(CONTENTS)]
        for file in range(number):
            content = contents[file % CONTENTS]
            comment = b"\xff\xfe\x00\x0a" + file.to_bytes(8, "big")  # so that no two files are the same
            path = Path(folder, f"class{file % FOLDERS}", f"{file:07}.jpg")
            path.write_bytes(content[:2] + comment + content[2:])
        return in_new_process("--of-folder", folder)


def jpeg(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG")
    return content.getvalue()


def of_files(folder: Path) -> dict:
    """Peaks of the memory in each part, in MB, and the seconds that it takes."""
    source = f"folder:{folder}"
    learner = Learner("ncm", **KEYS, **SMALL)
    image = np.zeros((2, 16, 16, 3), np.uint8), np.arange(2)
    Learner("ncm", **KEYS, **SMALL).learn(image)  # so that all is imported
    measured = {"before_mb": memory()}
    with tempfile.TemporaryDirectory() as shelf:
        parts = {
            "listed": lambda: read_source(source, "."),
            "checked": lambda: learner.check(source),
            "learned": lambda: learner.learn(source),
            "saved": lambda: learner.save(shelf),
        }
        for name, part in parts.items():
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what it has now
            measured |= {f"{name}_seconds": seconds_of(part)[0], f"{name}_mb": memory()}
        return measured | {"bytes": learner.versions(shelf)[-1]["bytes"]}


def memory(what: str = "VmHWM") -> float:
    """The peak of this process, in MB, or ``VmRSS``: what it has now. ``ru_maxrss`` would count what its parent had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
