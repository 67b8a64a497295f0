"""Result files with synthetic numbers, in the format that runs write, for tests of their readers."""

import csv
import json

import numpy as np

from pycil_wsc.results import Record

HERE = "cifar100-b10-inc10-resnet32"  # how the report names files of the main setting
EPOCHS = {"replay": (200, 70), "wsc": (200, 70), "bic": (170, 170), "joint": (200, 200), "finetune": (200, 80)}
LEVEL = {
    "der": 30,
    "foster": 28,
    "memo": 26,
    "finetune": 0,
    "replay": 12,
    "icarl": 13,
    "bic": 16,
    "wa": 22,
    "joint": 10,
    "wsc": 17,
}
WSC = {
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "wsc.blend": 0.5,
    "wsc.betas": [0.9, 0.999],
}


def result(method="replay", memory=20, seed=1993, classes=100, increment=10, losses=3, confusion=False, **config):
    """The contents of one ``result.json``, with ``losses`` epochs of training loss;
    ``config`` overrides keys (``wsc__retain`` for ``wsc.retain``).
    """
    rng = np.random.default_rng([seed, memory, sum(map(ord, method + json.dumps(config)))])
    first, later = EPOCHS.get(method, (200, 170))
    values = {
        "prefix": "made_up",
        "dataset": "cifar100",
        "memory_size": 2000,
        "memory_per_class": memory,
        "fixed_memory": True,
        "shuffle": True,
        "init_cls": increment,
        "increment": increment,
        "model_name": method.removesuffix("+wsc"),
        "convnet_type": "resnet32",
        "device": "auto",
        "seed": seed,
        "init_epoch": first,
        "init_milestones": [first // 2],
        "epochs": later,
        "milestones": [later // 2],
        "exemplars": "herding",
        "num_workers": 4,
    }
    values |= WSC if method.endswith("wsc") else {}
    values |= {"consolidate": True} if method.endswith("+wsc") else {}
    values |= {name.replace("__", "."): value for name, value in config.items()}
    tasks = classes // increment
    level = (
        30
        + LEVEL.get(method.removesuffix("+wsc"), 15) * 12 / (12 + memory**0.7)
        + 28 * memory / (memory + 60)
        + 3 * ("wsc" in method)
        + rng.normal(0, 1)
    )
    matrix = [
        [
            float(
                np.clip(level + 25 - (35 - 0.04 * memory) * (t > k) * (1 - 0.7 ** (t - k)) + rng.normal(0, 4), 0, 100)
            )
            for k in range(t + 1)
        ]
        for t in range(tasks)
    ]
    curve = [sum(row) / len(row) for row in matrix]
    images = 500 * increment * first + later * sum(500 * increment + memory * increment * t for t in range(1, tasks))
    contents = {
        "config": values,
        "curve": curve,
        "avg_acc": sum(curve) / tasks,
        "last_acc": curve[-1],
        "matrix": matrix,
        "forgetting": sum(max(row[k] for row in matrix[k:]) - matrix[-1][k] for k in range(tasks - 1)) / (tasks - 1),
        "new_acc": sum(row[-1] for row in matrix) / tasks,
        "top5_curve": [min(100.0, value + 20) for value in curve],
        "nme_curve": [value - 3 for value in curve] if memory else None,
        "train_seconds": images / 4000 * float(rng.uniform(0.95, 1.05)),
        "total_seconds": images / 3500,
        "images_trained": images,
        "peak_memory_bytes": int(9e8 + 2e5 * memory + 5e7 * LEVEL.get(method, 9)),
        "parameters": 470004,
        "train_loss": [
            [float(2.5 * 0.97**epoch + 0.2 + rng.normal(0, 0.03)) for epoch in range(losses)] for t in range(tasks)
        ],
        "class_order": list(range(classes)),
        "device": "Imaginary GPU",
        "precision": "bf16",
        "torch": "2.6.0",
        "commit": "0" * 40,
    }
    if method == "wsc":
        contents |= {
            "importance_seconds": float(rng.uniform(0.1, 9)),
            "importance_bytes": int(rng.integers(4e6, 4e8)),
            "importance_passes": float(rng.integers(0, 9)),
        }
    if confusion:
        counts = rng.multinomial(100, [1 / classes] * classes, size=classes) + np.diag(rng.integers(150, 300, classes))
        contents["confusion"] = counts.tolist()
    return contents


def record(method="replay", memory=20, seed=1993, **keys):
    """A synthetic result, as the report reads it."""
    return Record.of(result(method, memory, seed, losses=1, **keys))


def names_of(group):
    """``{record: name}`` of the group's runs."""
    rows = group.named(group.rows)
    return dict(zip(rows["record"], rows["method"]))


def write(folder, *results):
    """Each result in a run's folder of its own below ``folder``; returns the paths of the ``result.json`` files."""
    paths = []
    for number, contents in enumerate(results):
        run = folder / f"{contents['config']['model_name']}-{number:03d}"
        run.mkdir(parents=True)
        lines = [json.dumps({"task": t, "cnn_top1": value}) + "\n" for t, value in enumerate(contents["curve"])]
        (run / "metrics.jsonl").write_text("".join(lines))
        (run / "result.json").write_text(json.dumps(contents))
        paths.append(run / "result.json")
    return paths


def studies(
    seeds=(1993, 1994),
    memories=(20, 200, 500),
    methods=("der", "foster", "memo", "replay", "icarl", "bic", "wa", "wsc"),
):
    """Runs of every study of the paper on CIFAR-100."""
    varied = {
        "wsc__importance": ("drift", "fisher", "hessian", "first_moment", "second_moment"),
        "wsc__reset_every": ("epoch", "iteration"),
        "wsc__average": (False,),
        "wsc__reset": ("random", "revert", "shrink_perturb", "continual_backprop", "none"),
        "wsc__retain": (0, 0.1, 0.5, 1),
    }
    for seed in seeds:
        for memory in memories:
            yield from (
                result("wsc", memory, seed, **{key: value}) for key, values in varied.items() for value in values
            )
            yield from (result("wsc", memory, seed, wsc__average=False, wsc__retain=retain) for retain in (0.1, 0.5))
            yield result("joint", memory, seed)
        for method in methods:
            yield result(method, 0, seed)
            yield from (result(method, memory, seed, exemplars="reservoir") for memory in memories[:2])
            yield from (result(method, memory, seed, increment=5) for memory in memories[:1])
        yield result("finetune", 0, seed)


def main_table(
    seeds=(1993, 1994, 1995),
    memories=(20, 40, 80, 100, 200, 300, 400, 500),
    methods=("der", "foster", "memo", "replay", "icarl", "bic", "wa", "wsc"),
    **config,
):
    """Runs of the paper's first table."""
    return [result(method, memory, seed, **config) for seed in seeds for memory in memories for method in methods]


def lines_of(folder, slug):
    """A table that a report wrote into ``folder``: a dict for each cell."""
    with open(folder / "tables" / f"{slug}.csv", newline="") as file:
        return list(csv.DictReader(file))


def accuracy(folder, **columns):
    lines = lines_of(folder, f"accuracy-{HERE}")
    return [line for line in lines if all(line[name] == value for name, value in columns.items())]
