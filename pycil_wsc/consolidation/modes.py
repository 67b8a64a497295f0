"""Training and evaluation mode."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """A context in which modes may change; on exit, each module of ``model`` has its mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
