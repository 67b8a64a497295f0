"""The result of a class-incremental run."""

from __future__ import annotations

import torch

from pycil_wsc.config.image_config import Config
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import device_name
from pycil_wsc.files import Json
from pycil_wsc.reproducibility import commit
from pycil_wsc.results import metrics
from pycil_wsc.results.identity import image_identity
from pycil_wsc.results.schema import ImageResult
from pycil_wsc.runs.journal import Journal
from pycil_wsc.training.learner import BaseLearner


def result_of(
    config: Config,
    dataset: Dataset,
    data: dict[str, Json],
    learner: BaseLearner,
    journal: Journal,
    confusion: list[list[float]] | None,
) -> ImageResult:
    """The result of a finished run, from what its journal has noted. ``data``: the fingerprint of the ``dataset``."""
    rows = journal.history
    last = rows[-1]
    clock = journal.clock
    measures = metrics.of_run(rows)
    order = learner.manager.class_order
    class_names = [dataset.info.classes[label] for label in order]
    recorded = config.recorded()
    known = {"config": recorded, "precision": learner.precision.name, "curve": measures["curve"], "data": data}
    return ImageResult(
        config=recorded,
        identity=image_identity(config.method, config.identity(), {**known, "class_names": class_names}),
        tested_on="validation" if dataset.validation_share else "test",
        confusion=confusion,
        expands=learner.plan.expands,
        train_seconds=clock["train_seconds"],
        train_seconds_spent=clock["train_seconds"] - clock["saved_seconds"],
        total_seconds=clock["total_seconds"],
        images_trained=last["images_trained"],
        train_flops=last["train_flops"],
        peak_memory_bytes=journal.peak_memory,
        parameters=last["parameters"],
        held_bytes=last.get("held_bytes"),  # 0.1.0 noted neither this nor the next
        held=last.get("held"),
        data=data,
        class_order=order,
        class_names=class_names,
        device=device_name(learner.device),
        processes=learner.processes.count,
        precision=learner.precision.name,
        torch=torch.__version__,
        commit=commit(),
        **measures,
        **{f"{name}_curve": [row[f"{name}_top1"] for row in rows] for name in learner.also_tested()},
        **{name: last[name] for name in learner.spent.costs},
    )
