"""Mammoth's X-DER at e75a491, written from its arithmetic as plain loops over images, heads and views.

What is drawn at random is given: augmented images, slots, coins. ``mistakes`` are slips that a comparison must notice.
"""

import contextlib

import torch
from torch.nn.functional import cross_entropy


class Xder:
    """``heads``: the (first class, end) of each task. ``memory``: slot -> [sample, label, logits, count]."""

    def __init__(self, network, heads, rate, mistakes=(), **options):
        self.network = network.train()
        self.heads = heads
        self.rate = rate
        self.mistakes = mistakes
        self.options = options
        self.memory = []
        self.task = -1

    def begin_task(self, **of_sgd):
        self.task += 1
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=self.rate, fused=False, **of_sgd)

    @contextlib.contextmanager
    def untracked(self, wanted=True):
        """Running statistics are put back."""
        norms = [norm for norm in self.network.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
        before = [(norm.running_mean, norm.running_var) for norm in norms]
        if wanted:
            for norm in norms:
                norm.running_mean, norm.running_var = norm.running_mean.clone(), norm.running_var.clone()
        yield
        for norm, (mean, var) in zip(norms, before, strict=True):
            norm.running_mean, norm.running_var = mean, var

    def head_of(self, label):
        return next(number for number, (start, end) in enumerate(self.heads) if start <= label < end)

    def renewed(self, old, new, label, start, end):
        part = new[start:end].clone()
        if "not scaled" not in self.mistakes and part.max() > old[label]:
            part *= self.options["gamma"] * old[label] / part.max()
        old = old.clone()
        old[start:end] = part
        return old

    # ---- a step ------------------------------------------------------------------------------------------------------

    def observe(self, images, labels, replays, coins, views, drawn):
        """``replays``: (images, slots) of two batches; ``coins``: of each of their images. ``views``: of the images in
        ``drawn`` (slots) and of ``images``, each (views, 3, S, S); none in the last task.
        """
        options = self.options
        start, end = self.heads[self.task]
        with self.untracked(options["align_bn"] and self.task > 0):
            outputs = self.network(images)
        loss = cross_entropy(outputs[:, start:end], labels - start)
        once = []
        if replays:
            more, once = self.replay(images, replays, coins)
            loss = loss + more
        if self.task < len(self.heads) - 1:
            loss = loss + self.contrast(views, [self.memory[slot][1] for slot in drawn] + labels.tolist(), drawn)
            if options["future_constraint"]:
                rows = [(row, int(label)) for row, label in zip(outputs, labels)] + once
                gaps = []
                for row, label in rows:
                    span = self.heads[self.task if "present head" in self.mistakes else self.head_of(label)]
                    gaps.append(row[end:].max() + options["constr_margin"] - row[span[0] : span[1]].max())
                loss = loss + options["constr_eta"] * mean_above(gaps)
        if options["past_constraint"] and self.task:
            gaps = []
            for row in outputs:
                shares = row[:end].softmax(0)
                gaps.append(shares[:start].max().detach() + options["constr_margin"] - shares[start:].max())
            loss = loss + options["constr_eta"] * mean_above(gaps)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def replay(self, images, replays, coins):
        options = self.options
        (first, slots), (second, others) = replays
        beside = images[: options["replay_batch_size"] // self.task] if options["align_bn"] else images[:0]
        outputs = self.network(torch.cat([first, beside]))[: len(first)]
        stored = torch.stack([self.memory[slot][2] for slot in slots])
        loss = options["alpha"] * (outputs - stored).square().mean()
        with self.untracked(options["align_bn"]):
            again = self.network(second)
        labels = torch.tensor([self.memory[slot][1] for slot in others])
        past = again[:, : self.heads[self.task][0]]
        loss = loss + options["beta"] * cross_entropy(past, labels)
        once, met = [], set()
        for slot, row, coin in zip([*slots, *others], [*outputs, *again], coins, strict=True):
            if slot in met and "twice" not in self.mistakes:
                continue
            met.add(slot)
            entry = self.memory[slot]
            once.append((row, entry[1]))
            entry[3] += 1
            if coin * entry[3] < 1 or "always" in self.mistakes:
                begin = self.heads[self.task][0]
                entry[2] = self.renewed(entry[2], row.detach(), entry[1], begin, self.heads[-1][1])
        return loss, once

    def contrast(self, views, labels, drawn):
        options = self.options
        number = views.shape[1]
        with self.untracked(options["align_bn"]):
            outputs = self.network(views.flatten(0, 1)).unflatten(0, (len(labels), number))
        later = self.heads[self.task + 1 :]
        total = 0
        for start, end in later:
            rows = outputs[:, :, start:end]
            rows = rows / rows.norm(dim=2, keepdim=True)
            for image, label in enumerate(labels):
                for view in range(number):
                    similar, positive = [], []
                    for other, its_label in enumerate(labels):
                        for its_view in range(number):
                            if (other, its_view) != (image, view):
                                similar.append(rows[image, view] @ rows[other, its_view] / options["simclr_temp"])
                                positive.append(its_label == label)
                    shares = torch.stack(similar).log_softmax(0)
                    total = total - shares[torch.tensor(positive)].mean() / number
        loss = options["lambd"] * total / (len(later) * len(labels))
        if options["dp_weight"] and drawn:
            loss = loss + options["dp_weight"] * self.distances(outputs[: len(drawn)], drawn, later)
        return loss

    def distances(self, outputs, drawn, later):
        stored = torch.stack([self.memory[slot][2] for slot in drawn])
        distances = []
        for start, end in later:
            for view in range(outputs.shape[1]):
                products = []
                for rows in (outputs[:, view, start:end], stored[:, start:end]):
                    product = rows @ rows.T
                    products.append(product / product.abs().sum(1, keepdim=True))
                distances.append((products[0] - products[1]).norm() ** 2 / len(drawn) ** 2)
        return torch.stack(distances).mean()

    # ---- after a task ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end_task(self, size, batches, extra, again):
        """``batches``: (images, labels, samples) of an epoch; ``extra``: the new classes that get one exemplar more;
        ``again``: (images, slots) that have all exemplars.
        """
        start, end = self.heads[self.task]
        share = size // end
        kept = []
        for label in range(start):
            kept += [entry for entry in self.memory if entry[1] == label][:share]
        self.memory = kept
        room = (size - len(kept)) // (end - start)
        quotas = {label: room + (label in extra) for label in range(start, end)}
        for images, labels, samples in batches:
            if not any(quotas.values()):
                break
            with self.untracked():
                outputs = self.network(images)
            for row, label, sample in zip(outputs, labels.tolist(), samples):
                if quotas[label]:
                    quotas[label] -= 1
                    if self.task and "past as it is" not in self.mistakes:
                        row = self.renewed(row, row, label, 0, start)
                    self.memory.append([sample, label, row, 0])
        self.renew(again)
        for entry in self.memory:
            entry[3] = 0

    def renew(self, again):
        start = self.heads[self.task][0]
        for images, slots in again:
            with self.untracked():
                rows = self.network(images)
            for row, slot in zip(rows, slots, strict=True):
                entry = self.memory[slot]
                if entry[1] < start:
                    entry[2] = self.renewed(entry[2], row, entry[1], start, self.heads[-1][1])


def mean_above(gaps):
    above = [gap for gap in gaps if gap > 0]
    return torch.stack(above).mean() if above else torch.zeros(())
