from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.consolidation.batch_norm import restored_modes
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import inner_units
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.studies.continual_backprop import ContinualBackprop
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.step.backward import Backward


@register_learner("redo", epochs=70, milestones=[30, 50])
class ReDo(Replay):
    """Recycling of dormant neurons (Sokar et al., ICML 2023, https://arxiv.org/abs/2302.12902), with Replay.

    Every ``recycle_every`` steps, a unit whose mean activation on the batch is at most ``dormant_threshold`` times its
    layer's mean gets new initial incoming weights, and outgoing weights of 0; the optimiser forgets both. A unit is a
    channel with one incoming and one outgoing layer: in residual networks, inside the basic blocks.
    """

    @dataclass(frozen=True)
    class Options:
        recycle_every: int = key(1000, "optimiser steps between two recyclings (1000 in the paper)", low=1)
        dormant_threshold: float = key(
            0.025,
            "a unit at most this fraction of its layer's mean activation is dormant (0.025 in the paper's default "
            "setting; 0.1 in its others)",
            low=0,
        )

    class Plan(Replay.Plan):
        plain_first_task = False

        def check_backbone(self, backbone: nn.Module) -> None:
            super().check_backbone(backbone)
            if not units(backbone):
                raise UserError(
                    f"model_name: 'redo' finds no units in '{self.config.convnet_type}', whose blocks need conv1, bn1 "
                    "and conv2; use another backbone or method"
                )

        def time_constants(self, network: nn.Module) -> dict[str, float]:
            return {"recycle_every": self.config.options.recycle_every}

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.steps = 0  # optimiser steps in all tasks
        self.optimizer_of_phase: Optimizer | None = None
        self.batch: Batch | None = None  # the batch of a step that is followed by a recycling

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            self.optimizer_of_phase = phase.optimizer
            yield phase

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        if (self.steps + 1) % self.config.options.recycle_every == 0:
            self.batch = batch

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        if self.batch is None:
            return
        backbone = self.network.backbone
        with seeding.seeded(self.config.seed, "recycled", self.steps):
            fresh = self.new_backbone(pretrained=False).to(self.device)
        layers = [names for names in units(backbone) if backbone.get_submodule(names[0]).weight.requires_grad]
        activations = self._activations([outgoing for _, _, outgoing in layers])
        for (incoming, norm, outgoing), mean in zip(layers, activations):
            dormant = mean <= self.config.options.dormant_threshold * mean.mean()
            for name in (incoming, norm):
                self._renew(backbone.get_submodule(name), fresh.get_submodule(name), dormant)
            self._set(backbone.get_submodule(outgoing).weight, 0, dormant[None])
        self.batch = None

    def _activations(self, outgoing):
        """The mean activation of each unit on the batch, of all processes: the input of its outgoing layer."""
        activations: dict[str, Tensor] = {}

        def watch(name):
            def observe(layer, inputs):
                activations[name] = inputs[0].float().abs().mean((2, 3)).sum(0)

            return self.network.backbone.get_submodule(name).register_forward_pre_hook(observe)

        assert self.batch is not None
        hooks = [watch(name) for name in outgoing]
        with restored_modes(self.network), self.precision.autocast():
            self.network.eval()
            self.network.extract(self.batch.images)
        for hook in hooks:
            hook.remove()
        return [self.processes.sum_(activations[name]) for name in outgoing]

    def _renew(self, part, fresh, dormant):
        state, new = part.state_dict(keep_vars=True), fresh.state_dict()
        for name, value in state.items():
            if value.dim():
                self._set(value, new[name].to(value), dormant)

    def _set(self, tensor, value, dormant):
        """Set the dormant units' part of a tensor, and clear it in the optimiser."""
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            return
        mask = dormant.view(*dormant.shape, *[1] * (tensor.dim() - dormant.dim()))
        tensor.copy_(torch.where(mask, value, tensor))
        assert self.optimizer_of_phase is not None
        for state in self.optimizer_of_phase.state.get(tensor, {}).values():
            if isinstance(state, Tensor) and state.shape == tensor.shape:
                state.masked_fill_(mask, 0)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"steps": self.steps}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.steps = state["steps"]


def units(backbone: nn.Module) -> list[tuple[str, str, str]]:
    """The names of (layer, batch norm, next layer) of the units that can be recycled: those without groups."""
    return [names for names in inner_units(backbone) if ContinualBackprop.supports(backbone, *names)]
