import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.batches.epoch_order import batch_slices, epoch_order
from pycil_wsc.data.memory.stream_memory import NONE, StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.by_step.pixels import Pixels
from pycil_wsc.methods.replay.by_step.simclr import NUMBERS, strongly_augmented
from pycil_wsc.methods.replay.dark_er import squared_distances
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batch_norm.parted import UntrackedBatchNorm
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.learner import Arguments, BaseLearner
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.replay_plan import Draw, draw_sizes, entering_of, seed_of

AFTER = "after the task"  # the address of the passes that store logits


@register_learner("xder", epochs=70, milestones=[30, 50])
class XDER(BaseLearner):
    """eXtended Dark Experience Replay (Boschini et al., TPAMI 2022, https://arxiv.org/abs/2201.00766) as in Mammoth.

    A head is the logits of a task's classes. Images of the batch compete within the present head. Replayed images keep
    their stored logits, and a second replayed batch competes within the past heads. Logits of the present and later
    heads that drawn exemplars have now replace the stored ones, scaled below that of the exemplar's class. Later heads
    are prepared: a supervised contrastive loss on strongly augmented views, and a margin below the head of an image.

    After a task, each class keeps its first exemplars, and those of the new classes take the rest of the memory.

    As in Mammoth, the running statistics of batch norm are those of the first replayed batch and a few of the batch's
    images; an exemplar drawn twice in a step counts once in the margins; the more often its stored logits could have
    been replaced in a task, the rarer they are.

    Different here: pixels are not rounded to 8 bits within the strong augmentation. A replayed batch may be smaller
    than ``replay_batch_size`` while the memory is. Tasks may have different numbers of classes. Where no class is known
    to come later, as in a list of tasks, there are no later heads. An image of an earlier class competes in its head
    and all later ones, and is not stored.
    """

    @dataclass(frozen=True)
    class Options:
        alpha: float = key(0.3, "weight of the stored logits (0.3 in Mammoth's xder.yaml)", low=0)
        beta: float = key(0.8, "weight of the exemplars' labels (0.8 there)", low=0)
        gamma: float = key(
            0.85, "new logits of an exemplar are at most this multiple of that of its class (0.85 in Mammoth)", low=0
        )
        lambd: float = key(0.05, "weight of the contrastive loss (0.05 in Mammoth)", low=0)
        simclr_temp: float = key(5.0, "temperature of the contrastive loss (5 in Mammoth)", above=0)
        simclr_batch_size: int = key(64, "exemplars in the contrastive loss (64 in Mammoth)", low=1)
        simclr_num_aug: int = key(4, "views of each image in the contrastive loss (4 in Mammoth)", low=2)
        constr_eta: float = key(0.1, "weight of the margins (0.1 in Mammoth)", low=0)
        constr_margin: float = key(0.3, "the margins (0.3 in Mammoth)", low=0)
        future_constraint: bool = key(True, "the largest logit of later heads has a margin below an image's own head")
        past_constraint: bool = key(
            False, "the largest probability of past heads has a margin below the present head's"
        )
        dp_weight: float = key(
            0.0, "weight of the distances between exemplars in later heads (3000 in Mammoth's xder.yaml)", low=0
        )
        align_bn: bool = key(
            True, "collect batch norm's statistics on replayed and new images together; false: in every pass"
        )

    class Plan(BaseLearner.Plan):
        memory_updates = ("step",)
        fills_by_step = False
        needs_new_classes = True
        measures_quotas = True  # a class may have fewer images than its share

        def check(self) -> str | None:
            if self.config.fixed_memory:
                return "fixed_memory: 'xder' divides memory_size among the classes; set it to false"
            return super().check()

        def stored_bytes(self, num_seen: int) -> int:
            return 4 * num_seen + 4  # float32 logits, and a count

        def presented(self, task: Task) -> np.ndarray:
            return task.train_indices

        def contrasts(self, task: Task) -> bool:
            """Whether there are heads of later tasks."""
            return self.config.whole_head and task.num_later > 0

        def draws(self, task: Task) -> tuple[Draw, ...]:
            two = (Draw(), Draw())
            contrasted = Draw(self.config.options.simclr_batch_size, augmented=False)
            return (*two, contrasted) if self.contrasts(task) else two

    memory: StreamMemory
    plan: Plan

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.pixels = Pixels(self.batches.source.info, self.device)
        (self.replay_size,) = draw_sizes((Draw(),), self.config)
        self.task: Task | None = None
        self.first = 0  # the first class of the present head
        self.later: list[slice] = []  # the heads of later tasks
        self.same_head: Tensor | None = None  # bool (classes, classes): whether two classes have one head
        self.renewed: Tensor | None = None  # the stored logits after the step: (slots, classes)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.task = task
        self.first = self.manager.first_class(task)
        number = self.network.head.out_features
        heads = [(start, end) for start, end in pairwise(self.manager.boundaries) if start < end <= number]
        self.later = [slice(start, end) for start, end in heads if start >= task.num_seen]
        of_class = np.repeat(np.arange(len(heads)), [end - start for start, end in heads])
        numbers = torch.from_numpy(of_class).to(self.device)
        self.same_head = numbers[:, None] == numbers

    def phases(self, task: Task) -> Iterator[Phase]:
        yield replace(self.main_phase(task), draw=self._numbers, plain=self.plan.contrasts(task))

    def _numbers(self, generator: Generator) -> tuple[Tensor, ...]:
        """Drawn for a step, uniform in 0..1: for each replayed image, and for the views of all others."""
        options = self.config.options
        assert self.task is not None
        coins = torch.rand(2, self.replay_size, generator=generator, device=self.device)
        if not self.plan.contrasts(self.task):
            return (coins,)
        rows = options.simclr_batch_size + self.config.batch_size + 1  # a last image is joined to its batch
        views = torch.rand(options.simclr_num_aug, rows, NUMBERS, generator=generator, device=self.device)
        return coins, views

    # ---- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, batch: Batch) -> Batch:
        """Draw the views, and decide which stored logits are replaced.

        ``drawn`` of the batch and of the third replayed one are then the classes of its whole: int64 (n,). Those of the
        first and second one: the slots of its whole, int64 (n,), whether each is drawn for the first time, bool (B,),
        and whether its logits are replaced, bool (n,).
        """
        coins, *views = batch.drawn
        replay = batch.replay
        if replay:
            first, second, *contrasted = replay
            contrasted = [self._with_views(part, views[0]) for part in contrasted]
            replay = (*self._with_coins(first, second, coins), *contrasted)
        batch = replace(batch, drawn=(), replay=replay)
        if not views:
            return batch
        size = self.config.options.simclr_batch_size
        return replace(self._with_views(batch, views[0][:, size:]), plain=None)

    def _with_coins(self, first: Batch, second: Batch, coins: Tensor) -> tuple[Batch, Batch]:
        both = [self._of_all(part, part.slots) for part in (first, second)]
        slots, others = both
        again = (others[:, None] == slots).any(1)
        counts = self.memory.stored.tables["updates"]
        counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))
        counts.index_add_(0, others, (~again).to(counts.dtype))
        new = [torch.ones_like(slots, dtype=torch.bool), ~again]
        here = self.processes.share_of_each_batch.rows(0)
        first, second = (
            replace(part, drawn=(number, is_new[here], is_new & (coin[: len(number)] * counts[number] < 1)))
            for part, number, is_new, coin in zip((first, second), both, new, coins, strict=True)
        )
        return first, second

    def _with_views(self, batch: Batch, numbers: Tensor) -> Batch:
        """With strongly augmented images in ``views``. ``numbers``: (views, at least B, ``NUMBERS``)."""
        images = batch.images if batch.plain is None else batch.plain
        pixels = self.pixels(images)
        here = self.processes.share_of_each_batch.rows(0)
        whole = len(batch) if batch.whole is None else batch.whole
        views = [self.pixels.normalised(strongly_augmented(pixels, view[:whole][here])) for view in numbers]
        return replace(batch, views=tuple(views), drawn=(self._of_all(batch, batch.targets),))

    def _of_all(self, batch: Batch, values: Tensor | None) -> Tensor:
        """The integers of the whole batch, from those of this process's part: int64 (n,)."""
        assert values is not None
        if self.processes.count == 1:
            return values
        whole = values.new_zeros(batch.whole or len(batch))
        places = torch.arange(len(whole), device=self.device)[self.processes.share_of_each_batch.rows(0)]
        return self.processes.sum_(whole.index_copy_(0, places, values))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options = self.config.options
        assert self.task is not None
        with self._statistics(kept=bool(batch.replay)):
            logits = self.network(batch.images).float()
        seen = self.task.num_seen
        present = logits[:, self.first : seen]
        errors = self.over.cross_entropy(present, batch.targets - self.first, reduction="none")
        loss = self.over.mean(errors, batch=batch)
        gaps = [logits[:, seen:].max(1).values - present.max(1).values] if self.later else []
        kept = [torch.ones_like(batch.from_memory)]
        table = None
        if batch.replay:
            replayed, *outputs = self._replayed(batch)
            loss = loss + replayed
            table = self._renewed(batch, outputs)
            for part, output in zip(batch.replay, outputs):
                kept.append(part.drawn[1])
                if self.later:
                    gaps.append(output[:, seen:].max(1).values - self._own_head(output, part.targets))
        if batch.views:
            loss = loss + self._contrast(batch, table)
        if self.later and options.future_constraint:
            above = torch.cat(gaps) + options.constr_margin
            loss = loss + options.constr_eta * self.over.mean(above, (above > 0) & torch.cat(kept), batch)
        if options.past_constraint and self.task.num_old:
            shares = logits[:, :seen].softmax(1)
            past = shares[:, : self.task.num_old].max(1).values.detach()
            above = past - shares[:, self.first :].max(1).values + options.constr_margin
            loss = loss + options.constr_eta * self.over.mean(above, above > 0, batch)
        return loss, logits

    def _statistics(self, kept: bool) -> contextlib.AbstractContextManager[object]:
        """A context in which batch norm does not collect statistics, if those of ``align_bn`` are ``kept``."""
        return UntrackedBatchNorm() if kept and self.config.options.align_bn else contextlib.nullcontext()

    def _own_head(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The largest logit of the head of each image's class: (B,)."""
        assert self.same_head is not None
        return logits.masked_fill(~self.same_head[targets], -torch.inf).max(1).values

    def _replayed(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of the stored logits and of the labels, and the logits of the two replayed batches."""
        options = self.config.options
        assert self.task is not None
        first, second, *_ = batch.replay
        images = first.images
        if options.align_bn:
            beside = min(batch.whole or len(batch), self.replay_size // max(1, self.task.index))
            count = len(range(self.processes.rank, beside, self.processes.count))
            images = torch.cat([images, batch.images[:count]])
        logits = self.network(images).float()[: len(first)]
        distances = squared_distances(logits, first.stored["logits"])
        loss = options.alpha * self.over.mean(distances, batch=batch)
        with self._statistics(kept=True):
            others = self.network(second.images).float()
        errors = self.over.cross_entropy(others[:, : self.task.num_old], second.targets, reduction="none")
        return loss + options.beta * self.over.mean(errors, batch=batch), logits, others

    @torch.no_grad()
    def _renewed(self, batch: Batch, outputs: list[Tensor]) -> Tensor:
        """The stored logits, with those of drawn exemplars replaced: (slots, classes)."""
        assert self.task is not None
        table = widened(self.memory.stored.tables["logits"], outputs[0])
        for part, output in zip(batch.replay, outputs):
            slots, _, replaced = part.drawn
            before = widened(part.stored["logits"], output)
            logits = self._transplanted(before, output, part.targets, self.task.num_old)
            rows, _ = self.over.rows(logits, part.whole)
            table = table.index_copy(0, slots, torch.where(replaced[:, None], rows, table[slots]))
        self.renewed = table
        return table

    def _transplanted(self, before: Tensor, now: Tensor, targets: Tensor, start: int, end: int | None = None) -> Tensor:
        """``before`` (B, classes) with the columns from ``start`` to ``end`` of ``now``, scaled down where they exceed
        the logit of an image's class: the largest is then ``gamma`` times that.
        """
        new = now[:, start:end]
        largest = new.max(1, keepdim=True).values
        right = before.gather(1, targets[:, None])
        scale = torch.where(largest > right, self.config.options.gamma * right / largest, 1)
        return torch.cat([before[:, :start], scale * new, before[:, start + new.shape[1] :]], 1)

    def after_step(self) -> None:
        if self.renewed is not None:
            self.memory.stored.put("logits", torch.arange(len(self.renewed), device=self.device), self.renewed)
            self.renewed = None

    # ---- later heads -------------------------------------------------------------------------------------------------

    def _contrast(self, batch: Batch, table: Tensor | None) -> Tensor:
        """The supervised contrastive loss in each later head, and the distances between exemplars with ``dp_weight``.

        ``table``: the stored logits, (slots, classes).
        """
        options = self.config.options
        sources = [*batch.replay[2:], batch]
        with self._statistics(kept=True):
            logits = self.network(torch.cat([view for source in sources for view in source.views])).float()
        views = options.simclr_num_aug
        rows = []  # of all processes: (N, views, classes)
        own_places = []  # where those of this process stand
        start = 0
        for source, part in zip(sources, logits.split([views * len(source) for source in sources])):
            of_image = part.unflatten(0, (views, len(source))).transpose(0, 1)  # (B, views, classes)
            of_all, places = self.over.rows(of_image.flatten(1), source.whole)
            rows.append(of_all.unflatten(1, (views, -1)))
            own_places.append(start + places)
            start += len(of_all)
        features = torch.cat(rows)
        labels = torch.cat([source.drawn[0] for source in sources])
        places = torch.cat(own_places)
        errors = [supervised_contrast(features[:, :, head], labels, places, options.simclr_temp) for head in self.later]
        loss = options.lambd * self.over.mean(torch.stack(errors).mean(0), batch=batch)
        if options.dp_weight and table is not None:
            drawn = batch.replay[2]
            loss = loss + options.dp_weight * self._distances(batch, rows[0], table[self._of_all(drawn, drawn.slots)])
        return loss

    def _distances(self, batch: Batch, features: Tensor, stored: Tensor) -> Tensor:
        """How far the similarities between exemplars in each later head and view are from those of stored logits.

        ``features``: (N, views, classes) of all processes; ``stored``: (N, classes).
        """
        here = self.processes.share_of_each_batch.rows(0)
        total = features.new_zeros(len(features[here]))
        for head in self.later:
            before = similarities(stored[:, head], here)
            for view in features[:, :, head].unbind(1):
                total = total + (similarities(view, here) - before).square().sum(1)
        number = len(self.later) * features.shape[1] * len(features) ** 2
        return self.over.sum(total, batch) / number

    # ---- after a task ------------------------------------------------------------------------------------------------

    def end_task(self, task: Task) -> None:
        """Balance the memory, and store logits, in training mode but without collecting batch norm's statistics."""
        super().end_task(task)
        self._keep_first_of_each_class(task)
        self.network.train()
        seeded = seeding.seeded(self.config.seed, "dropout", task.index, AFTER, device=self.device)
        with torch.no_grad(), seeded, synced_batch_norm(self.processes), UntrackedBatchNorm():
            self._store(task)
            self._renew(task)

    def _keep_first_of_each_class(self, task: Task) -> None:
        share = self.memory.size // task.num_seen
        kept = [np.flatnonzero(self.memory.labels == label)[:share] for label in np.unique(self.memory.labels)]
        self.memory.select(np.concatenate([np.empty(0, np.int64), *kept]))

    def _places(self, task: Task, labels: np.ndarray) -> np.ndarray:
        """The slot that each image of an epoch enters, or ``NONE``: the first ones of each new class. Both (n,)."""
        room = self.memory.size - len(self.memory)
        quotas = np.full(task.num_new, room // task.num_new)
        rng = np.random.default_rng(seed_of(self.config, "quotas", task.index, AFTER))
        quotas[rng.permutation(task.num_new)[: room % task.num_new]] += 1
        enters = np.zeros(len(labels), bool)
        for label, quota in enumerate(quotas, task.num_old):
            enters[np.flatnonzero(labels == label)[:quota]] = True
        places = np.full(len(labels), NONE)
        places[enters] = len(self.memory) + np.arange(enters.sum())
        return places

    def _store(self, task: Task) -> None:
        """Let images of another epoch enter, with the logits of their augmentation."""
        config = self.config
        order = epoch_order(task.train_indices, True, seed_of(config, "batches", task.index, AFTER))
        labels = self.manager.train_targets[order]
        places = self._places(task, labels)
        batches = self.batches.of(Sampling(indices=task.train_indices, mixed=False), task.index, AFTER)
        for part, batch in zip(batch_slices(len(order), config.batch_size, join=True), batches, strict=False):
            if (places[part.start :] == NONE).all():
                return
            logits = self._logits(batch)
            if task.num_old:
                logits = self._transplanted(logits, logits, batch.targets, 0, task.num_old)
            entering = entering_of(order[part], labels[part], places[part], self.processes, self.device)
            values = {"logits": logits, "updates": torch.zeros_like(batch.targets, dtype=torch.float32)}
            entering.into(self.memory, values, self.processes)

    def _renew(self, task: Task) -> None:
        """Replace the stored logits of the present and later heads of all earlier exemplars."""
        if not task.num_old or not len(self.memory):
            return
        rng = np.random.default_rng(seed_of(self.config, "slots", task.index, AFTER))
        slots = rng.permutation(len(self.memory))
        for number, part in enumerate(batch_slices(len(slots), self.config.batch_size, join=True)):
            drawn = self.batches.from_slots(slots[part], task.index, AFTER, number)
            logits = self._logits(drawn)
            before = widened(drawn.stored["logits"], logits)
            renewed = self._transplanted(before, logits, drawn.targets, task.num_old)
            transplanted = torch.where((drawn.targets < task.num_old)[:, None], renewed, before)
            rows, _ = self.over.rows(transplanted, drawn.whole)
            self.memory.stored.put("logits", torch.from_numpy(slots[part]).to(self.device), rows)
        self.memory.stored.tables["updates"].zero_()

    def _logits(self, batch: Batch) -> Tensor:
        with self.precision.autocast():
            return self.network(batch.images).float()


def widened(stored: Tensor, logits: Tensor) -> Tensor:
    """Stored logits (n, at most as many) with as many columns as ``logits``: nan, of classes that came later."""
    return pad(stored, (0, logits.shape[1] - stored.shape[1]), value=torch.nan)


def supervised_contrast(features: Tensor, labels: Tensor, places: Tensor, temperature: float) -> Tensor:
    """The supervised contrastive loss (Khosla et al., NeurIPS 2020) of images, by the cosine of their views: (n,).

    Each view's positives are all other views of images of its class.

    Args:
        features: (N, views, d), of the whole batch.
        labels: int64 (N,).
        places: int64 (n,), the images whose loss is wanted.
        temperature: divides the cosines.
    """
    number, views, _ = features.shape
    rows = normalize(features, dim=2).transpose(0, 1)  # (views, N, d)
    anchors = rows[:, places].flatten(0, 1)
    itself = (number * torch.arange(views, device=places.device)[:, None] + places).flatten()[:, None]
    cosines = anchors @ rows.flatten(0, 1).T / temperature
    shares = cosines.scatter(1, itself, -torch.inf).log_softmax(1)  # (views n, views N)
    positive = (labels[places][:, None] == labels).repeat(views, views).scatter(1, itself, False)
    means = torch.where(positive, shares, 0).sum(1) / positive.sum(1)
    return -means.unflatten(0, (views, -1)).mean(0)


def similarities(rows: Tensor, here: slice | None) -> Tensor:
    """The products of the rows ``here`` of (N, d) with all, divided by their sum of magnitudes: (n, N)."""
    return normalize(rows[here] @ rows.T, p=1.0, dim=1)
