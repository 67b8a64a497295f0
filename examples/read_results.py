"""A comparison read back with pandas: average accuracy by method and memory, and differences from Replay.

python main.py --config exps/quickstart.json
python examples/read_results.py runs/quickstart
"""

import json
import sys
from pathlib import Path

import pandas as pd


def runs(folder):
    """A row for each finished run."""
    for path in sorted(Path(folder).rglob("result.json")):
        result = json.loads(path.read_text())
        config = result["config"]
        yield {
            "method": config["model_name"],
            "memory": config["memory_per_class"],
            "seed": config["seed"],
            "average": result["avg_acc"],
            "forgetting": result["forgetting"],
        }


if __name__ == "__main__":
    table = pd.DataFrame(runs(sys.argv[1]))
    print(table.groupby(["method", "memory"])[["average", "forgetting"]].agg(["mean", "sem"]).round(2))
    averages = table.pivot(index=["memory", "seed"], columns="method", values="average")
    differences = averages.drop(columns="replay").sub(averages["replay"], axis=0)  # over equal seeds
    print(differences.groupby("memory").agg(["mean", "sem", "count"]).round(2))
