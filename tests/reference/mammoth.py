"""Mammoth's arithmetic at e75a491, and CLS-ER's as in its authors' repository: a buffer, and a step of each method.

Written from their code as plain loops over one network and a plain SGD. What is drawn at random is given: augmented
images, the number of a reservoir for each image, the slots that are replayed, the coins of CLS-ER. ``mistakes`` are
slips that a comparison must notice.
"""

import copy

import torch
from torch.nn.functional import cross_entropy, mse_loss


class Buffer:
    """A reservoir of ``size`` slots; ``drawn`` has a random number for each image that comes when it is full."""

    def __init__(self, size):
        self.size = size
        self.seen = 0
        self.content = {}  # slot -> what was added

    def add(self, items, drawn):
        for item, number in zip(items, drawn, strict=True):
            slot = self.seen if self.seen < self.size else number
            self.seen += 1
            if slot < self.size:
                self.content[slot] = item


class Method:
    """``network`` is trained; ``task`` begins with an optimiser of its own."""

    stores_logits = False

    def __init__(self, network, size, mistakes=(), **options):
        self.network = network.train()
        self.buffer = Buffer(size)
        self.mistakes = mistakes
        self.options = options
        self.task = -1

    def begin_task(self, **of_sgd):
        self.task += 1
        self.optimizer = torch.optim.SGD(self.network.parameters(), fused=False, **of_sgd)

    def observe(self, images, targets, samples, replays, drawn, coins=None):
        """A step. ``replays``: (augmented images, slots) of each batch that is drawn. Returns the loss."""
        for _, slots in replays:
            assert all(slot in self.buffer.content for slot in slots)
        self.optimizer.zero_grad()
        loss, logits = self.loss(images, targets, replays)
        loss.backward()
        self.optimizer.step()
        if "stores after the step" in self.mistakes:
            logits = self.network(images)
        rows = logits.detach()[: len(samples)] if self.stores_logits else [None] * len(samples)
        self.buffer.add(list(zip(samples, targets.tolist(), rows, strict=True)), drawn)
        self.after_step(coins)
        return loss.item()

    def after_step(self, coins):
        pass

    def labels_of(self, slots):
        return torch.tensor([self.buffer.content[slot][1] for slot in slots])

    def logits_of(self, slots):
        return torch.stack([self.buffer.content[slot][2] for slot in slots])

    def samples_of(self, slots):
        return [self.buffer.content[slot][0] for slot in slots]


class Er(Method):
    def loss(self, images, targets, replays):
        if replays and "two means" in self.mistakes:
            logits = self.network(torch.cat([images, replays[0][0]]))
            own, replayed = logits[: len(images)], logits[len(images) :]
            return cross_entropy(own, targets) + cross_entropy(replayed, self.labels_of(replays[0][1])), logits
        if replays and "two passes" in self.mistakes:
            logits = torch.cat([self.network(images), self.network(replays[0][0])])
            return cross_entropy(logits, torch.cat([targets, self.labels_of(replays[0][1])])), logits
        for replayed, slots in replays:
            images = torch.cat([images, replayed])
            targets = torch.cat([targets, self.labels_of(slots)])
        logits = self.network(images)
        return cross_entropy(logits, targets), logits


class Der(Method):
    stores_logits = True

    def loss(self, images, targets, replays):
        logits = self.network(images)
        loss = cross_entropy(logits, targets)
        if replays:
            replayed, slots = replays[0]
            of_replayed = self.network(replayed)
            if "sums over classes" in self.mistakes:
                loss = loss + self.options["alpha"] * (of_replayed - self.logits_of(slots)).square().sum(1).mean()
            else:
                loss = loss + self.options["alpha"] * mse_loss(of_replayed, self.logits_of(slots))
        return loss, logits


class Derpp(Der):
    def loss(self, images, targets, replays):
        loss, logits = super().loss(images, targets, replays)
        if replays:
            replayed, slots = replays["one draw" not in self.mistakes]
            loss = loss + self.options["beta"] * cross_entropy(self.network(replayed), self.labels_of(slots))
        return loss, logits


class ErAce(Method):
    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        self.seen_so_far = torch.tensor([], dtype=torch.int64)

    def loss(self, images, targets, replays):
        present = targets.unique()
        self.seen_so_far = torch.cat([self.seen_so_far, present]).unique()
        outputs = logits = self.network(images)
        mask = torch.zeros_like(logits)
        mask[:, present] = 1
        if "newer classes masked" not in self.mistakes:
            mask[:, self.seen_so_far.max() :] = 1
        if self.task > 0 or "first task masked" in self.mistakes:
            logits = logits.masked_fill(mask == 0, -1e9)
        loss = cross_entropy(logits, targets)
        if replays:
            replayed, slots = replays[0]
            loss = loss + cross_entropy(self.network(replayed), self.labels_of(slots))
        return loss, outputs


class ClsEr(Method):
    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        self.plastic, self.stable = (copy.deepcopy(self.network) for _ in range(2))
        self.steps = 0

    def loss(self, images, targets, replays):
        loss = 0
        if replays:
            replayed, slots = replays[0]
            labels = self.labels_of(slots)
            for average in (self.stable, self.plastic):
                average.train("evaluation mode" not in self.mistakes)
            stable, plastic = self.stable(replayed), self.plastic(replayed)
            rows = torch.arange(len(labels))
            surer = stable.softmax(1)[rows, labels] > plastic.softmax(1)[rows, labels]
            wanted = torch.where(surer[:, None], stable, plastic)
            loss = self.options["consistency"] * mse_loss(self.network(replayed), wanted.detach())
            if "sees them once" in self.mistakes:
                return loss + cross_entropy(self.network(images), targets), images
            images = torch.cat([images, replayed])
            targets = torch.cat([targets, labels])
        logits = self.network(images)
        return loss + cross_entropy(logits, targets), logits

    def after_step(self, coins):
        self.steps += 1
        for name, coin in zip(("plastic", "stable"), coins, strict=True):
            if coin < self.options[f"{name}_rate"]:
                alpha = min(1 - 1 / (self.steps + 1), self.options[f"{name}_decay"])
                average = getattr(self, name)
                for mine, value in zip(average.parameters(), self.network.parameters(), strict=True):
                    mine.data.mul_(alpha).add_(value.data, alpha=1 - alpha)
                if "statistics averaged" in self.mistakes:
                    for mine, value in zip(average.buffers(), self.network.buffers(), strict=True):
                        mine.data.copy_(torch.lerp(mine.float(), value.float(), 1 - alpha).to(mine.dtype))
