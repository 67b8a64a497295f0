"""Write results/studies/night/wa_alignment.csv: runs of WA without its alignment, in the setting of the night files.

It has the mean norms of the head's old and new rows after each task, whose ratio is the factor by which WA would scale
the new rows, and the accuracy without it.

OMP_NUM_THREADS=1 python results/studies/night/wa_alignment.py
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.launch.command import main
from pycil_wsc.methods.distillation.wa import WA
from pycil_wsc.registry import register_learner

ROOT = Path(__file__).parents[3]
OUT = ROOT / "results" / "studies" / "night" / "wa_alignment.csv"
MEMORIES = [1, 25]  # exemplars of each class's 25 images
norms: dict[tuple[int, int], list[tuple[float, float]]] = {}  # by memory and seed: old and new rows after each task


@register_learner("wa_unaligned", epochs=170, milestones=[60, 100, 140])
class Unaligned(WA):
    """WA that measures its head's rows where WA aligns them."""

    def end_task(self, task: Task) -> None:
        if task.index:
            lengths = self.network.head.weight.norm(dim=1)
            old, new = lengths[: task.num_old].mean(), lengths[task.num_old :].mean()
            run = (self.config.memory_per_class, self.config.seed)
            norms.setdefault(run, []).append((old.item(), new.item()))


def write(config: Path) -> int:
    """Run the sweep, whose file is written to ``config``, and write its CSV file; returns the exit code."""
    settings = json.loads((ROOT / "exps" / "studies" / "night" / "main.json").read_text())
    for name in ["runs", "validation", "beta1", "beta2"]:  # of other methods
        del settings[name]
    settings |= {"prefix": "wa_alignment", "model_name": "wa_unaligned", "memory_per_class": MEMORIES}
    config.write_text(json.dumps(settings))
    code = main(["--config", str(config), "--redo"])
    if code:
        return code
    with OUT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["memory_per_class", "seed", "task", "old_norm", "new_norm", "accuracy"])
        for (memory, seed), lengths in sorted(norms.items()):
            (path,) = Path("runs", "wa_alignment").glob(f"*/wa_unaligned/m{memory}/seed{seed}-*/result.json")
            accuracies = json.loads(path.read_text())["curve"]
            rows.writerow([memory, seed, 1, "", "", f"{accuracies[0]:.2f}"])
            for task, ((old, new), accuracy) in enumerate(zip(lengths, accuracies[1:], strict=True), start=2):
                rows.writerow([memory, seed, task, f"{old:.4f}", f"{new:.4f}", f"{accuracy:.2f}"])
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(write(Path(temporary, "wa_unaligned.json")))
