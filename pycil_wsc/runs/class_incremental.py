"""The kind of run for class-incremental learning."""

import functools
import json
from collections.abc import Callable, Mapping

from pycil_wsc import registry
from pycil_wsc.config.config_checks import remarks
from pycil_wsc.config.image_config import Config
from pycil_wsc.config.kinds import DEFAULT, ClassIncrementalConfigs, register_kind, run_folder
from pycil_wsc.data.configured import configured, for_training, known_images, with_memory_size
from pycil_wsc.data.data_options import DataOptions, MemoryOptions
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.images.fingerprint import with_weights
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.data.tasks.growing_dataset import joined
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.keys import declared
from pycil_wsc.networks.timm_models import data_config, is_timm
from pycil_wsc.results.metrics import check_names
from pycil_wsc.runs.checkpoint import CHECKPOINT
from pycil_wsc.runs.planning import check_backbone, plan_of, planned_images, planned_memory
from pycil_wsc.runs.progress import Progress
from pycil_wsc.runs.run import Run
from pycil_wsc.runs.speed import Stopwatch, measured
from pycil_wsc.studies.records import unrecorded
from pycil_wsc.training.processes import in_all

OF_THE_DATA = sorted(declared(DataOptions).keys() - declared(MemoryOptions) | {"convnet_type", "seed"})
LATEST = 2  # data sets that are kept as configured: with validation_split, each has images of its own


@register_kind(DEFAULT)
class ClassIncrementalRuns(ClassIncrementalConfigs[Dataset]):
    """How class-incremental runs are planned and executed; the rest is inherited from the class that this completes."""

    unit = "images"
    records = (CHECKPOINT, "metrics.jsonl", "analyses.jsonl", "weights.pt", "weights-task*.pt", "tensorboard", "wandb")

    def loader(self) -> Callable[[Config], Dataset]:
        load = functools.cache(load_dataset)
        read = functools.cache(read_source)
        prepared: dict[str, Dataset] = {}  # the latest

        def load_for(config: Config) -> Dataset:
            key = json.dumps([getattr(config, name) for name in OF_THE_DATA])
            if key not in prepared:
                parts = [as_configured(read(name, config.data_root), config) for name in config.tasks]
                data = joined(parts) if parts else as_configured(load(config.dataset, config.data_root), config)
                if len(prepared) == LATEST:
                    del prepared[next(iter(prepared))]
                prepared[key] = data
            return with_weights(prepared[key], config.pretrained)

        return load_for

    def plan(self, config: Config, data: Dataset) -> int:
        return planned_images(with_memory_size(config, known_images(data)), tasks_of(data, config))

    def budget(self, config: Config, data: Dataset) -> str:
        return f"the operations of {config.operations_like} in its schedule" if config.operations_like else ""

    def outline(self, config: Config, data: Dataset) -> str:
        return f"{run_folder(config).parents[2].name}: {tasks_of(data, config).in_words()}"

    def memory(self, config: Config, data: Dataset) -> int | None:
        if not registry.learners[config.model_name].Plan.uses_memory:
            return None
        return planned_memory(with_memory_size(config, known_images(data)), tasks_of(data, config))

    def remarks(self, config: Config, data: Dataset) -> list[str]:
        return remarks(with_memory_size(config, known_images(data)), tasks_of(data, config))

    def measurer(self) -> Callable[[Config, Dataset], float]:
        watches: dict[str, Stopwatch] = {}

        def seconds(config: Config, data: Dataset) -> float:
            config = with_memory_size(config, known_images(data))
            plan = plan_of(config, tasks_of(data, config))
            # with a budget in operations, the steps also depend on the number of images
            shared_by = json.dumps([config.timed(), plan if config.operations_like else []], sort_keys=True)
            if shared_by not in watches:
                watches[shared_by] = measured(config, for_training(data, config))
            watch = watches[shared_by]
            if config.operations_like:
                return sum(map(watch.seconds, range(len(plan))))
            return sum(images * seconds for images, seconds in zip(plan, watch.seconds_per_image(), strict=True))

        return seconds

    def check_model(self, config: Config, data: Dataset) -> None:
        check_backbone(config, data.info.image_size)
        check_names()

    def check_processes(self, config: Config, count: int) -> None:
        if config.batch_size < count:
            raise UserError(
                f"batch_size: {config.batch_size} images are too few for the {count} processes that share them; "
                "start fewer processes, or raise batch_size"
            )
        if count > 1 and config.batch_norm_parts not in (1, count):
            raise UserError(
                f"batch_norm_parts: {count} processes have {count} parts of a batch, not {config.batch_norm_parts}; "
                f"give {count} or 1, or start a single process"
            )

    def execute(self, config: Config, data: Dataset, on_progress: Callable[[Progress], None]) -> dict[str, Json]:
        complete = with_memory_size(config, known_images(data))
        images = for_training(data, config)
        return in_all(lambda: Run(complete, images, on_progress)).execute()

    def headline(self, result: Mapping[str, Json]) -> str:
        on = " on held-out training data" if result.get("tested_on") == "validation" else ""
        return f"average accuracy{on} {result['avg_acc']:.2f}"

    def leftovers(self, config: Config) -> tuple[str, ...]:
        return () if config.tasks else super().leftovers(config)  # a longer list resumes from the checkpoint

    def unrecorded(self, config: Config) -> list[str]:
        folder = run_folder(config)
        weights = {False: "", True: "weights.pt", "every": "weights-task0.pt"}[config.save_weights]
        return unrecorded(config.analyse, folder) + ([] if (folder / weights).exists() else ["save_weights"])


def as_configured(dataset: Dataset, config: Config) -> Dataset:
    """:func:`configured`; the default size, the normalisation and the interpolation of a timm model are its own."""
    return configured(dataset, config, data_config(config.convnet_type) if is_timm(config.convnet_type) else None)
