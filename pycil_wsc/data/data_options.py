"""The keys of data sets, tasks, images and exemplars."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pycil_wsc.errors import UserError, shown
from pycil_wsc.keys import key

ALL = 2**31 - 1  # exemplars per class: keep every image
DOMAIN = r"original|permuted|rotated(:-?[0-9]{1,9}(\.[0-9]{1,9})?)?"
STRATEGIES = ("reservoir", "balanced")  # values of `exemplars` with `memory_update` "step"


@dataclass(frozen=True)
class TaskOptions:
    """The data set, and how it is split into tasks."""

    dataset: str = key(
        "cifar100",
        "`cifar100`, `cifar100_16` (16 pixels), `cifar10`, `mnist`, `digits`, `imagenet100`, one of"
        " [PILOT's](pretrained.md#data), `npz:PATH` or `folder:PATH`",
        decides="data",
        names="folder",
        only="experiments",
        instead="tasks",
    )
    tasks: tuple[str, ...] = key(
        (),
        "data sets to learn in this order, one per task, instead of `dataset`, `classes`, `images_per_class`,"
        " `shuffle`, `init_cls`, `increment` and `increments`: `folder:PATH` or `npz:PATH`. Classes are identified by"
        " name and may recur in later tasks; a longer list extends a finished run",
        decides="data",
        only="experiments",
    )
    shuffle: bool = key(
        True,
        "shuffle the class order by `seed`, as PyCIL does",
        decides="data",
        only="experiments",
        affects="accuracy",
        instead="tasks",
    )
    init_cls: int = key(
        10, "classes of the first task", low=1, decides="data", names="folder", only="experiments", instead="tasks"
    )
    increment: int = key(
        10, "classes of each later task", low=1, decides="data", names="folder", only="experiments", instead="tasks"
    )
    increments: tuple[int, ...] = key(
        (),
        "classes of each task, such as `[3, 1, 2, 4]`, instead of `init_cls` and `increment`; they add up to the"
        " classes of the data set, or to the number of `classes`",
        low=1,
        decides="data",
        only="experiments",
        instead="tasks",
    )
    domains: tuple[str, ...] = key(
        (),
        "learn all classes of `dataset` in each of these domains, one per task, instead of splitting them: `original`,"
        " `rotated:DEGREES`, `rotated` by an angle drawn by `seed`, or `permuted`, pixels in an order drawn by `seed`;"
        " Mammoth's rotated MNIST is 20 times `rotated`",
        decides="data",
        only="experiments",
        instead="tasks",
    )
    blurry: float = key(
        0.0,
        "share of each task's images that come from the classes of other tasks, equally many from each; for methods"
        " that need no task identity ([Streams and domains](streams.md#blurry-boundaries))",
        low=0,
        below=1,
        decides="data",
        only="experiments",
        instead="tasks",
    )
    max_tasks: int | None = key(
        None,
        "for trials: learn only this many tasks, the first ones; null: all",
        low=1,
        decides="later tasks",
        only="experiments",
        restricts=True,
    )
    classes: tuple[int | str, ...] = key(
        (),
        "for trials: learn only these classes of the data set, by number or name; empty: all",
        decides="data",
        only="experiments",
        instead="tasks",
        restricts=True,
    )
    images_per_class: int | None = key(
        None,
        "for trials: learn only this many training images of each class, drawn by `seed`, after `validation_split` has"
        " held out its share; null: all",
        low=1,
        decides="data",
        only="experiments",
        instead="tasks",
        restricts=True,
    )
    imbalance: float | None = key(
        None,
        "a long tail: the training images of a class fall off exponentially with its label, from all of them to this "
        "part (50: a fiftieth) of those of the first one, drawn by `seed`, after `images_per_class`; null: none",
        low=1,
        decides="data",
        only="experiments",
        instead="tasks",
        restricts=True,
    )
    validation_split: float = key(
        0.0,
        "fraction of each class's training samples held out by `seed` and used as test set instead of the original one",
        low=0,
        high=0.5,
        only="experiments",
        affects="accuracy",
    )


def check_domains(domains: Sequence[str]) -> None:
    """Raise a :class:`UserError` for a domain of another form."""
    for domain in domains:
        if not re.fullmatch(DOMAIN, domain):
            kinds = "'original', 'rotated', 'rotated:DEGREES' or 'permuted'"
            raise UserError(f"domains: '{shown(domain)}' is not {kinds}")


class SeededTasks(TaskOptions):
    """The tasks with the seed of their class order, which the run declares."""

    seed: int

    @property
    def is_stream(self) -> bool:
        """Whether each task has images of its own, of classes that may be known: ``tasks`` or ``domains``."""
        return bool(self.tasks or self.domains)


@dataclass(frozen=True)
class MemoryOptions:
    """The exemplars that are kept for replay."""

    memory_size: int = key(
        2000,
        "total number of exemplars if `fixed_memory` is false",
        low=0,
        decides="later tasks",
        names="folder",
        affects="accuracy",
        by_method=True,
        identifies="memory",
    )
    memory_per_class: int = key(
        20,
        'exemplars per class if `fixed_memory` is true; `"all"` keeps every image',
        low=0,
        decides="later tasks",
        names="folder",
        affects="accuracy",
        by_method=True,
        identifies="memory",
    )
    fixed_memory: bool = key(
        True,
        "keep `memory_per_class` exemplars of each class; `false`: divide `memory_size` among the classes",
        decides="later tasks",
        names="folder",
    )
    memory_bytes: int | None = key(
        None,
        "total size of the exemplars in bytes, instead of the keys above: of pixels or, on average, of files, and of "
        "what the method stores with each, such as DER++'s logits",
        low=0,
        decides="later tasks",
        names="folder",
        affects="accuracy",
        by_method=True,
        identifies="memory",
    )
    exemplars: str = key(
        "herding",
        "how exemplars are chosen: `herding`, `random`, `reservoir` (a uniform sample of all images so far; with "
        "`fixed_memory`, of those of each class), `balanced` (a class-balancing reservoir of `memory_size` images) or, "
        "with `memory_update` `task`, a choice that is registered",
        decides="later tasks",
        affects="accuracy",
        by_method=True,
        studied=6,
    )
    memory_update: str = key(
        "task",
        "when exemplars are chosen: after each `task`, or in each training `step`, as in Mammoth "
        "([Streams and domains](streams.md))",
        choices=("task", "step"),
        by_method=True,
        before="task",  # whatever a method's default is now
        sets_defaults=True,
    )
    replay_batch_size: int | None = key(
        None, "with `memory_update` `step`: exemplars in each batch that is replayed; null: `batch_size`", low=1
    )


def memory_keys(fixed: bool) -> tuple[str, str]:
    """The key of :class:`MemoryOptions` that ``fixed_memory`` makes ineffective, and the one that counts."""
    return ("memory_size", "memory_per_class") if fixed else ("memory_per_class", "memory_size")


@dataclass(frozen=True)
class AugmentationOptions:
    """The augmentation of training images. A value other than null replaces the data set's."""

    augmentation: str = key(
        "pycil",
        "augmentation of training images: `pycil` (arrays: padded crop and brightness; image files: random resized "
        "crop), `autoaugment` (the same, then AutoAugment's policies for CIFAR-10 and Cutout) or `timm` (random "
        "resized crop and RandAugment)",
        choices=("pycil", "autoaugment", "timm"),
        decides="data",
        by_method=True,
    )
    padding: int | None = key(
        None,
        "arrays: zero padding of the random crop; null: as the data set defines",
        low=0,
        high=1024,
        decides="data",
    )
    flip: bool | None = key(
        None, "flip training images horizontally at random; null: as the data set defines", decides="data"
    )
    brightness: float | None = key(
        None,
        "arrays: brightness jitter, factors in 1 +- this value; null: as the data set defines",
        low=0,
        high=10,
        decides="data",
    )
    mean: tuple[float, ...] | None = key(
        None,
        "mean of each of the three channels, on the 0..1 scale, by which images are normalised; null: as the data set"
        " or the timm model defines (images of PILOT's data sets are in 0..1, as there)",
        low=0,
        high=1,
        decides="data",
    )
    std: tuple[float, ...] | None = key(
        None, "standard deviation of each channel, likewise", above=0, high=1000, decides="data"
    )
    crop_scale: float | None = key(
        None,
        "smallest area of a random resized crop, as a fraction of the image; null: as the data set defines (0.08, of "
        "PILOT's data sets 0.05)",
        above=0,
        high=1,
        decides="data",
    )
    crop_pct: float | None = key(
        None,
        "side of the centre crop of a test image as a fraction of its short side; null: as the data set defines "
        "(0.875, 224 of 256 pixels)",
        above=0,
        high=1,
        decides="data",
    )
    test_interpolation: str | None = key(
        None,
        "how test images are resized; null: as the data set or timm model defines",
        choices=(None, "bilinear", "bicubic"),
        decides="data",
    )


@dataclass(frozen=True)
class ImageOptions:
    """Where images are, and how they are read."""

    data_root: str = key("data", "folder of the data sets", decides="files")
    image_size: int | None = key(
        None,
        "side of the network's input images; null: that of the data set or timm model",
        low=8,
        high=4096,
        decides="data",
    )
    cache_images: bool | str = key(
        False,
        "decode and resize image files once, into a file in `data_root`/resized: `memory` (or `true`) maps it into "
        "memory, `device` copies it to the GPU if it fits",
        choices=(False, True, "memory", "device"),
    )
    num_workers: int = key(
        4,
        "processes that decode image files, for training and for tests each, at most one per core",
        low=0,
        high=1024,
        decides="speed",
    )


@dataclass(frozen=True)
class DataOptions(AugmentationOptions, ImageOptions, MemoryOptions, SeededTasks):
    """All keys of this subpackage."""
