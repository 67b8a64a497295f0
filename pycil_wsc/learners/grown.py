"""Tensors of a network that has grown."""

from torch import Tensor


def part_of(grown: Tensor, old: Tensor) -> Tensor:
    """The part of ``grown`` that an ``old`` tensor has, as a view: a head has new rows, most tensors none."""
    return grown[tuple(slice(size) for size in old.shape)]
