"""Parameters sharded over processes (``DTensor``, as in FSDP2): each process works on its own rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed

from pycil_wsc.consolidation.ranking import Peers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a sharded tensor, sharing its storage; any other tensor unchanged."""
    return _detached(tensor).to_local() if is_sharded(tensor) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """``part``, this process's rows, as a tensor sharded like ``tensor``; unchanged if ``tensor`` is not sharded."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    model = cast(DTensor, tensor)
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def part_of(value: Tensor, tensor: Tensor) -> Tensor:
    """This process's rows of ``value``, which is sharded like ``tensor`` or whole."""
    if is_sharded(value) or not is_sharded(tensor):
        return local(value)
    from torch.distributed.tensor import DTensor, distribute_tensor

    model = cast(DTensor, tensor)
    value = value.to(model.device_mesh.device_type)
    return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None).to_local()


def gathered(state: object, keep: bool = True) -> Any:
    """``state`` with its sharded tensors gathered on the CPU. All processes must call this together.

    ``keep=False`` replaces the gathered tensors by None, in the processes that do not save the state.
    """
    if isinstance(state, Mapping):
        return {key: gathered(value, keep) for key, value in state.items()}
    if not is_sharded(state):
        return state
    tensor = whole(cast(Tensor, state))
    return tensor.cpu() if keep else None


def whole(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor, in every process; any other tensor unchanged."""
    return _detached(tensor).full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: object) -> bool:
    """Whether ``tensor`` is a ``DTensor``."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def peers_of(params: Mapping[str, Tensor]) -> Peers | None:
    """The processes over which ``params`` are sharded; None if no parameter is sharded.

    Raises ValueError unless all are sharded over the same dimension of the same device mesh.
    """
    meshes = {name: _mesh_dimension(name, param) for name, param in params.items() if is_sharded(param)}
    if not meshes:
        return None
    for name in params:
        if name not in meshes:
            raise ValueError(f"'{name}' is not sharded but other parameters are: shard all (fully_shard) or none")
    distinct = list(dict.fromkeys(meshes.values()))
    if len(distinct) > 1:
        raise ValueError("the parameters are sharded over different meshes: use one mesh for all")
    return MeshPeers(*distinct[0])


class MeshPeers:
    """:class:`~.ranking.Peers` of one dimension of a device mesh."""

    def __init__(self, mesh: "DeviceMesh", dimension: int):
        self.group = mesh.get_group(dimension)
        self.device = mesh.device_type

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def before(self, count: int) -> int:
        counts = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(self.group.size())]
        distributed.all_gather(counts, torch.tensor(count, device=self.device), group=self.group)
        return sum(int(number) for number in counts[: self.group.rank()])


def _mesh_dimension(name, param) -> "tuple[DeviceMesh, int]":
    """The mesh, and the one dimension of it over which ``param`` is sharded."""
    sharding = [number for number, placement in enumerate(param.placements) if not placement.is_replicate()]
    if len(sharding) != 1 or not param.placements[sharding[0]].is_shard():
        raise ValueError(
            f"'{name}' is placed as {param.placements}: consolidation works on parameters sharded over one dimension "
            "of a device mesh, as by fully_shard()"
        )
    return param.device_mesh, sharding[0]


def _detached(tensor: Tensor) -> "DTensor":
    return cast("DTensor", tensor.detach())
