"""How the processes hold the model: each all of it, or each a part (FSDP).

Either way ``parameters`` are plain tensors with gradients, so that optimiser, consolidation and merges are the same. Of a sharded model they
are this process's rows, in the storage that FSDP gathers from.
"""

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pycil_wsc.llm.model import trained_parameters


class Whole:
    """Every process has the whole model and adds up the gradients."""

    peers = None  # those that hold the rest of the parameters

    def __init__(self, model, processes, device):
        self.model, self.processes = model.to(device), processes
        self.parameters = trained_parameters(self.model)

    def share(self, groups):
        """This process's groups of an optimiser step, with the factor of each one's loss."""
        return [(group, 1.0) for group in self.processes.share(groups)]

    def collect_gradients(self):
        """After the last backward pass: ``parameters`` have the gradients of all processes."""
        self.processes.sum_gradients_(self.parameters.values())

    def square_norm(self):
        """Of the gradients, together."""
        return square_norm(self.parameters.values())

    def whole(self, name, tensor):
        """A tensor of the shape of ``parameters[name]`` in the shape of the model's, where the first process has it."""
        return tensor

    def part(self, name, tensor):
        """The other way round."""
        return tensor

    def state_dict(self):
        """Of the whole model, where the first process has it."""
        return self.model.state_dict()

    def clear(self):
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


class Sharded(Whole):
    """Every process has some rows of each parameter; layers are gathered when they are computed."""

    def __init__(self, model, processes, device):
        self.model, self.processes, self.peers = model, processes, processes
        self.mesh = init_device_mesh(device.type, (processes.count,))
        layers = set(getattr(model, "_no_split_modules", None) or ())
        for layer in [module for module in model.modules() if type(module).__name__ in layers]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(
            model, mesh=self.mesh, reshard_after_forward=True
        )  # what is gathered must not outlive a change of the parts
        model.to(device)
        self.sharded = trained_parameters(model)
        self.parameters = {name: nn.Parameter(parameter.to_local()) for name, parameter in self.sharded.items()}

    def share(self, groups):
        """As many in every process, for they gather layers together: where there are too few, the last comes again and counts nothing."""
        count = self.processes.count
        missing = -len(groups) % count
        weighted = [(group, float(count)) for group in groups] + [
            (groups[-1], 0.0)
        ] * missing  # FSDP gives the mean over processes
        return self.processes.share(weighted)

    def collect_gradients(self):
        for name, parameter in self.sharded.items():
            self.parameters[name].grad = parameter.grad.to_local()

    def square_norm(self):
        return self.processes.sum_(square_norm(self.parameters.values()))

    def whole(self, name, tensor):
        like = self.sharded[name]
        whole = DTensor.from_local(
            tensor, self.mesh, like.placements, shape=like.shape, stride=like.stride()
        ).full_tensor()
        return whole.cpu() if self.processes.first else torch.empty(0)

    def part(self, name, tensor):
        return distribute_tensor(tensor.to(self.mesh.device_type), self.mesh, self.sharded[name].placements).to_local()

    def state_dict(self):
        whole, places = {}, {}
        for name, tensor in self.model.state_dict().items():
            place = tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()
            if place in places:
                whole[name] = whole[places[place]]  # tied
                continue
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            places[place], whole[name] = name, full.cpu() if self.processes.first else None
        return whole

    def clear(self):
        super().clear()
        for parameter in self.sharded.values():
            parameter.grad = None


def square_norm(parameters):
    return torch.stack([norm**2 for norm in torch._foreach_norm([parameter.grad for parameter in parameters])]).sum()
