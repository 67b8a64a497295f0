"""X-DER beside Mammoth's arithmetic (``reference/xder.py``): at equal weights and draws, three tasks are equal to
rounding; and the strong augmentation beside torchvision's.
"""

import copy
import functools
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from reference.xder import Xder
from support.methods import SILENT
from support.small_runs import SETTINGS, run_of, small_data, uncounted
from torchvision.transforms import functional

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.methods.replay.by_step import simclr
from pycil_wsc.training.learner import grow_for

RATE = {"momentum": 0.9, "weight_decay": 1e-3}
KEYS = {"memory_size": 11, "replay_batch_size": 5, "batch_size": 4, "precision": "fp32", "model_name": "xder"}
KEYS |= {"init_epoch": 1, "epochs": 1, "init_lr": 0.02, "lrate": 0.02, "init_milestones": [], "milestones": []}
KEYS |= {"init_weight_decay": 1e-3, "convnet_options.width": 4} | RATE
OPTIONS = {"alpha": 0.3, "beta": 0.8, "gamma": 0.85, "lambd": 0.5, "simclr_temp": 0.5, "simclr_batch_size": 3}
OPTIONS |= {"simclr_num_aug": 2, "constr_eta": 0.4, "constr_margin": 0.3, "future_constraint": True}
CASES = {
    "plain": OPTIONS | {"past_constraint": False, "dp_weight": 0.0, "align_bn": True},
    "all": OPTIONS | {"past_constraint": True, "dp_weight": 20.0, "align_bn": True},
    "every pass": OPTIONS | {"past_constraint": False, "dp_weight": 0.0, "align_bn": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("xder")


def begun(case, folder):
    data = small_data(folder / "data.npz", per_class=6)
    keys = KEYS | CASES[case] | {"dataset": f"npz:{data}", "out": str(folder), "increments": [2, 1, 3]}
    return run_of({name: value for name, value in SETTINGS.items() if name not in ("init_cls", "increment")} | keys)


@functools.cache
def trained(case, folder):
    """The network before, what each task drew, and the learner after three tasks."""
    run = begun(case, folder)
    learner = run.learner
    before, tasks = None, []
    step, logits, numbers = learner.before_step, learner._logits, learner._numbers

    def drawing(generator):
        drawn = numbers(generator)
        tasks[-1].coins.append(drawn[0])
        return drawn

    def stepping(batch):
        tasks[-1].steps.append(step(batch))
        return tasks[-1].steps[-1]

    def passing(batch):
        tasks[-1].passes.append(batch)
        return logits(batch)

    watched = patch.multiple(learner, before_step=stepping, _logits=passing, _numbers=drawing)
    with uncounted(), watched:
        for task in run.manager.tasks:
            grow_for(learner, task)
            before = before or copy.deepcopy(learner.network)
            tasks.append(SimpleNamespace(coins=[], steps=[], passes=[], slots=None))
            learner.learn(task, SILENT)
            tasks[-1].slots = learner.memory.slots.copy()
    return before, tasks, run


def twin_of(case, folder, mistakes=()):
    before, tasks, run = trained(case, folder)
    bounds = run.manager.boundaries
    heads = list(zip(bounds, bounds[1:]))
    twin = Xder(copy.deepcopy(before), heads, 0.02, mistakes, replay_batch_size=5, **CASES[case])
    targets = run.manager.train_targets
    for number, task in enumerate(tasks):
        twin.begin_task(**RATE)
        for batch, coins in zip(task.steps, task.coins, strict=True):
            replays = [(each.images, each.slots.tolist()) for each in batch.replay[:2]]
            of_each = [coin for row, (_, slots) in zip(coins, replays) for coin in row[: len(slots)].tolist()]
            sources = [*batch.replay[2:], batch]
            views = [torch.stack(each.views, 1) for each in sources] if batch.views else None
            drawn = sources[0].slots.tolist() if len(sources) > 1 else []
            views = None if views is None else torch.cat(views)
            twin.observe(batch.images, batch.targets, replays, of_each, views, drawn)
        first = [batch for batch in task.passes if batch.slots is None]
        again = [(batch.images, batch.slots.tolist()) for batch in task.passes if batch.slots is not None]
        epoch = [(batch.images, batch.targets, batch.indices.tolist()) for batch in first]
        start, end = heads[number]
        counts = np.bincount(targets[task.slots], minlength=end)[start:end]
        extra = (start + np.flatnonzero(counts > counts.min())).tolist()
        twin.end_task(11, epoch, extra, again)
        if not mistakes:
            assert [entry[0] for entry in twin.memory] == task.slots.tolist()
    return twin


def difference(case, folder, mistakes=()):
    """The largest one of any weight, statistic or stored logit after three tasks."""
    twin = twin_of(case, folder, mistakes)
    learner = trained(case, folder)[2].learner
    ours, theirs = learner.network.state_dict().values(), twin.network.state_dict().values()
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0].is_floating_point()]
    stored = learner.memory.stored.of("logits", torch.arange(len(twin.memory)))
    pairs.append((stored, torch.stack([entry[2] for entry in twin.memory])))
    return max((mine - other).abs().max().item() for mine, other in pairs)


@pytest.mark.parametrize("case", CASES)
def test_three_uneven_tasks_are_mammoths_at_equal_draws(case, folder):
    largest = difference(case, folder)
    print(f"{case}: {largest:.1e}")
    assert largest < 1e-5


@pytest.mark.parametrize("mistake", ["not scaled", "present head", "twice", "always", "past as it is"])
def test_the_comparison_notices_a_slip(mistake, folder):
    assert difference("plain", folder, (mistake,)) > 1e-4


def test_the_memory_has_as_many_exemplars_of_each_class_to_one(folder):
    """Of 11 slots: two classes, three, and six, each keeping its share; what is left goes to new classes."""
    _, tasks, run = trained("plain", folder)
    counts = [np.bincount(run.manager.train_targets[task.slots]).tolist() for task in tasks]
    assert [sorted(row) for row in counts] == [[5, 6], [3, 3, 5], [1, 1, 1, 2, 3, 3]]
    assert counts[1][:2] == [3, 3] and counts[2][:3] == [1, 1, 1]


def unchanging(number):
    """Drawn numbers that leave an image as it is: (number, ``NUMBERS``)."""
    numbers = torch.full((number, simclr.NUMBERS), 0.999999)  # the whole image
    numbers[:, 20:22] = 0.0
    numbers[:, 10:20] = 0.5
    numbers[:, -3:] = torch.tensor([0.6, 0.9, 0.3])  # none of the three
    return numbers


def test_views_are_made_of_images_as_they_are_stored(folder):
    run = begun("plain", folder)
    learner, targets = run.learner, run.manager.train_targets
    pictured = []

    def compared(batch):
        for each in (*batch.replay[2:], batch) if batch.views else ():
            (images, _), *_ = learner.batches.source.batches(each.indices.numpy(), targets, len(each))
            assert torch.allclose(torch.stack(each.views), images.expand(2, *images.shape), atol=1e-4)
            pictured.append(each is batch)
        return batch

    before, numbers = learner.before_step, learner._numbers
    drawing = patch.object(
        learner, "_numbers", lambda generator: (numbers(generator)[0], unchanging(16).view(2, 8, -1))
    )
    watched = patch.object(learner, "before_step", lambda batch: compared(before(batch)))
    with uncounted(), drawing, watched:
        for task in run.manager.tasks[:2]:
            learner.learn(task, SILENT)
    assert pictured.count(False) == 2 and pictured.count(True) == 3 + 2


def test_a_memory_of_each_class_is_refused():
    with pytest.raises(UserError, match="^fixed_memory: 'xder' divides memory_size among the classes"):
        resolve(SETTINGS | {"model_name": "xder", "fixed_memory": True})


# ---- the strong augmentation -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(24, 3, 12, 12, generator=generator)
    images[0] = 0.5  # grey, without a hue
    images[1] = 0
    return images, torch.rand(24, simclr.NUMBERS, generator=generator)


def test_crops_are_torchvisions(drawn):
    images, numbers = drawn
    boxes = simclr.boxes(12, numbers[:, :10], numbers[:, 10:20], numbers[:, 20:22])
    found = simclr.cropped(images, boxes)
    assert len({tuple(box) for box in boxes[..., 0].T.tolist()}) > 15
    for image, box, crop in zip(images, boxes[..., 0].T.int().tolist(), found, strict=True):
        top, left, height, width = box
        assert 0 <= top <= 12 - height and 0 <= left <= 12 - width
        assert torch.allclose(crop, functional.resized_crop(image, *box, [12, 12], antialias=True), atol=1e-5)


def test_colours_change_as_torchvisions_do_in_the_order_of_each_image(drawn):
    images, numbers = drawn
    factors = numbers[:, :4] + torch.tensor([0.5, 0.5, 0.5, -0.5])
    order = numbers[:, 4:8].argsort(1)
    changes = functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation
    changes = (*changes, functional.adjust_hue)
    for row, changed in enumerate(simclr.recoloured(images, factors, order)):
        image = images[row]
        for change in order[row].tolist():
            image = changes[change](image, factors[row, change].item())
        assert torch.allclose(changed, image, atol=1e-5)


def test_images_are_flipped_recoloured_and_grey_by_chance(drawn):
    images, _ = drawn
    numbers = unchanging(len(images))
    assert torch.allclose(simclr.strongly_augmented(images, numbers), images, atol=1e-5)
    numbers[:, -3] = 0.4
    assert torch.allclose(simclr.strongly_augmented(images, numbers), images.flip(3), atol=1e-5)
    numbers[:, -1] = 0.1
    grey = functional.rgb_to_grayscale(images.flip(3), 3)
    assert torch.allclose(simclr.strongly_augmented(images, numbers), grey, atol=1e-5)
