"""Checks of the tensors that a consolidation follows, and of the states that it loads."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pycil_wsc.consolidation.ranking import Peers, Scores, blocks

Layout = tuple[tuple[int, ...], torch.dtype, torch.device]


class NonFiniteGradients(RuntimeError):
    """Weights cannot be ranked, because a gradient in the warm-up, or another importance, was infinite or NaN."""


def by_name(pairs: Iterable[tuple[str, Tensor]], argument: str, wanted: Callable[[Tensor], bool]) -> dict[str, Tensor]:
    """{name: tensor} of the (name, tensor) pairs that are ``wanted``; a tensor with several names keeps the first."""
    names = set()
    tensors = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{argument} must give (name, tensor) pairs: pass model.{argument}()")
        name = plain_name(pair[0])
        tensor = pair[1]
        if name in names:
            raise ValueError(f"{argument}: two tensors are named '{name}'; give each its own name")
        names.add(name)
        if wanted(tensor):
            tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def plain_name(name: str) -> str:
    """The name without the prefix of ``torch.compile``, so that compiled and plain models have the same state."""
    return name.replace("_orig_mod.", "")


def check_eligible(eligible: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, mask in eligible.items():
        if name not in params:
            raise ValueError(f"eligible: '{name}' is not the name of a trainable parameter")
        shape = tuple(params[name].shape)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"eligible: '{name}' needs torch.bool of shape {shape}, not {mask.dtype} of {tuple(mask.shape)}"
            )


def layouts(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The properties that may not change while a tensor is followed: {name: (shape, dtype, device)}."""
    return {name: (t.shape, t.dtype, t.device) for name, t in tensors.items()}


def check_layouts(tensors: Mapping[str, Tensor], before: Mapping[str, Layout]) -> None:
    for name, tensor in tensors.items():  # at every step
        layout = (tensor.shape, tensor.dtype, tensor.device)
        if layout != before[name]:
            was, now = (f"{tuple(shape)} {dtype} {device}" for shape, dtype, device in (before[name], layout))
            raise RuntimeError(
                f"'{name}' was {was} and is now {now}: "
                "make a new WeightSpaceConsolidation once a model has grown or moved"
            )


def check_saved(saved: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise ValueError if an option differs: the task would continue on another schedule."""
    for name, value in expected.items():
        if name not in saved or saved[name] != value:
            raise ValueError(f"the state was saved with {name}={saved.get(name)}, this object has {name}={value}")


def check_saved_shapes(saved: Mapping[str, Sequence[int]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() | saved.keys()):
        if name not in saved:
            raise ValueError(f"'{name}' is in this object but not in the state")
        if name not in expected:
            raise ValueError(f"'{name}' is in the state but not in this object")
        if tuple(saved[name]) != expected[name]:
            raise ValueError(f"'{name}' has shape {expected[name]}, but {tuple(saved[name])} in the state")


def check_finite(scores: Mapping[str, Scores], peers: Peers | None = None, of_gradients: bool = True) -> None:
    """Raise :class:`NonFiniteGradients`, in all processes, if a score in any of them is not finite.

    ``of_gradients``: whether the scores are moments of gradients, which are then named as the cause. Synchronises
    with the device, once.
    """
    parts = [(name, score[index].isfinite().all()) for name, score in scores.items() for index in blocks(score.shape)]
    finite = torch.stack([part.to(parts[0][1].device) for _, part in parts]).tolist() if parts else []
    if peers and int(peers.sum(torch.tensor(finite.count(False)))) and all(finite):
        raise NonFiniteGradients(
            "gradients in another process were not finite in the warm-up; see its error"
            if of_gradients
            else "the importance in another process is not finite; see its error"
        )
    for (name, _), is_finite in zip(parts, finite):
        if not is_finite:
            raise NonFiniteGradients(
                f"the gradients of '{name}' were not finite in the warm-up, so it cannot be ranked: "
                "lower the learning rate or clip gradients"
                if of_gradients
                else f"the importance of '{name}' is not finite, so it cannot be ranked: "
                "check the function that computes it, and whether training has diverged"
            )
