"""The processes that ``torchrun`` started, each with the same model and its share of every batch."""

import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import distributed

from pycil_wsc import devices
from pycil_wsc.data.batches.epoch_order import Share
from pycil_wsc.devices import accelerator, make_current, numbered, resolved_device
from pycil_wsc.errors import UserError

T = TypeVar("T")
U = TypeVar("U")
# outside collectives, the others wait while the first process writes reports or waits for the run of another command
IDLE = timedelta(days=365)


def launched() -> bool:
    """Whether ``torchrun`` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_and_count() -> tuple[int, int]:
    """This process's rank, from 0, and the number of processes."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched() else (0, 1)


# ---- between runs: through the rendezvous store, without a timeout ---------------------------------------------------


def exchange(message: T) -> list[T]:
    """The messages of all processes, by rank. All processes must call this; they wait for each other."""
    rank, count = rank_and_count()
    if count == 1:
        return [message]
    store = distributed.PrefixStore(f"exchange {next(_exchanges)}", _rendezvous())
    store.set(str(rank), pickle.dumps(message))  # type: ignore[arg-type]  # torch's annotation lacks bytes
    store.wait([str(other) for other in range(count)], IDLE)
    return [pickle.loads(store.get(str(other))) for other in range(count)]


def from_first(message: T) -> T:
    """The first process's ``message``, in every process. The first does not wait for the others."""
    rank, count = rank_and_count()
    if count == 1:
        return message
    store = distributed.PrefixStore(f"from first {next(_messages)}", _rendezvous())
    if rank == 0:
        store.set("message", pickle.dumps(message))  # type: ignore[arg-type]  # torch's annotation lacks bytes
    store.wait(["message"], IDLE)
    return pickle.loads(store.get("message"))


def in_all(work: Callable[[], T]) -> T:
    """Call ``work`` in every process. A :class:`UserError` that it raises in one is raised in all.

    Otherwise that process would go on to the next run, and its tensors would meet those of another run in the others.
    """
    value, error = None, None
    try:
        value = work()
    except UserError as raised:
        error = raised
    for other in exchange(error):
        if other:
            raise other
    return cast(T, value)


def check_machines(names: Sequence[str]) -> None:
    """Raise a :class:`UserError` in all processes if one lacks a device, or has another version of torch.

    ``names``: the values of the key ``device``.
    """
    in_all(lambda: _check_devices(names))
    if len(set(exchange(torch.__version__))) > 1:
        raise UserError("torchrun: the processes have several versions of torch; install one on all nodes")


def _check_devices(names: Sequence[str]) -> None:
    rank, count = rank_and_count()
    number = devices.count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for name in names:
        try:
            device = resolved_device(name)
        except UserError as error:
            raise UserError(f"torchrun: process {rank + 1} of {count}: {error}") from None
        if device.type != "cpu" and here > number:
            raise UserError(
                f"torchrun: process {rank + 1} of {count}: one of {here} on a machine with {number} GPUs; "
                "start one process per GPU, or use --device cpu"
            )


_exchanges = itertools.count()
_messages = itertools.count()


@functools.cache
def _rendezvous() -> distributed.Store:
    return next(distributed.rendezvous("env://"))[0]


def backends() -> str:
    """What the processes communicate through, in torch's form: ``cpu:gloo`` or, for example, ``cpu:gloo,cuda:nccl``.

    Messages and shares of lists are on the CPU, gradients on the device; each has the backend that torch provides.
    """
    types = ["cpu"]
    if device := accelerator():
        types.append(device.type)
    return ",".join(f"{name}:{backend_of(name)}" for name in types)


def backend_of(device_type: str) -> str:
    """What torch sends tensors of a type of device through: ``gloo``, ``nccl``, ``xccl``, ..."""
    try:
        return distributed.get_default_backend_for_device(device_type)
    except ValueError:
        problem = f"torchrun: torch knows no way to send tensors between devices of type '{device_type}'"
        raise UserError(problem) from None


# ---- within a run: collectives -------------------------------------------------------------------------------------


class Processes:
    """This process has ``rank`` of ``count``; the first writes all files.

    ``timeout_minutes``: how long a process waits for the others before it raises; the value of the first run counts.
    """

    def __init__(self, timeout_minutes: float = 30.0) -> None:
        self.rank, self.count = rank_and_count()
        if self.count > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                backends(),
                store=distributed.PrefixStore("collectives", _rendezvous()),
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(minutes=timeout_minutes),
            )

    @property
    def share_of_batches(self) -> Share:
        """Whole batches, for testing and for the features of herding."""
        return Share(self.rank, self.count)

    @property
    def share_of_each_batch(self) -> Share:
        """Some images of every batch, for training."""
        return Share(self.rank, self.count, of_each=True)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """``device``, or this process's own accelerator if there are several processes; made the current one."""
        if device.type != "cpu" and self.count > 1:
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        device = numbered(device)
        make_current(device)
        return device

    def share(self, values: Sequence[T]) -> Sequence[T]:
        """This process's part of a list."""
        return values[self.rank :: self.count]

    def gather(self, share: Sequence[T], total: int) -> list[T]:
        """The list of all ``total`` values, from every process's :meth:`share`."""
        if self.count == 1:
            return list(share)
        shares = cast(list[Sequence[T]], [None] * self.count)
        distributed.all_gather_object(shares, share)
        whole = cast(list[T], [None] * total)
        for rank, part in enumerate(shares):
            whole[rank :: self.count] = part
        return whole

    def map(self, work: Callable[[T], U], values: Sequence[T]) -> list[U]:
        """``work(value)`` for all ``values``; each process does its :meth:`share`."""
        return self.gather([work(value) for value in self.share(values)], len(values))

    def broadcast(self, message: T) -> T:
        """The first process's ``message``, in every process."""
        box = [message]
        if self.count > 1:
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def from_first(self, work: Callable[[], T]) -> T | None:
        """Call ``work`` in the first process and return its result in every process.

        A :class:`UserError` is raised in every process too. The others wait without a timeout.
        """
        return self.broadcast(self.in_all(lambda: work() if self.first else None))

    def in_all(self, work: Callable[[], T]) -> T:
        """:func:`in_all`, for these processes."""
        return in_all(work) if self.count > 1 else work()

    def copy_from_first_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the first process's values into ``tensors``."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def agree(self, value: object) -> bool:
        """Whether ``value`` is the same in all processes; they wait for each other."""
        values = self.gather([value], self.count)
        return all(other == value for other in values)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return self.sum_(tensor.clone())

    def all(self, flag: torch.Tensor) -> bool:
        """Whether ``flag``, a bool tensor (), is set in all processes. Synchronises with the device."""
        return not self.sum((~flag).int()).item()

    def before(self, count: int) -> int:
        """The sum of ``count`` over the processes before this one."""
        return sum(self.gather([count], self.count)[: self.rank])

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor


class SingleProcess(Processes):
    """This process alone, even under ``torchrun``."""

    def __init__(self) -> None:
        self.rank, self.count = 0, 1


SINGLE_PROCESS = SingleProcess()
