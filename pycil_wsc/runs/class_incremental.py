"""The kind of run for class-incremental learning."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from pycil_wsc.config.forms import run_folder
from pycil_wsc.config.loading import resolve_recorded
from pycil_wsc.config.options import Config
from pycil_wsc.data.datasets import Dataset, load_dataset, path_of, sized
from pycil_wsc.data.image_files import image_status
from pycil_wsc.data.image_map import decoded
from pycil_wsc.data.options import AugmentationOptions
from pycil_wsc.data.resized import resized
from pycil_wsc.data.sources import read_source
from pycil_wsc.data.stream import joined
from pycil_wsc.data.subset import at_most, only
from pycil_wsc.data.tasks import tasks_of
from pycil_wsc.data.validation import hold_out
from pycil_wsc.engine.processes import in_all
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.keys import declared
from pycil_wsc.networks.timm_models import data_config, is_timm
from pycil_wsc.results import RESULT, read_result
from pycil_wsc.runs.checkpoint import CHECKPOINT
from pycil_wsc.runs.kinds import Kind
from pycil_wsc.runs.measure import measurer
from pycil_wsc.runs.planning import check_backbone, planned_images
from pycil_wsc.runs.progress import Progress
from pycil_wsc.runs.run import Run
from pycil_wsc.studies.records import unrecorded


class ClassIncremental(Kind[Config, Dataset]):
    unit = "images"
    checkpoint = CHECKPOINT
    records = ("metrics.jsonl", "analyses.jsonl", "weights.pt", "weights-task*.pt", "tensorboard", "wandb")

    def loader(self) -> Callable[[Config], Dataset]:
        load, read = functools.cache(load_dataset), functools.cache(read_source)

        def load_for(config: Config) -> Dataset:
            if config.tasks:
                parts = [as_configured(read(name, config.data_root), config) for name in config.tasks]
                return joined([with_test_images(part) for part in parts])
            return as_configured(load(config.dataset, config.data_root, config.image_size), config)

        return load_for

    def plan(self, config: Config, data: Dataset) -> int:
        return planned_images(with_memory_size(config, known_images(data)), tasks_of(data, config))

    def budget(self, config: Config, data: Dataset) -> str:
        if config.task_seconds:
            return f"{len(tasks_of(data, config).tasks)} tasks of {config.task_seconds:g} s of training each"
        return f"the operations of {config.operations_like} in its schedule" if config.operations_like else ""

    def measurer(self) -> Callable[[Config, Dataset], float]:
        seconds = measurer(for_training)
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

    def extends(self, config: Config) -> bool:
        if not config.tasks:
            return False
        path = run_folder(config) / RESULT
        try:
            recorded = resolve_recorded(read_result(path)["config"], path).identity()
        except UserError:  # reported when the result is needed
            return False
        return recorded != config.identity() and config.continues(recorded)

    def leftovers(self, config: Config) -> tuple[str, ...]:
        return () if config.tasks else super().leftovers(config)  # a longer list resumes from the checkpoint

    def unrecorded(self, config: Config) -> list[str]:
        return unrecorded(config.analyse, run_folder(config))


def as_configured(dataset: Dataset, config: Config) -> Dataset:
    """``dataset`` with the image size, augmentation, classes and part of the images that ``config`` specifies.

    For a timm model, the default size, the normalisation and the interpolation are those of its pre-training.
    """
    changes: dict[str, Json] = {
        name: value for name in declared(AugmentationOptions) if (value := getattr(config, name)) is not None
    }
    if dataset.info.crop == "resized" and (unused := [name for name in ("padding", "brightness") if name in changes]):
        raise UserError(f"{unused[0]}: has no effect on image files, which get random resized crops; leave the key out")
    if is_timm(config.convnet_type):
        pretraining = data_config(config.convnet_type)
        dataset = sized(dataset, config.image_size or pretraining["image_size"])
        changes |= {name: pretraining[name] for name in ("mean", "std", "interpolation")}
    elif config.image_size:
        dataset = sized(dataset, config.image_size)
    dataset = dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, **changes))
    dataset = only(dataset, config.classes) if config.classes else dataset
    if config.validation_split:
        dataset = hold_out(dataset, config.validation_split, config.seed, one_task=bool(config.tasks))
    if config.images_per_class is None:
        return dataset
    return at_most(dataset, config.images_per_class, config.seed)


def known_images(dataset: Dataset) -> np.ndarray:
    """The training images by which a run counts ``memory_bytes``: all, or with ``tasks`` those of the first one.

    Then a longer list of tasks does not change the size of the memory.
    """
    images, tasks = dataset.train.images, dataset.arrivals
    return images if tasks is None or dataset.train.in_memory else images[tasks.train == 0]


def with_memory_size(config: Config, images: np.ndarray) -> Config:
    """``config`` with the ``memory_size`` that follows from ``memory_bytes``, if that is given.

    ``images``: uint8 (N, side, side, 3), or (N,) paths, of which each counts as much as their mean size.
    """
    if config.memory_bytes is None:
        return config
    if images.dtype == np.uint8:
        size = math.prod(images.shape[1:])
    else:
        size = sum(image_status(path).st_size for path in images.tolist()) / len(images)
    return dataclasses.replace(config, memory_size=int(config.memory_bytes // size))


def with_test_images(task: Dataset) -> Dataset:
    """Return ``task``; raise a :class:`UserError` if it has no test images."""
    if not len(task.test):
        raise UserError(
            f"{task.info.name}: no test images; arrange the images as PATH/{{train,val}}/<class>/*.jpg, or set "
            "validation_split"
        )
    return task


def for_training(dataset: Dataset, config: Config) -> Dataset:
    """``dataset`` with its image files replaced by decoded images or small copies, depending on ``cache_images``."""
    root = path_of("data_root", config.data_root)
    if config.cache_images in ("memory", "device"):
        return decoded(dataset, root, config.num_workers, config.cache_images == "device")
    return resized(dataset, root, config.num_workers) if config.cache_images else dataset
