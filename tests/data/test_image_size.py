"""Images in arrays that are smaller than what the network sees, and parts of a data set."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run


def made(settings, **keys):
    config = resolve(settings | {"model_name": "replay"} | keys)
    return Run(config, Datasets().of(config), lambda progress: None)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [5, 24])
def test_batches_are_resized_as_pil_images_are(interpolation, side):
    images = torch.randint(64, 192, (3, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = augment.resize(images, side, interpolation)
    for image, resized in zip(images, ours):
        pil = functional.to_pil_image(image.permute(2, 0, 1))
        theirs = functional.resize(pil, [side, side], v2.InterpolationMode(interpolation))
        assert np.abs(resized.numpy() - np.asarray(theirs, np.float32)).max() <= 1.0  # PIL rounds, twice


def test_the_network_sees_larger_images_after_their_augmentation(settings):
    run = made(settings, image_size=24, flip=True, padding=1, **{"convnet_options.width": 4})
    (images, _), *_ = run.train_source.batches(np.arange(6), run.manager.train_targets, 6, train=True, shuffle=False)
    generator = torch.Generator().manual_seed(0)
    stored = augment.random_crop_flip(torch.from_numpy(run.dataset.train.images[:6]), 1, True, generator)
    info = run.dataset.info
    mean, std = torch.tensor(info.mean), torch.tensor(info.std)
    expected = (augment.resize(stored, 24, "bilinear") / 255 - mean) / std
    assert images.shape == (6, 3, 24, 24)
    torch.testing.assert_close(images, expected.permute(0, 3, 1, 2), rtol=1e-5, atol=1e-5)
    assert len(run.execute()["curve"]) == 3


def test_max_tasks_is_the_beginning_of_the_whole_run(settings):
    whole, part = made(settings).execute(), made(settings, max_tasks=2).execute()
    for name in ("curve", "matrix", "train_loss", "nme_curve"):
        assert part[name] == whole[name][:2]
    assert part["class_order"] == whole["class_order"][:4] and np.shape(part["confusion"]) == (4, 4)


def test_more_tasks_than_there_are_change_nothing(settings):
    whole, more = (made(settings, max_tasks=number).manager for number in (None, 9))
    assert more.boundaries == whole.boundaries == [0, 2, 4, 6] and more.class_order == whole.class_order
    for mine, theirs in zip(more.tasks, whole.tasks, strict=True):
        assert (mine.index, mine.num_old, mine.num_seen) == (theirs.index, theirs.num_old, theirs.num_seen)
        assert np.array_equal(mine.train_indices, theirs.train_indices)
        assert np.array_equal(mine.test_indices, theirs.test_indices)


def test_a_subset_of_classes_is_learned_alone(settings):
    run = made(settings, classes=[5, "0", 2], init_cls=1, increment=1)
    result = run.execute()
    assert sorted(result["class_names"]) == ["0", "2", "5"] and len(result["curve"]) == 3
    for number, label in enumerate((5, 0, 2)):
        whole = made(settings).dataset.train
        assert np.array_equal(
            run.dataset.train.images[run.dataset.train.targets == number], whole.images[whole.targets == label]
        )
    assert run.data == made(settings).data


@pytest.mark.parametrize(
    "classes, line",
    [
        ([0, 6], r"no class 6; its labels are 0\.\.5"),
        (["zero"], "no class 'zero'; known: 0, 1, 2, 3, 4, 5"),
        ([1, "1"], "'1' is named twice"),
    ],
)
def test_wrong_classes_are_one_line(classes, line, settings):
    with pytest.raises(UserError, match=f"classes: .*{line}"):
        made(settings, classes=classes)
