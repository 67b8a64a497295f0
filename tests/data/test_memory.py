"""Exemplars: herding picks the same samples as PyCIL, quotas hold, and sampling is uniform."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.herding import features, herding_by_the_book

from pycil_wsc.data.memory.exemplar_selection import herding, normalise, reservoir
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 50), st.integers(1, 16), st.integers(0, 10_000))
def test_herding_picks_what_the_slow_reference_picks(count, quota, width, seed):
    features = np.random.default_rng(seed).normal(size=(count, width))
    assert herding(features, quota).tolist() == herding_by_the_book(features, quota)


def herding_of_all_rows(features, quota):
    """The distance of every candidate, in the features' precision."""
    features = normalise(features)
    mean, total, taken = features.mean(0), np.zeros_like(features[0]), []
    for k in range(1, min(quota, len(features)) + 1):
        distance = np.sqrt((((features + total) / k - mean) ** 2).sum(1))
        distance[taken] = np.inf
        taken.append(int(distance.argmin()))
        total = total + features[taken[-1]]
    return taken


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 70),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from(["apart", "repeated", "whole", "nearly equal", "not finite"]),
    st.sampled_from([np.float32, np.float64]),
)
def test_herding_picks_what_the_distances_of_all_rows_say(count, quota, width, seed, kind, dtype):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, width))
    if kind == "repeated":
        features = features[rng.integers(0, max(1, count // 3), count)]
    if kind == "whole":
        features = features.round()
    if kind == "nearly equal":
        features = 1 + 1e-4 * features
    if kind == "not finite":
        features[rng.integers(count)] = np.nan
    features = features.astype(dtype)
    assert herding(features, quota).tolist() == herding_of_all_rows(features, quota)


def test_of_equal_candidates_herding_takes_the_first():
    assert herding(np.ones((5, 3)), 5).tolist() == [0, 1, 2, 3, 4]


TARGETS = np.repeat(np.arange(6), 10)


def tasks(per_task=2):
    for index, old in enumerate(range(0, 6, per_task)):
        yield Task(
            index,
            old,
            old + per_task,
            np.flatnonzero((TARGETS >= old) & (TARGETS < old + per_task)),
            np.empty(0, np.int64),
        )


def filled(strategy, fixed, per_class=0, total=0, seed=0):
    memory, history = ExemplarMemory(fixed, per_class, total, strategy), []
    for task in tasks():
        memory.update(task, TARGETS, features, np.random.default_rng([seed, task.index]))
        history.append({c: kept.tolist() for c, kept in memory.classes.items()})
    return memory, history


@pytest.mark.parametrize("strategy", ["herding", "random"])
@pytest.mark.parametrize("quota, kept", [(0, 0), (3, 3), (10, 10), (1000, 10)])
def test_fixed_memory_keeps_the_quota_and_never_touches_old_classes(strategy, quota, kept):
    memory, history = filled(strategy, True, per_class=quota)
    assert len(memory) == len(memory.indices) == 6 * kept
    for before, after in zip(history, history[1:]):
        assert all(after[c] == before[c] for c in before)
    for c, indices in memory.classes.items():
        assert len(set(indices.tolist())) == kept and (TARGETS[indices] == c).all()


@pytest.mark.parametrize(
    "strategy, fixed", [("herding", True), ("random", True), ("reservoir", True), ("reservoir", False)]
)
def test_a_smaller_quota_than_before_holds_for_old_classes_too(strategy, fixed):
    memory = ExemplarMemory(fixed, 5, 20, strategy)
    one, two, three = tasks()
    memory.update(one, TARGETS, features, np.random.default_rng(0))
    before = {c: set(kept.tolist()) for c, kept in memory.classes.items()}
    memory.per_class, memory.total = 2, 8
    memory.update(two, TARGETS, features, np.random.default_rng(1))
    assert len(memory) == 8 and all(set(memory.classes[c].tolist()) <= before[c] for c in before)


def test_herding_keeps_the_picks_of_the_class_in_order():
    memory, _ = filled("herding", True, per_class=4)
    for c, indices in memory.classes.items():
        rows = np.flatnonzero(TARGETS == c)
        assert indices.tolist() == rows[herding_by_the_book(features(rows), 4)].tolist()


@pytest.mark.parametrize("strategy", ["herding", "random"])
def test_shared_memory_shrinks_old_classes_to_their_first(strategy):
    _, history = filled(strategy, False, total=20)
    assert [{len(kept) for kept in classes.values()} for classes in history] == [{10}, {5}, {3}]
    for before, after in zip(history, history[1:]):
        assert all(after[c] == before[c][: len(after[c])] for c in before)


def test_nothing_is_described_where_nothing_is_herded():
    def refuse(indices):
        raise AssertionError("features were computed for nothing")

    for strategy, quota in [("random", 3), ("reservoir", 3), ("herding", 0)]:
        memory = ExemplarMemory(True, quota, 0, strategy)
        memory.update(next(tasks()), TARGETS, refuse, np.random.default_rng(0))


@pytest.mark.parametrize(
    "fixed, quota, expected",
    [(True, {"per_class": 4}, [8, 16, 24]), (False, {"total": 15}, [15, 15, 15]), (False, {"total": 50}, [20, 40, 50])],
)
def test_reservoir_holds_its_capacity(fixed, quota, expected):
    memory, history = filled("reservoir", fixed, **quota)
    assert [sum(map(len, classes.values())) for classes in history] == expected
    assert len(set(memory.indices.tolist())) == expected[-1]
    assert all((TARGETS[kept] == c).all() for c, kept in memory.classes.items())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(0, 50), st.integers(0, 200), st.integers(1, 40), st.integers(0, 10_000))
def test_the_reservoir_is_vitters_item_by_item(held, dropped, coming, capacity, seed):
    rng, stream = np.random.default_rng(seed), np.arange(1000, 1000 + coming)
    chosen = list(np.arange(held) if held <= capacity else rng.permutation(held)[:capacity])
    for count, item in enumerate(rng.permutation(stream), start=held + dropped + 1):
        if len(chosen) < capacity:
            chosen.append(item)
        elif (slot := rng.integers(count)) < capacity:
            chosen[slot] = item
    again = np.random.default_rng(seed)
    assert reservoir(np.arange(held), held + dropped, stream, capacity, again).tolist() == chosen
    assert again.random() == rng.random(), "and what is drawn next is the same"


def test_reservoir_over_the_stream_is_uniform():
    """Each of the 60 samples is held with probability 12/60 in the end, whenever it came:
    within five standard deviations.
    """
    counts = np.zeros(60)
    for seed in range(600):
        counts[filled("reservoir", False, total=12, seed=seed)[0].indices] += 1
    assert np.abs(counts / 600 - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 600)
    assert abs(counts[:20].sum() - counts[40:].sum()) / 600 < 0.5


def test_with_a_fixed_memory_each_class_has_a_reservoir_of_its_own():
    """Classes 0 and 1 come in each of three tasks, with a third of their images: each is held as likely as the others,
    an early one as a late one. Within five standard deviations.
    """
    parts = [np.flatnonzero((TARGETS < 2) & (np.arange(60) % 3 == number)) for number in range(3)]
    counts = np.zeros(60)
    for seed in range(400):
        memory = ExemplarMemory(True, 4, 0, "reservoir")
        for index, part in enumerate(parts):
            task = Task(index, 2 if index else 0, 2, part, np.empty(0, np.int64))
            memory.update(task, TARGETS, None, np.random.default_rng([seed, index]))
            assert all(len(kept) == min(4, memory.seen_by_class[c]) for c, kept in memory.classes.items())
        counts[memory.indices] += 1
    assert np.abs(counts[:20] / 400 - 0.4).max() < 5 * np.sqrt(0.4 * 0.6 / 400) and not counts[20:].any()


@pytest.mark.parametrize(
    "strategy, fixed", [("random", True), ("herding", True), ("reservoir", True), ("reservoir", False)]
)
def test_a_memory_that_was_saved_goes_on_as_it_would_have(strategy, fixed):
    """A reservoir's next choice depends on the number of samples that it has seen."""
    one, two, three = tasks()
    memory, other = (ExemplarMemory(fixed, 3, 12, strategy) for _ in range(2))
    for task in (one, two):
        memory.update(task, TARGETS, features, np.random.default_rng([0, task.index]))
    buffer = io.BytesIO()
    torch.save(memory.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for each in (memory, other):
        each.update(three, TARGETS, features, np.random.default_rng(1))
    assert other.indices.tolist() == memory.indices.tolist()
    assert {*memory.indices} & {*three.train_indices} and {*memory.indices} - {*three.train_indices}
