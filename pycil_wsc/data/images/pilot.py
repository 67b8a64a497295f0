"""The data sets of PILOT, with its transforms: random resized crops of at least 5 % of an image, and no normalisation.

``cifar224`` is CIFAR-100, enlarged. The others are folders below ``data_root``, each with ``train`` and ``test``, in
which PILOT's authors distribute them; PILOT's pages link to them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pycil_wsc.data.images.image_files import read_folder
from pycil_wsc.data.types import Dataset, DatasetInfo
from pycil_wsc.errors import UserError
from pycil_wsc.registry import datasets, register_dataset

FOLDERS = {  # name -> folder below `data_root`, number of classes
    "imagenetr": ("imagenet-r", 200),
    "imageneta": ("imagenet-a", 200),
    "cub": ("cub", 200),
    "objectnet": ("objectnet", 200),
    "omnibenchmark": ("omnibenchmark", 300),
    "vtab": ("vtab-cil/vtab", 50),
}
SOURCE = "https://github.com/sun-hailong/LAMDA-PILOT#-datasets"


@register_dataset("cifar224")
def _cifar224(root: Path) -> Dataset:
    """CIFAR-100, whose images of 32 pixels are enlarged to 224: in training the random crops."""
    small = datasets["cifar100"](root)
    info = replace(_with_transforms(small.info), name="cifar224", stored_size=small.info.image_size)
    return replace(small, info=info)


def _with_transforms(info: DatasetInfo) -> DatasetInfo:
    """Crops are resized bilinearly, test images bicubically, and all pixels are in 0..1."""
    return replace(
        info,
        image_size=224,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        crop="resized",
        padding=0,
        flip=True,
        brightness=0.0,
        crop_scale=0.05,
        interpolation="bilinear",
        test_interpolation="bicubic",
        own_transforms=True,
    )


def _folder_of(name: str, place: str, classes: int) -> Callable[[Path], Dataset]:
    def load(root: Path) -> Dataset:
        path = root / place
        if not path.is_dir():
            raise UserError(
                f"dataset '{name}': the folder {path} does not exist; unpack PILOT's archive there, so that it has "
                f"{place}/train and {place}/test ({SOURCE}), or give its parent with --data-root"
            )
        dataset = read_folder(name, path)
        if dataset.info.num_classes != classes:
            raise UserError(
                f"dataset '{name}': {path} has {dataset.info.num_classes} classes, PILOT's has {classes}; "
                f"use 'folder:{path}' for other data"
            )
        return replace(dataset, info=_with_transforms(dataset.info))

    load.__qualname__ = f"load_{name}"
    return load


for _name, (_place, _classes) in FOLDERS.items():
    register_dataset(_name)(_folder_of(_name, _place, _classes))
