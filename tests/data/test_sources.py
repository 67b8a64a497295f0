"""What a task is read from, beside folders and arrays: torch's data sets joined or cut, and Hugging Face's."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from PIL import Image
from support.small_learners import QUICK, learned
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder

from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError

RNG = np.random.default_rng(0)


def pictures(count, side=8):
    return [Image.fromarray(RNG.integers(0, 256, (side, side, 3), np.uint8)) for _ in range(count)]


class Photos(torch.utils.data.Dataset):
    """A map-style data set; without ``classes``, its labels have no names."""

    def __init__(self, images, labels, classes=None):
        self.images, self.labels = images, labels
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def samples(source):
    """(pixels, class name) of each image of a task."""
    task = read_source(source)
    return [(image.tolist(), task.info.classes[label]) for image, label in zip(task.train.images, task.train.targets)]


# ---- torch's ---------------------------------------------------------------------------------------------------------

PETS = Photos(pictures(3), [0, 1, 0], ["cat", "dog"])
ZOO = Photos(pictures(3), [1, 0, 2], ["dog", "emu", "yak"])
JOINED = {
    "joined": (ConcatDataset([PETS, ZOO]), [(PETS, 0), (PETS, 1), (PETS, 2), (ZOO, 0), (ZOO, 1), (ZOO, 2)]),
    "a part of what is joined": (Subset(ConcatDataset([PETS, ZOO]), [4, 0, -1]), [(ZOO, 1), (PETS, 0), (ZOO, 2)]),
    "joined parts": (ConcatDataset([Subset(ZOO, [2, 0]), Subset(PETS, [1])]), [(ZOO, 2), (ZOO, 0), (PETS, 1)]),
    "joined twice": (ConcatDataset([ConcatDataset([PETS]), ConcatDataset([ZOO, PETS])]), [
        *((PETS, number) for number in range(3)),
        *((ZOO, number) for number in range(3)),
        *((PETS, number) for number in range(3)),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", JOINED)
def test_joined_data_sets_keep_the_names_of_their_classes(case):
    source, items = JOINED[case]
    expected = [(np.asarray(part.images[n]).tolist(), part.classes[part.labels[n]]) for part, n in items]
    assert samples(source) == expected


def test_of_joined_data_sets_all_have_names_or_none():
    unnamed = Photos(pictures(2), [0, 1])
    assert [name for _, name in samples(ConcatDataset([unnamed, unnamed]))] == ["0", "1", "0", "1"]
    with pytest.raises(
        UserError, match="^Photos: has no 'classes', as the data sets have that it is joined with; give"
    ):
        read_source(ConcatDataset([PETS, unnamed]))
    texts = Photos(pictures(2), ["emu", "cat"])
    assert [name for _, name in samples(ConcatDataset([PETS, texts]))] == ["cat", "dog", "cat", "emu", "cat"]


def test_a_label_without_a_name_is_found_in_each_of_them():
    wrong = Photos(pictures(1), [2], ["dog", "emu"])
    with pytest.raises(UserError, match="^Photos: label 2 has no name in its 2 classes"):
        read_source(ConcatDataset([PETS, wrong]))


def test_images_of_mixed_sizes_are_told_to_be_given_as_a_folder(tmp_path):
    for name, side in (("cat", 8), ("dog", 9)):
        (tmp_path / name).mkdir()
        pictures(1, side)[0].save(tmp_path / name / "0.png")
    whole = ImageFolder(str(tmp_path))
    shapes = r"images of shapes \(8, 8, 3\) and \(9, 9, 3\)"
    for source in (whole, Subset(whole, [0, 1]), ConcatDataset([whole, whole])):
        with pytest.raises(
            UserError, match=f"{shapes}; give 'folder:{tmp_path}' to have images resized as they are read"
        ):
            read_source(source)
    assert len(read_source(f"folder:{tmp_path}").train) == 2  # which works
    with pytest.raises(UserError, match=f"{shapes}; give 'folder:ROOT', with their files in ROOT/<class>, to have"):
        read_source(Photos([*pictures(1), *pictures(1, 9)], [0, 1]))


# ---- Hugging Face's --------------------------------------------------------------------------------------------------


class Feature:
    pass


class Value(Feature):
    pass


class ClassLabel(Feature):
    def __init__(self, names):
        self.names = names


class Columns:
    """As much of ``datasets.Dataset`` as is used. Its features are called as there; see the test of the real one."""

    def __init__(self, features: Mapping[str, Feature], **columns):
        self.features = features
        self.columns = columns

    @property
    def column_names(self):
        return list(self.columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


OF_IMAGES = type("Image", (Feature,), {})()
NAMES = ClassLabel(["cat", "dog", "emu"])
IMAGES = pictures(3)


def test_a_column_of_images_and_one_of_classes_are_read():
    source = Columns({"id": Value(), "img": OF_IMAGES, "animal": NAMES}, id=[7, 8, 9], img=IMAGES, animal=[2, 0, 2])
    expected = [(np.asarray(image).tolist(), name) for image, name in zip(IMAGES, ["emu", "cat", "emu"])]
    assert samples(source) == expected
    learner = learned(source, **QUICK)
    assert learner.classes == ["cat", "emu"] and len(learner.predict(np.stack(list(map(np.asarray, IMAGES))))) == 3


@pytest.mark.parametrize("labels", [["b", "a", "b"], [5, 4, 5]])
def test_a_column_called_label_has_classes_of_any_kind(labels):
    source = Columns({"image": OF_IMAGES, "label": Value()}, image=IMAGES, label=labels)
    assert [name for _, name in samples(source)] == list(map(str, labels))


def streamed():
    source = Columns({"image": OF_IMAGES, "label": NAMES}, image=IMAGES, label=[0, 1, 2])
    return type("IterableDataset", (), {"features": source.features, "column_names": source.column_names})()


TWO = {"img": OF_IMAGES, "coarse": NAMES, "fine": NAMES}
REFUSED = {  # the message -> the source
    "cannot learn from a dict; give one of its splits, such as ['train']": {
        "train": Columns({"image": OF_IMAGES, "label": NAMES}, image=IMAGES, label=[0, 1, 2])
    },
    "cannot learn from a IterableDataset; it is streamed and has no length; load the data set without streaming":
        streamed(),
    "the Hugging Face data set has no column of Image, only text (Value), label (ClassLabel); add one with cast_column":
        Columns({"text": Value(), "label": NAMES}, text=["a"], label=[0]),
    "the Hugging Face data set has 2 columns of ClassLabel, coarse, fine; keep the one to learn: "
    "remove_columns(['fine'])": Columns(TWO, img=IMAGES, coarse=[0, 1, 2], fine=[0, 1, 2]),
    "column 'label': label -1 has no name in its 3 classes":
        Columns({"image": OF_IMAGES, "label": NAMES}, image=IMAGES, label=[0, -1, 2]),
    "column 'image': item 1: is a NoneType, not a PIL image or a uint8 tensor (3, side, side); remove ToTensor and "
    "Normalize, which the learner applies itself":
        Columns({"image": OF_IMAGES, "label": NAMES}, image=[IMAGES[0], None], label=[0, 1]),
    "column 'image': images of shapes (8, 8, 3) and (9, 9, 3); give 'folder:ROOT', with their files in ROOT/<class>, "
    "to have images resized as they are read, or resize them to one size":
        Columns({"image": OF_IMAGES, "label": NAMES}, image=[IMAGES[0], *pictures(1, 9)], label=[0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_learned_of_them_is_one_line(message):
    with pytest.raises(UserError) as caught:
        read_source(REFUSED[message])
    assert str(caught.value) == message


def test_the_real_package_is_read_as_its_stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    names = ["emu", "cat", "emu"]
    for number, (image, name) in enumerate(zip(IMAGES, names)):
        path = tmp_path / "own" / "train" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    where = {"data_dir": str(tmp_path / "own"), "cache_dir": str(tmp_path / "cache")}
    splits = datasets.load_dataset("imagefolder", **where)
    expected = sorted((np.asarray(image).tolist(), name) for image, name in zip(IMAGES, names))
    for form in (splits["train"], splits["train"].with_format("torch"), splits["train"].with_format("numpy")):
        assert sorted(samples(form)) == expected
    with pytest.raises(UserError, match=r"give one of its splits, such as \['train'\]"):
        read_source(splits)
    streams = datasets.load_dataset("imagefolder", **where, streaming=True)
    for streamed in (streams, streams["train"]):
        with pytest.raises(UserError, match="it is streamed and has no length; load the data set without streaming"):
            read_source(streamed)
