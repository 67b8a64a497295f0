"""A pre-trained backbone, and what of a saved state is still as it was: a file of weights need not repeat it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pycil_wsc.errors import UserError
from pycil_wsc.state import State, digest


class Pretrained:
    """Tells which tensors of a learner's state are those of its backbone before training.

    Args:
        name: the backbone's, such as ``timm:vit_base_patch16_224``.
        backbone: with its pre-trained weights. Only their hashes are kept.
    """

    def __init__(self, name: str, backbone: nn.Module):
        tensors = backbone.state_dict()
        self.name = name
        self.sha256 = digest(_on_cpu(tensors))
        self.hashes = {place: _hash(tensor) for place, tensor in tensors.items()}
        self.sizes = {place: tensor.numel() for place, tensor in tensors.items()}

    def parted(self, state: State) -> tuple[State, State]:
        """``state`` without what is unchanged, and what :func:`joined` needs to put it back: name, hash and places.

        A state that has changed more than half of the backbone is left whole: a file that needs no other is then worth
        more than a smaller one.
        """
        unchanged = {}
        for name, value in state.items():
            place = self._place(name)
            if place and isinstance(value, Tensor) and _hash(value) == self.hashes[place]:
                unchanged[name] = place
        share = sum(self.sizes[place] for place in set(unchanged.values())) / sum(self.sizes.values())
        if share < 0.5:
            unchanged = {}
        rest = {name: value for name, value in state.items() if name not in unchanged}
        return rest, {"name": self.name, "sha256": self.sha256, "unchanged": unchanged}

    def _place(self, name: str) -> str | None:
        """The tensor of the backbone that ``name`` of a state may be: with the longest name that ``name`` ends with."""
        while name not in self.hashes and "." in name:
            name = name.partition(".")[2]
        return name if name in self.hashes else None


def joined(state: State, origin: State, backbone: nn.Module) -> State:
    """The whole state that :meth:`Pretrained.parted` parted into ``state`` and ``origin``.

    Raises :class:`UserError` if ``backbone`` has other weights than those that the learner began with.
    """
    tensors = backbone.state_dict()
    sha256 = digest(_on_cpu(tensors))
    if sha256 != origin["sha256"]:
        raise UserError(
            f"pretrained: these are other weights of '{origin['name']}' than those that the learner began with "
            f"(sha256 {sha256[:16]} of their tensors, not {origin['sha256'][:16]}); give those"
        )
    return {**state, **{name: tensors[place] for name, place in origin["unchanged"].items()}}


def _hash(tensor: Tensor) -> str:
    return digest(_on_cpu({"": tensor}))


def _on_cpu(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
