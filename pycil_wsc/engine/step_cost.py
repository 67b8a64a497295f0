"""The arithmetic cost of a training step, independent of the machine and its load."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operations(TorchDispatchMode):
    """Counts floating-point operations by torch's formulas, as its ``FlopCounterMode`` does, but only their ``total``.

    Torch's mode also follows the modules, which takes time and fails where one without gradients receives a view of a
    trainable parameter.
    """

    whole: ClassVar[set[OpOverload]] = set()  # operators that do not consist of others

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in self.whole:  # in inference mode, operators arrive before torch has taken them apart
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
            self.whole.add(func)
        output = func(*args, **kwargs)
        if formula := flop_registry.get(func.overloadpacket):
            self.total += formula(*args, **kwargs, out_val=output)
        return output


class StepCost:
    """Floating-point operations per image of a phase, counted in its first step.

    Counts the forward and backward passes of convolutions and matrix products, including teachers and frozen parts; a
    multiplication and an addition are two operations.
    """

    per_image: int | None = None

    @property
    def unknown(self) -> bool:
        return self.per_image is None

    @contextlib.contextmanager
    def measured(self, images: int) -> Iterator[None]:
        with Operations() as operations:
            yield
        self.per_image = operations.total // max(1, images)
