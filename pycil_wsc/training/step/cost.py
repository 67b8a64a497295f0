"""The arithmetic cost of training, independent of the machine and its load: of a step, and of all so far."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner_config import Costs


def convolution_backward(
    outgoing: Tensor,
    images: Tensor,
    weight: Tensor,
    bias_sizes: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *others: object,
    out_val: Sequence[Tensor | None],
) -> int:
    """Each wanted gradient, of the images and of the weight, costs as much as the forward pass.

    Torch's formula counts the gradient of a weight in groups once for each group, as if there were none.
    """
    places = images if transposed else outgoing
    wanted = sum(gradient is not None for gradient in out_val[:2])
    return wanted * 2 * weight.numel() * len(places) * prod(places.shape[2:])


def attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward(outgoing: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return sdpa_backward_flop_count(outgoing.shape, query.shape, key.shape, value.shape)


@functools.cache
def formulas() -> Mapping[OpOverloadPacket, Callable[..., int]]:
    """Torch's formulas, and ours where torch has none or another. Their module imports triton, which takes a while."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry | {
        torch.ops.aten.convolution_backward: convolution_backward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


class Operations(TorchDispatchMode):
    """Counts floating-point operations as torch's ``FlopCounterMode`` does, but only their ``total``.

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
        packet = func.overloadpacket
        if formula := formulas().get(packet):
            self.total += formula(*args, **kwargs, out_val=output)
        return output


class StepCost:
    """Floating-point operations of a phase, counted once: of a step per image, and before a step per exemplar.

    An image that is replayed beside the batch counts as one of the step's; the first step that has some is counted.

    Counts the forward and backward passes of convolutions and matrix products, including teachers and frozen parts; a
    multiplication and an addition are two operations.
    """

    per_image: int | None = None
    per_exemplar: int | None = None  # of the hook `before_step`; None until a batch has had exemplars

    replays = False  # whether the counted step has replayed images beside its batch

    @property
    def unknown(self) -> bool:
        return self.per_image is None

    def lacks(self, batch: Batch) -> bool:
        """Whether a step with this batch is to be counted."""
        return self.unknown or (self.per_image is not None and bool(batch.replay) and not self.replays)

    @contextlib.contextmanager
    def measured(self, batch: Batch | int) -> Iterator[None]:
        """Count what is done within, for a ``batch`` or so many images."""
        with Operations() as operations:
            yield
        images = batch if isinstance(batch, int) else batch.weight
        self.replays = not isinstance(batch, int) and bool(batch.replay)
        self.per_image = operations.total // max(1, images)

    @contextlib.contextmanager
    def measured_before(self, exemplars: int | None) -> Iterator[None]:
        """Count what is done before a step whose batch has so many exemplars, unless it is known."""
        if self.per_exemplar is not None or not exemplars:
            yield
            return
        with Operations() as operations:
            yield
        self.per_exemplar = operations.total // exemplars


class Spent:
    """What a learner's training has cost so far, a part of its state: training images and operations of all tasks, and
    what the phases of the current task began with.

    Attributes:
        images: training images, over all epochs.
        operations: floating-point operations.
        per_image: operations per image of the current phase; None before they are counted.
        per_exemplar: those per exemplar of a batch, before a step; likewise.
        replays: whether the counted step has replayed images beside its batch.
        task: the task of ``before`` and ``begun``.
        before: the operations before it.
        begun: for each of its phases that has begun, the ``operations`` before it, the planned ``images`` of the
            phases before it, and its ``own``; the ``exemplars`` in memory; and, with a budget, the operations
            ``per_image`` and ``per_exemplar`` of its step.
        costs: what a method has spent besides, by its name in the result: numbers, or lists of one number per task. The
            method that writes them in ``end_task`` keeps them in its own state.
    """

    def __init__(self) -> None:
        self.images = 0
        self.operations = 0
        self.per_image: int | None = None
        self.per_exemplar: int | None = None
        self.replays = False
        self.task = -1
        self.before = 0
        self.begun: list[dict[str, float]] = []
        self.costs: Costs = {}

    def begin(self, task: int) -> None:
        """Begin a task, unless this is that of a resumed run."""
        if task != self.task:
            self.task = task
            self.before = self.operations
            self.begun = []

    def state_dict(self) -> State:
        begun = [dict(phase) for phase in self.begun]
        return {"task": self.task, "before": self.before, "begun": begun, "replays": self.replays}

    def load_state_dict(self, state: State) -> None:
        self.task = state["task"]
        self.begun = [dict(phase) for phase in state["begun"]]
        self.before = state.get("before", self.begun[0]["operations"] if self.begun else 0)  # old checkpoints lack it
        self.replays = state["replays"]
