"""How the processes hold the model: replicated, or sharded (FSDP).

In both cases ``parameters`` are plain tensors with gradients, so that optimiser, consolidation and merges are the same.
For a sharded model they are this process's rows, in the storage that FSDP gathers from.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pycil_wsc.engine.processes import Processes
from pycil_wsc.llm.model import trained_parameters

T = TypeVar("T")
Load = Callable[[bool], Any]  # empty -> the model on the CPU; empty: on the meta device


class Stored(Protocol):
    """A tensor in a file, read by rows, such as a slice of safetensors."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice) -> Tensor: ...


class Losses(nn.Module):
    """``losses(model, batch)`` as the forward pass of a module that DistributedDataParallel can wrap.

    Its parameters are the trained ones; it has no buffers, which would be broadcast.
    """

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.parts, self.trained = [model], nn.ParameterList(trained)  # in a list, the model is not a submodule

    def forward(self, losses: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        return losses(self.parts[0], batch)


class Replicated:
    """Every process has the whole model; DistributedDataParallel reduces the gradients during the backward pass."""

    peers: Processes | None = None  # the processes that hold the other rows of the parameters

    def __init__(self, load: Load, processes: Processes, device: torch.device, precision: str) -> None:
        self.processes, self.device, self.precision = processes, device, precision
        self.model = self._placed(load)
        self.trained = trained_parameters(self.model)
        self.parameters = {name: self._own(parameter) for name, parameter in self.trained.items()}
        self.losses = self._losses()  # (losses, batch) -> losses(model, batch)

    def _placed(self, load: Load) -> Any:
        model = self._loaded(load, empty=False).to(self.device)
        model.tie_weights()  # on devices that register themselves with torch, `to` makes shared weights two
        return model

    def _loaded(self, load: Load, empty: bool) -> Any:
        """``load(empty)``. If it fails in one process, all raise its error, before any of them waits for it."""
        return self.processes.in_all(lambda: load(empty))  # which may read the weights for longer than the timeout

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def _losses(self) -> nn.Module:
        losses = Losses(self.model, self.parameters.values())
        return DistributedDataParallel(losses, gradient_as_bucket_view=True) if self.processes.count > 1 else losses

    def accumulating(self) -> AbstractContextManager[Any]:
        """A context for all backward passes of a step except the last: gradients are accumulated, not reduced."""
        return self.losses.no_sync() if isinstance(self.losses, DistributedDataParallel) else contextlib.nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which the model computes in the run's precision."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def share(self, groups: Sequence[T]) -> list[tuple[T, float]]:
        """This process's groups of an optimiser step, at least one, each with the factor of its loss.

        Gradients are averaged over processes, so the factor is the number of processes. A process without a group takes
        the last one with a factor of 0.
        """
        count = float(self.processes.count)
        return [(group, count) for group in self.processes.share(groups)] or [(groups[-1], 0.0)]

    def collect_gradients(self) -> None:
        """Called after the last backward pass; ``parameters`` then have the gradients of all processes."""

    def square_norm(self) -> Tensor:
        """The squared norm of all gradients together."""
        return square_norm(self.parameters.values())

    def local(self, parameter: nn.Parameter) -> Tensor:
        """This process's rows of a parameter of the model, sharing its storage."""
        return parameter.detach()

    def full(self, parameter: nn.Parameter) -> Tensor:
        """All rows of a parameter of the model, in every process."""
        return parameter.detach()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor``, this process's rows, in the shape of the whole parameter ``name``; in the first process only."""
        return tensor

    def part(self, name: str, stored: Stored) -> Tensor:
        """This process's rows of the whole parameter ``name``, from a file: the inverse of :meth:`whole`."""
        return stored[:].to(self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the whole model; complete in the first process."""
        return self.model.state_dict()

    def clear(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


class Sharded(Replicated):
    """Every process has some rows of each parameter; layers are gathered when they are computed.

    Only the first process reads the model; it sends each process its rows. In bf16, layers are gathered in bf16, while
    weights, gradients and moments remain in fp32.
    """

    def __init__(self, load: Load, processes: Processes, device: torch.device, precision: str) -> None:
        self.peers, self.mesh = processes, init_device_mesh(device.type, (processes.count,))
        super().__init__(load, processes, device, precision)

    def _placed(self, load: Load) -> Any:
        model = self._loaded(load, empty=not self.processes.first)
        state = model.state_dict() if self.processes.first else {}
        layers = set(getattr(model, "_no_split_modules", None) or ())
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if self.precision == "bf16"
            else MixedPrecisionPolicy()
        )
        for layer in [module for module in model.modules() if type(module).__name__ in layers]:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        # gathered weights must not be used after the rows have changed
        fully_shard(model, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
        model = model.to(self.device) if self.processes.first else model.to_empty(device=self.device)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for buffer in model.buffers():  # such as the rotary frequencies, which are not in the state dict
            distributed.broadcast(buffer, src=0)
        return model

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.local(parameter))

    def _losses(self) -> nn.Module:
        return Losses(self.model, ())

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()  # FSDP casts

    def share(self, groups: Sequence[T]) -> list[tuple[T, float]]:
        """As many for each process, since they gather layers together; the last is repeated with a factor of 0."""
        count = self.processes.count
        # FSDP averages gradients over processes
        weighted = [(group, float(count)) for group in groups] + [(groups[-1], 0.0)] * (-len(groups) % count)
        return list(self.processes.share(weighted))

    def collect_gradients(self) -> None:
        for name, parameter in self.trained.items():
            gradient: Any = parameter.grad
            self.parameters[name].grad = gradient.to_local()

    def square_norm(self) -> Tensor:
        return self.processes.sum_(square_norm(self.parameters.values()))

    def local(self, parameter: Any) -> Tensor:
        return parameter.detach().to_local()

    def full(self, parameter: Any) -> Tensor:
        return parameter.detach().full_tensor()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        like: Any = self.model.get_parameter(name)
        whole = DTensor.from_local(
            tensor, self.mesh, like.placements, shape=like.shape, stride=like.stride()
        ).full_tensor()
        return whole.cpu() if self.processes.first else torch.empty(0)

    def part(self, name: str, stored: Stored) -> Tensor:
        """The rows that ``torch.chunk`` gives this process, as in FSDP."""
        length, *others = stored.get_shape()
        rows = -(-length // self.processes.count)
        start, end = (min(rank * rows, length) for rank in (self.processes.rank, self.processes.rank + 1))
        part = stored[start:end] if start < end else stored[:1][:0]
        return part.to(self.device)

    def state_dict(self) -> dict[str, Tensor]:
        first, whole = {}, {}
        owners = {name: id(parameter) for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        for name, tensor in self.model.state_dict().items():
            owner = owners.get(name, name)
            if owner in first:
                whole[name] = whole[first[owner]]  # tied
                continue
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            first[owner], whole[name] = name, full.cpu() if self.processes.first else None
        return whole

    def clear(self) -> None:
        super().clear()
        for parameter in self.trained.values():
            parameter.grad = None


def square_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The sum of the squares of the parameters' gradients."""
    norms = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return torch.stack([norm**2 for norm in norms]).sum()
