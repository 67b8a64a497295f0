"""A memory that steps fill: what enters it is what slow references let enter, and what is stored stays with it."""

from collections import Counter

import numpy as np
import pytest
import torch
from reference.mammoth import Buffer

from pycil_wsc.data.batches.epoch_order import batch_slices, repeated
from pycil_wsc.data.memory.stream_memory import NONE, SlotValues, StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.training.replay_plan import EpochPlan, planned_images


def stream(length, classes=3, seed=0):
    """(samples, labels) of a stream."""
    return np.arange(100, 100 + length), np.random.default_rng(seed).integers(classes, size=length)


def entered(memory, samples, labels, sizes, seed=0):
    """Let parts of the stream of these ``sizes`` enter."""
    start = 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        places = memory.choose(labels[part], np.random.default_rng((seed, number)))
        memory.enter(samples[part], labels[part], places)
        start += size
    return memory


@pytest.mark.parametrize("size", [0, 1, 7, 200])
def test_a_reservoir_is_mammoths_for_the_same_draws(size):
    samples, labels = stream(120)
    memory = StreamMemory(False, 0, size, "reservoir")
    buffer = Buffer(size)
    for part in batch_slices(120, 11):
        seen = np.arange(part.start, part.stop)
        full = seen >= size
        drawn = np.zeros(len(seen), np.int64)
        drawn[full] = np.random.default_rng(part.start).integers(seen[full] + 1)
        places = memory.choose(labels[part], np.random.default_rng(part.start))
        memory.enter(samples[part], labels[part], places)
        buffer.add(samples[part], drawn)
    assert dict(enumerate(memory.slots)) == buffer.content and memory.seen == buffer.seen
    assert memory.labels.tolist() == labels[memory.slots - 100].tolist()


def test_each_class_has_a_reservoir_that_is_uniform_over_its_samples():
    samples = np.arange(40)
    labels = np.repeat([0, 1], [30, 10])[np.random.default_rng(1).permutation(40)]
    counts = Counter()
    for seed in range(400):
        memory = entered(StreamMemory(True, 3, 0, "reservoir"), samples, labels, [9, 9, 9, 13], seed)
        assert {label: len(kept) for label, kept in memory.classes.items()} == {0: 3, 1: 3}
        counts.update(memory.slots.tolist())
    for sample in range(40):
        expected = 400 * 3 / (labels == labels[sample]).sum()
        assert abs(counts[sample] - expected) < 5 * expected**0.5


def test_a_balanced_reservoir_keeps_small_classes_whole_and_is_uniform_over_the_largest():
    """Chrysakis and Moens (2020): classes that were never the largest lose nothing."""
    samples = np.arange(60)
    labels = np.repeat([0, 1, 2], [50, 7, 3])[np.random.default_rng(1).permutation(60)]
    counts = Counter()
    for seed in range(600):
        memory = entered(StreamMemory(False, 0, 20, "balanced"), samples, labels, [20, 20, 20], seed)
        held = Counter(memory.labels.tolist())
        assert held == {0: 10, 1: 7, 2: 3}
        counts.update(memory.slots.tolist())
    largest = [counts[sample] for sample in np.flatnonzero(labels == 0).tolist()]
    assert abs(np.array(largest) - 600 * 10 / 50).max() < 5 * 120**0.5


@pytest.mark.parametrize("fixed, strategy", [(False, "reservoir"), (True, "reservoir"), (False, "balanced")])
def test_a_plan_of_an_epoch_draws_what_is_in_the_memory_at_each_step(fixed, strategy):
    samples, labels = stream(53)
    memory = entered(StreamMemory(fixed, 4, 9, strategy), samples[:6] - 90, labels[:6], [6])
    slices = batch_slices(53, 8, join=True)
    before = memory.state_dict()
    rngs = [np.random.default_rng(seed) for seed in range(3)]
    plan = EpochPlan(memory.copy(), samples, labels, slices, 1, [4, 20], rngs, True)
    assert memory.state_dict() == before
    for step, part in enumerate(slices):
        for which, size in enumerate([4, 20]):
            slots = plan.drawn[which][step]
            assert len(set(slots.tolist())) == len(slots) == min(size, len(memory))
            assert plan.samples[which][step].tolist() == memory.slots[slots].tolist()
        memory.enter(samples[part], labels[part], plan.places[step])
    assert memory.seen == 6 + 53


def test_a_batch_that_is_repeated_enters_after_its_last_step():
    samples, labels = stream(20)
    order, slices = repeated(samples, batch_slices(20, 6), 3)
    assert [order[part].tolist() for part in slices[:3]] == [samples[:6].tolist()] * 3
    rngs = [np.random.default_rng(seed) for seed in range(2)]
    memory = StreamMemory(False, 0, 50, "reservoir")
    plan = EpochPlan(memory, order, labels[order - 100], slices, 3, [5], rngs, True)
    assert [(places != NONE).sum() for places in plan.places] == [0, 0, 6, 0, 0, 6, 0, 0, 6, 0, 0, 2]
    assert [len(slots) for slots in plan.drawn[0]] == [0] * 3 + [5] * 9


@pytest.mark.parametrize("fixed, strategy", [(False, "reservoir"), (True, "reservoir"), (False, "balanced")])
def test_the_images_of_a_task_are_planned_as_they_are_trained(fixed, strategy):
    samples, labels = stream(40, classes=4)
    memory = StreamMemory(fixed, 6, 15, strategy)
    orders = [np.random.default_rng(seed).permutation(labels) for seed in range(3)]
    planned = planned_images(memory, iter(orders), 7, 2, [5, 30], True)
    trained = 0
    for epoch in orders:
        for part in batch_slices(40, 7, join=True):
            trained += 2 * (part.stop - part.start + min(5, len(memory)) + min(30, len(memory)))
            memory.enter(samples[part], epoch[part], memory.choose(epoch[part], np.random.default_rng(0)))
    assert planned == trained


def test_slots_keep_what_is_stored_until_another_sample_enters_and_narrower_rows_are_filled_up():
    memory = entered(StreamMemory(False, 0, 5, "reservoir"), *stream(3), [3])
    stored = memory.stored
    stored.put("logits", torch.tensor([2, 0]), torch.tensor([[1.0, 2], [3, 4]]))
    stored.put("task", torch.tensor([0, 1, 2]), torch.tensor([7, 8, 9]))
    stored.put("logits", torch.tensor([1]), torch.tensor([[5.0, 6, 7]]))
    rows = stored.of("logits", torch.tensor([0, 1, 2]))
    expected = torch.tensor([[3, 4, torch.nan], [5, 6, 7], [1, 2, torch.nan]])
    assert torch.equal(rows.nan_to_num(-1), expected.nan_to_num(-1))
    other = SlotValues(memory, torch.device("cpu"))
    other.load_state_dict(stored.state_dict())
    assert torch.equal(other.of("task", torch.tensor([2, 1])), torch.tensor([9, 8]))
    assert torch.equal(other.of("logits", torch.tensor([1])), torch.tensor([[5.0, 6, 7]]))


def test_duplicates_fill_slots_but_are_one_exemplar():
    memory = StreamMemory(False, 0, 10, "reservoir")
    samples, labels = np.array([4, 5, 6]), np.array([1, 0, 1])
    for _ in range(2):
        memory.enter(samples, labels, memory.choose(labels, np.random.default_rng(0)))
    assert len(memory) == 6 and memory.indices.tolist() == [5, 4, 6]
    assert {label: kept.tolist() for label, kept in memory.classes.items()} == {0: [5], 1: [4, 6]}


def test_a_copy_that_counts_is_filled_as_the_steps_will_fill_the_memory():
    task = Task(0, 0, 3, np.arange(30), np.arange(0))
    targets = np.repeat([0, 1, 2], 10)
    memory = StreamMemory(True, 4, 0, "reservoir", presented=lambda task: np.tile(task.train_indices, 5))
    counting = memory.counting()
    counting.update(task, targets, None, np.random.default_rng(0))
    assert len(counting) == 12 and counting.seen == 150 and not len(memory)
