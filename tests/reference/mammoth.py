"""Mammoth's arithmetic at e75a491, image by image: its buffer, and the losses of its replay methods.

Written from its code as plain loops. What it draws at random is given.
"""

import torch
from torch.nn.functional import cross_entropy


class Buffer:
    """A reservoir of ``size`` slots; ``drawn`` gives the random number for each image that comes when it is full."""

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


def er_loss(network, images, targets, replayed):
    """``replayed``: (images, targets) from the buffer, or None as long as it is empty."""
    if replayed:
        images = torch.cat([images, replayed[0]])
        targets = torch.cat([targets, replayed[1]])
    return cross_entropy(network(images), targets)
