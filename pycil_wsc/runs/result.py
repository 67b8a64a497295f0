"""The result of a class-incremental run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycil_wsc import registry
from pycil_wsc.devices import device_name
from pycil_wsc.engine.environment import commit
from pycil_wsc.results.identity import image_identity
from pycil_wsc.results.schema import ImageResult
from pycil_wsc.runs import metrics

if TYPE_CHECKING:
    from pycil_wsc.runs.run import Run


def result_of(run: Run) -> ImageResult:
    """The result of a finished run, from the lines of its ``metrics.jsonl``, its times and its data."""
    rows, last = run.journal.history, run.journal.history[-1]
    matrix = [row["cnn_tasks"] for row in rows]
    curve = [row["cnn_top1"] for row in rows]
    nme = [row["nme_top1"] for row in rows if row.get("nme_top1") is not None]
    config, precision = run.config.recorded(), run.learner.precision
    known = {"config": config, "precision": precision, "curve": curve, "data": run.data, "class_names": run.class_names}
    return ImageResult(
        config=config,
        identity=image_identity(run.config.identity(), known),
        tested_on="validation" if run.dataset.validation_share else "test",
        curve=curve,
        avg_acc=metrics.average_accuracy(curve),
        last_acc=curve[-1],
        matrix=matrix,
        forgetting=metrics.forgetting(matrix),
        new_acc=metrics.new_task_accuracy(matrix),
        top5_curve=[row["cnn_top5"] for row in rows],
        nme_curve=nme if len(nme) == len(rows) else None,
        train_loss=[row["train_loss"] for row in rows],
        train_accuracy=[row["train_accuracy"] for row in rows],
        confusion=run.confusion,
        train_seconds=run.journal.clock["train_seconds"],
        train_seconds_spent=run.journal.clock["train_seconds"] - run.journal.clock["saved_seconds"],
        total_seconds=run.journal.clock["total_seconds"],
        images_trained=last["images_trained"],
        train_flops=last["train_flops"],
        peak_memory_bytes=run.peak_memory,
        parameters=last["parameters"],
        data=run.data,
        class_order=run.manager.class_order,
        class_names=run.class_names,
        device=device_name(run.device),
        processes=run.processes.count,
        precision=precision,
        torch=torch.__version__,
        commit=commit(),
        **{name: measure(rows) for name, measure in registry.metrics.items()},
        **{f"{name}_curve": [row[f"{name}_top1"] for row in rows] for name in run.learner.also_tested()},
        **{name: last[name] for name in run.learner.costs()},
    )
