"""Changes of a learner's classes without a task: renamed, merged, removed, and images that get another class.

A method that computes its classifier is afterwards what it would be had it learned so from the start: an image is moved
between sums, or taken out of them. A method that trains keeps its network: the head's rows, the exemplars and the
held-out images follow, and the network learns of the change with the next task.

Each function returns another learner, and leaves the one that it is given as it is.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pycil_wsc import registry
from pycil_wsc.classifier.class_names import told_similar
from pycil_wsc.classifier.predict.calibration import fitted_temperature
from pycil_wsc.classifier.predict.rebuild import Reached, config_with_weights_elsewhere, rebuilt
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping, ClassChange, Entry
from pycil_wsc.classifier.store.exemplar_files import check_exemplars
from pycil_wsc.classifier.store.hashes import digests_of, hashes_of, with_classes
from pycil_wsc.classifier.store.saved_learner import SavedLearner, answers_of
from pycil_wsc.classifier.update.class_rows import Regrouping, regrouped_state
from pycil_wsc.classifier.update.corrections import (
    Corrections,
    called,
    corrections_in,
    without_exemplars,
    without_former,
)
from pycil_wsc.classifier.update.held_out import rows_of
from pycil_wsc.classifier.update.known_images import Say, learns_once, takes_out
from pycil_wsc.classifier.update.prepare import part_of
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.images.npz import problem_of_name
from pycil_wsc.data.images.sources import ImageSource
from pycil_wsc.data.memory.memory import regrouped
from pycil_wsc.data.tasks.growing_dataset import marked
from pycil_wsc.data.types import Dataset, Split, normal
from pycil_wsc.errors import UserError
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.state import State
from pycil_wsc.training.learner_state import memory_of, with_parts


class Changed(NamedTuple):
    """The learner after a change, the change itself, and a line about it."""

    learner: SavedLearner
    change: ClassChange
    line: str


def renamed(config: Config, present: SavedLearner, name: str, to: str) -> Changed:
    """Call the class ``name`` ``to``, a name that no class has."""
    label = _label("rename", present, name)
    to = _new_name("rename", to)
    if to == present.held.info.classes[label]:
        raise UserError(f"rename: '{to}' is called so already")
    if to in present.held.info.classes:
        raise UserError(f"rename: '{to}' is a learned class, too; merge(['{name}', '{to}'], into='{to}') joins them")
    names = list(present.held.info.classes)
    was = names[label]
    names[label] = to
    each_alone = [[number] for number in range(len(names))]
    learner = _regrouped(config, present, each_alone, names, {was: to})
    change = ClassChange(did="renamed", classes=[was], to=to)
    return _noted(config, learner, change, f"'{was}' is called '{to}' now{_beside_similar(to, names)}")


def merged(config: Config, present: SavedLearner, classes: Sequence[str], into: str) -> Changed:
    """Make one class, called ``into``, of several ``classes``, of whose names it may have one."""
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise UserError(f"merge: {classes!r} is not a list of classes; give their names")
    known = present.held.info.classes
    labels = sorted({_label("merge", present, name) for name in classes})
    into = _new_name("merge", into)
    if len(labels) < 2:
        raise UserError(f"merge: {list(classes)} is not a list of two classes or more; rename changes a name")
    if into in known and known.index(into) not in labels:
        raise UserError(f"merge: '{into}' is another learned class; add it to the list, or choose another name")
    first, *others = labels
    groups = [labels if label == first else [label] for label in range(len(known)) if label not in others]
    names = [into if group is labels else known[group[0]] for group in groups]
    if _is_computed(config):
        with _rebuilt(config, present) as learner:
            for label in others:
                learner.network.head.merge(label, first)
            learner.network.head.solve()
            present = _with_state(present, learner.state_dict())
    learner = _regrouped(config, present, groups, names, {known[label]: into for label in labels})
    before = [known[label] for label in labels]
    line = f"{', '.join(map(repr, before))} are '{into}' now{_beside_similar(into, names)}"
    if not _is_computed(config):
        line += "; the network tells them apart until it is trained again"
    return _noted(config, learner, ClassChange(did="merged", classes=before, to=into), line)


def removed(config: Config, present: SavedLearner, name: str, images: ImageSource | None, say: Say) -> Changed:
    """Leave out a class. ``images``: those of the class, which methods with sums over all classes need."""
    label = _label("remove", present, name)
    known = present.held.info.classes
    name = known[label]
    if len(known) == 1:
        raise UserError(f"remove: '{name}' is the only class; start a new learner")
    line = f"'{name}' is removed"
    if _is_computed(config):
        present = _without_sums(config, present, label, images, say)
    else:
        line += "; what the network has learned from its images stays until it is trained again"
    present = without_exemplars(present, present.held.train.targets == label)
    groups = [[other] for other in range(len(known)) if other != label]
    learner = _regrouped(config, present, groups, [known[group[0]] for group in groups], {name: None})
    return _noted(config, learner, ClassChange(did="removed", classes=[name]), line)


def relabelled(config: Config, present: SavedLearner, images: object, to: str, say: Say) -> Changed:
    """Give learned ``images`` the class ``to``, which is known."""
    label = _label("relabel", present, to)
    if learns_once(config.model_name) and not takes_out(config.model_name):
        raise UserError(f"relabel: '{config.method}' cannot take out what it has learned; start a new learner")
    known = present.held.info.classes
    split = _split_of("relabel", config, images, to, say)
    hashes = present.hashes | hashes_of((split,), present.hashes)
    digests = digests_of(split, hashes)
    held_out = digests_of(present.bookkeeping.held_out, present.hashes)
    _refuse_unknown(split, digests, np.union1d(present.bookkeeping.learned, held_out))
    split, digests = _each_once(split, digests)
    labels = np.full(len(split), label)
    corrections = corrections_in(digests, labels, known, present)
    exemplars = digests_of(present.held.train, present.hashes)
    aside = np.isin(held_out, digests) & (present.bookkeeping.held_out.targets != label)
    first = corrections.first()
    if not len(first.rows) and not aside.any():
        raise UserError(f"relabel: all of these images are learned as '{to}' already")
    if _is_computed(config) and len(first.rows):
        present = _with_moved_sums(config, present, replace(split, targets=labels), corrections)
    corrected = digests[first.rows]
    present = _with_moved_exemplars(present, np.isin(exemplars, corrected), label, first.former)
    former = sorted({*first.former.tolist(), *present.bookkeeping.held_out.targets[aside].tolist()})
    bookkeeping = _with_class(present.bookkeeping, corrected, to, known)
    targets = np.where(aside, label, bookkeeping.held_out.targets)
    features = bookkeeping.features.relabelled(digests, label)
    bookkeeping = replace(bookkeeping, held_out=replace(bookkeeping.held_out, targets=targets), features=features)
    number = len(first.rows) + int(aside.sum())
    which = "1 image is" if number == 1 else f"{number} images are"
    change = ClassChange(did="relabelled", classes=[known[was] for was in former], to=to, images=number)
    held = marked(present.held, ["relabelled", to, *map(str, np.sort(digests).tolist())])
    learner = present._replace(bookkeeping=bookkeeping, held=held)
    return _noted(config, learner, change, f"{which} of class '{to}' now")


# ---- what callers give -----------------------------------------------------------------------------------------------


def _label(what: str, present: SavedLearner, name: object) -> int:
    """The number of a class; ``what`` begins the error's line."""
    known = present.held.info.classes
    text = normal(name) if isinstance(name, str) else name
    if text not in known:
        some = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        raise UserError(f"{what}: {name!r} is not a learned class; the classes are {some}")
    return known.index(text)


def _new_name(what: str, name: object) -> str:
    if not isinstance(name, str):
        raise UserError(f"{what}: {name!r} is not the name of a class; give a string")
    if problem := problem_of_name(name):
        raise UserError(f"{what}: {problem}")
    return normal(name)


def _beside_similar(name: str, names: Sequence[str]) -> str:
    """The end of a line, if another one of these classes has nearly this name; "" otherwise."""
    line = told_similar([name], [other for other in names if other != name])
    return f"; {line}" if line else ""


def _split_of(what: str, config: Config, images: object, name: str, say: Say) -> Split:
    """The images that a caller names, whatever their classes are there."""
    source = images
    if not isinstance(images, (str, tuple)) and not hasattr(images, "features") and hasattr(images, "__len__"):
        source = (images, [name] * len(images))  # pyright: ignore[reportArgumentType]
    try:
        return part_of(source, config, say).train  # pyright: ignore[reportArgumentType]
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _each_once(split: Split, digests: np.ndarray) -> tuple[Split, np.ndarray]:
    rows = np.sort(np.unique(digests, return_index=True)[1])
    return rows_of(split, rows), digests[rows]


def _refuse_unknown(split: Split, digests: np.ndarray, known: np.ndarray) -> None:
    """Raise :class:`UserError` if an image was neither learned nor held out: its digest is not ``known``."""
    unknown = np.flatnonzero(~np.isin(digests, known))
    if len(unknown):
        first = called(split, int(unknown[0]))
        raise UserError(f"relabel: {len(unknown)} of {len(split)} images were never learned, such as {first}; learn it")


# ---- sums ------------------------------------------------------------------------------------------------------------


def _is_computed(config: Config) -> bool:
    """Whether the classifier is computed from sums."""
    return issubclass(registry.learners[config.model_name], ClosedForm)


@contextmanager
def _rebuilt(config: Config, present: SavedLearner, images: Split | None = None) -> Iterator[ClosedForm]:
    """A context with the learner itself, which can extract the features of ``images``."""
    assert present.held.arrivals is not None
    config = replace(config_with_weights_elsewhere(config), tasks=tuple(present.config["tasks"]))
    reached = Reached.of_stream(present.held.arrivals.seen)
    learner = rebuilt(config, present.held.info, reached, present.state["learner"], images)
    assert isinstance(learner, ClosedForm)
    try:
        with torch.no_grad():
            yield learner
    finally:
        learner.batches.source.close()


def _with_state(present: SavedLearner, learner: State) -> SavedLearner:
    return present._replace(state={**present.state, "learner": learner})


def _without_sums(
    config: Config, present: SavedLearner, label: int, images: ImageSource | None, say: Say
) -> SavedLearner:
    """Take the images of a class out of sums that they share with other classes."""
    name, method = present.held.info.classes[label], config.method
    if not takes_out(config.model_name):
        raise UserError(f"remove: '{method}' cannot take out what it has learned; start a new learner")
    with _rebuilt(config, present) as learner:
        if learner.network.head.apart:
            return present
        number = float(learner.network.head.class_counts()[label]) / learner.repeats
    if number == 0:
        return present
    if images is None:
        raise UserError(
            f"remove: '{method}' needs the images that it has learned as '{name}', to take them out of its sums; give "
            f"remove('{name}', images='folder:PATH')"
        )
    split = _split_of("remove", config, images, name, say)
    digests = digests_of(split, present.hashes)
    split, digests = _each_once(split, digests)
    mixed = with_classes(digests, np.zeros(len(digests), np.int64), [name])
    split = rows_of(split, np.isin(mixed, present.bookkeeping.learned))
    if len(split) != number:
        raise UserError(
            f"remove: {len(split)} of the images that were learned as '{name}' are here, of {number:.0f}; give all of "
            "them, with the content that they had"
        )
    with _rebuilt(config, present, Split(split.images, np.full(len(split), label))) as learner:
        for features, labels in _parts(learner, np.arange(len(split))):
            learner.network.head.remove(features, labels)
        learner.network.head.solve()
        return _with_state(present, learner.state_dict())


def _with_moved_sums(config: Config, present: SavedLearner, split: Split, corrections: Corrections) -> SavedLearner:
    """Move images of ``split``, whose targets are the new classes, from their former ones."""
    with _rebuilt(config, present, split) as learner:
        labels = torch.from_numpy(split.targets)
        rows = np.unique(corrections.rows)
        features = torch.from_numpy(learner.outputs.features(rows))
        places = np.searchsorted(rows, corrections.rows)
        for _ in range(learner.repeats):
            learner.correct(features, labels[torch.from_numpy(rows)], places, corrections.former)
        learner.network.head.solve()
        return _with_state(present, learner.state_dict())


def _parts(learner: ClosedForm, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels of some images on the device, a part at a time, each as often as it was learned."""
    for start in range(0, len(indices), learner.part):
        rows = indices[start : start + learner.part]
        features = torch.from_numpy(learner.outputs.features(rows)).to(learner.device)
        labels = torch.from_numpy(learner.manager.train_targets[rows]).to(learner.device)
        yield features.repeat(learner.repeats, 1), labels.repeat(learner.repeats)


# ---- the other parts -------------------------------------------------------------------------------------------------


def _regrouped(
    config: Config,
    present: SavedLearner,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    changes: Mapping[str, str | None],
) -> SavedLearner:
    """``present`` with the classes ``groups``, called ``names``; ``changes``: former name -> present one, or None."""
    held = present.held
    assert held.arrivals is not None
    regrouping = Regrouping(groups, tuple(names), held.arrivals.seen)
    state = present.state["learner"]
    if len(groups) < held.info.num_classes:
        config = replace(config_with_weights_elsewhere(config), tasks=tuple(present.config["tasks"]))
        state = regrouped_state(state, config, held.info, regrouping, mean=not _is_computed(config))
        state = with_parts(state, memory=regrouped(memory_of(state), groups))
    numbers, seen = regrouping.numbers, regrouping.seen_afterwards
    train = replace(held.train, targets=numbers[held.train.targets])
    held = replace(held, info=replace(held.info, classes=regrouping.names), train=train)
    assert held.arrivals is not None
    held = replace(held, arrivals=replace(held.arrivals, seen=seen))
    held = marked(held, [text for pair in changes.items() for text in map(str, pair)])
    bookkeeping = _with_names(present.bookkeeping, present.held.info.classes, changes, _is_computed(config))
    labels = numbers[bookkeeping.held_out.targets]
    kept = labels >= 0
    aside = Split(bookkeeping.held_out.images[kept], labels[kept])
    gone = digests_of(rows_of(bookkeeping.held_out, ~kept), present.hashes)
    bookkeeping = replace(
        bookkeeping,
        held_out=aside,
        entries=_entries_after(bookkeeping.entries, changes),
        perceptual=bookkeeping.perceptual.without(gone),
        features=bookkeeping.features.regrouped(numbers),
    )
    lines = [{**line, "num_seen": number} for line, number in zip(present.state["history"], seen, strict=True)]
    lines[-1]["exemplars"] = len(held.train)
    paths = {path for part in (held.train, aside) if not part.in_memory for path in part.images.tolist()}
    hashes = {path: digest for path, digest in present.hashes.items() if path in paths}
    return present._replace(
        held=held, state={**present.state, "learner": state, "history": lines}, bookkeeping=bookkeeping, hashes=hashes
    )


def _entries_after(entries: Sequence[Entry], changes: Mapping[str, str | None]) -> tuple[Entry, ...]:
    """The notes about tasks, whose new classes have their present names; of merged ones the first has it."""
    told: set[str] = set()
    entries_after = []
    for entry in entries:
        if "classes" in entry:
            names = [changes.get(name, name) for name in entry["classes"]]
            present = [name for name in dict.fromkeys(names) if name is not None and name not in told]
            told.update(present)
            entry = Entry(**{**entry, "classes": present})
        entries_after.append(entry)
    return tuple(entries_after)


def _with_names(
    bookkeeping: Bookkeeping, known: Sequence[str], changes: Mapping[str, str | None], forgets: bool
) -> Bookkeeping:
    """``bookkeeping`` whose digests of images with classes have the present names.

    ``forgets``: an image that has no class any more is as one that was never learned.
    """
    learned, images, perceptual = bookkeeping.learned, bookkeeping.images, bookkeeping.perceptual
    for name, now in changes.items():
        mixed = _mixed(images, name)
        of_class = np.isin(mixed, learned)
        learned = np.setdiff1d(learned, mixed[of_class])
        if now is not None:
            learned = np.union1d(learned, _mixed(images[of_class], now))
            continue
        left = images[of_class]
        for other in known:
            if other != name:
                left = left[~np.isin(_mixed(left, other), learned)]
        perceptual = perceptual.without(left)
        if forgets:
            learned, images = np.setdiff1d(learned, left), np.setdiff1d(images, left)
    return replace(bookkeeping, learned=learned, images=images, perceptual=perceptual)


def _with_class(bookkeeping: Bookkeeping, digests: np.ndarray, name: str, known: Sequence[str]) -> Bookkeeping:
    """``bookkeeping`` with another class of the images of these ``digests``."""
    learned = without_former(bookkeeping.learned, digests, known)
    learned = np.union1d(learned, np.concatenate([digests, _mixed(digests, name)]))
    return replace(bookkeeping, learned=learned, images=np.union1d(bookkeeping.images, digests))


def _mixed(digests: np.ndarray, name: str) -> np.ndarray:
    return with_classes(digests, np.zeros(len(digests), np.int64), [name])


def _with_moved_exemplars(present: SavedLearner, moved: np.ndarray, label: int, former: np.ndarray) -> SavedLearner:
    """``present`` whose exemplars for which ``moved``, bool (N,), is set have the class ``label``.

    ``former``: the class of each image that was relabelled, exemplars included.
    """
    learner = present.state["learner"]
    memory = memory_of(learner)
    rows = set(np.flatnonzero(moved).tolist())
    classes = {was: [row for row in kept if was == label or row not in rows] for was, kept in memory["classes"].items()}
    if rows:
        before = classes.get(label, [])
        classes[label] = [*before, *sorted(rows - set(before))]
    seen = dict(memory.get("seen_by_class", {}))
    for was in former.tolist():
        if seen.get(was):
            seen[was] -= 1
            seen[label] = seen.get(label, 0) + 1
    memory = {**memory, "classes": classes, "seen_by_class": seen}
    if "slots" in memory:  # of a memory that steps fill
        pairs = zip(memory["slots"], memory["labels"], strict=True)
        memory["labels"] = [label if slot in rows else was for slot, was in pairs]
    state = with_parts(learner, memory=memory)
    targets = np.where(moved, label, present.held.train.targets)
    held: Dataset = replace(present.held, train=replace(present.held.train, targets=targets))
    return _with_state(present._replace(held=held), state)


def _noted(config: Config, learner: SavedLearner, change: ClassChange, line: str) -> Changed:
    """The change in the history of its last task, and probabilities calibrated anew."""
    bookkeeping = learner.bookkeeping
    change["when"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    *earlier, last = bookkeeping.entries
    last = Entry(**{**last, "changes": [*last.get("changes", []), change]})
    learner = learner._replace(bookkeeping=replace(bookkeeping, entries=(*earlier, last)))
    held_out = bookkeeping.held_out
    if len(held_out) and change["did"] != "renamed":
        check_exemplars((held_out,), learner.hashes)
        logits = answers_of(config, learner).logits(held_out.images).cpu().numpy()
        temperature = fitted_temperature(logits, held_out.targets)
        learner = learner._replace(bookkeeping=replace(learner.bookkeeping, temperature=temperature))
    return Changed(learner, change, line)
