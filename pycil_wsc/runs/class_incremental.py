"""The kind of run for class-incremental learning."""

import functools
from collections.abc import Callable, Mapping

from pycil_wsc.config.forms import run_folder
from pycil_wsc.config.options import Config
from pycil_wsc.data.configured import configured, for_training, known_images, with_memory_size
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.sources import read_source
from pycil_wsc.data.stream import joined
from pycil_wsc.data.tasks import tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.engine.processes import in_all
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.learners.planning import check_backbone, planned_images
from pycil_wsc.networks.timm_models import data_config, is_timm
from pycil_wsc.runs.checkpoint import CHECKPOINT
from pycil_wsc.runs.kinds import Kind
from pycil_wsc.runs.measure import measurer
from pycil_wsc.runs.progress import Progress
from pycil_wsc.runs.run import Run
from pycil_wsc.studies.records import unrecorded


class ClassIncremental(Kind[Config, Dataset]):
    unit = "images"
    records = (CHECKPOINT, "metrics.jsonl", "analyses.jsonl", "weights.pt", "weights-task*.pt", "tensorboard", "wandb")

    def loader(self) -> Callable[[Config], Dataset]:
        load, read = functools.cache(load_dataset), functools.cache(read_source)

        def load_for(config: Config) -> Dataset:
            if config.tasks:
                parts = [as_configured(read(name, config.data_root), config) for name in config.tasks]
                return joined(parts)
            return as_configured(load(config.dataset, config.data_root, config.image_size), config)

        return load_for

    def plan(self, config: Config, data: Dataset) -> int:
        return planned_images(with_memory_size(config, known_images(data)), tasks_of(data, config))

    def budget(self, config: Config, data: Dataset) -> str:
        if config.task_seconds:
            return f"{len(tasks_of(data, config).tasks)} tasks of {config.task_seconds:g} s of training each"
        return f"the operations of {config.operations_like} in its schedule" if config.operations_like else ""

    def measurer(self) -> Callable[[Config, Dataset], float]:
        seconds = measurer()
        return lambda config, data: seconds(with_memory_size(config, known_images(data)), data)

    def check_model(self, config: Config, data: Dataset) -> None:
        check_backbone(config, data.info.image_size)

    def check_processes(self, config: Config, count: int) -> None:
        if config.batch_size < count:
            raise UserError(
                f"batch_size: {config.batch_size} images are too few for the {count} processes that share them; "
                "start fewer processes, or raise batch_size"
            )

    def execute(self, config: Config, data: Dataset, on_progress: Callable[[Progress], None]) -> dict[str, Json]:
        complete, images = with_memory_size(config, known_images(data)), for_training(data, config)
        return in_all(lambda: Run(complete, images, on_progress)).execute()

    def headline(self, result: Mapping[str, Json]) -> str:
        on = " on held-out training data" if result.get("tested_on") == "validation" else ""
        return f"average accuracy{on} {result['avg_acc']:.2f}"

    def leftovers(self, config: Config) -> tuple[str, ...]:
        return () if config.tasks else super().leftovers(config)  # a longer list resumes from the checkpoint

    def unrecorded(self, config: Config) -> list[str]:
        return unrecorded(config.analyse, run_folder(config))


def as_configured(dataset: Dataset, config: Config) -> Dataset:
    """:func:`configured`; the default size, the normalisation and the interpolation of a timm model are its own."""
    return configured(dataset, config, data_config(config.convnet_type) if is_timm(config.convnet_type) else None)
