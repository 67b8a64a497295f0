"""Continual backpropagation: low-utility units are reinitialised, a few at a time, throughout training."""

import sys
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pycil_wsc.consolidation.trackers import wide
from pycil_wsc.registry import register_reset
from pycil_wsc.state import State
from pycil_wsc.studies.rival_resets import Training


class ContinualBackprop:
    """Replaces mature units of low utility: Dohare et al., "Loss of plasticity in deep continual learning" (2024),
    algorithm 1.

    After each optimiser step, in each layer of units, with h a unit's activations and w its outgoing weights::

        u <- decay * u + (1 - decay) * mean |h| * sum |w|     utility of the unit
        a <- a + 1                                            age, in steps
        c <- c + rate * (number of mature units, a > maturity)
        while c >= 1: replace the mature unit with the lowest u; c <- c - 1

    A new unit has newly initialised incoming weights, zero outgoing weights, no momentum and age 0. No step
    synchronises with the device.

    >>> from torch import nn
    >>> from pycil_wsc.studies.continual_backprop import ContinualBackprop
    >>> def new(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> model = new()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> fresh = lambda: dict(new().named_parameters())
    >>> rule = ContinualBackprop(model, [("0", None, "2")], fresh, rate=0.01, maturity=5).attach(optimizer)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(2, (4,))).backward()
    ...     optimizer.step()
    >>> rule.detach()
    >>> rule.replaced
    2

    Args:
        model: the network that is trained.
        units: for each layer of units, the names in ``model`` of its incoming linear or convolutional layer, its batch
            norm (or None) and its outgoing layer. A unit is one output feature or channel of the incoming layer.
        fresh: function without arguments that returns {name: new initial values} of the model's parameters; called at
            each step that replaces a unit.
        rate: units replaced per step, as a fraction of the mature units.
        maturity: steps for which a new unit is protected.
        decay: decay rate of the running mean of the utility.
        sum_: sums a tensor over the processes that share each batch, in place, so that all replace the same units.

    Attributes:
        steps: the number of optimiser steps that it has followed.
        replaced: the number of units that it has replaced, in all layers.

    Raises:
        ValueError: an argument is out of range, a layer is of an unsupported kind, or two layers do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[tuple[str, str | None, str]],
        fresh: Callable[[], Mapping[str, Tensor]],
        rate: float = 1e-5,
        maturity: int = 1000,
        decay: float = 0.99,
        sum_: Callable[[Tensor], object] | None = None,
    ):
        if not 0 <= rate <= 1 or maturity < 0 or not 0 <= decay < 1:
            raise ValueError(
                f"rate={rate!r}, maturity={maturity!r}, decay={decay!r}: "
                "give a fraction, a number of steps, and a number from 0 to below 1"
            )
        self.fresh = fresh
        self.rate = rate
        self.maturity = maturity
        self.decay = decay
        self.sum_ = sum_
        self.steps = 0
        self.replaced = 0
        self._hooks: list[RemovableHandle] = []
        self._layers = [_Layer(model, *names) for names in units]

    @staticmethod
    def supports(model: nn.Module, incoming: str, norm: str | None, outgoing: str) -> bool:
        """Whether these names of layers in ``model`` may be an entry of ``units``."""
        try:
            _Layer(model, incoming, norm, outgoing)
        except ValueError:
            return False
        return True

    def time_constants(self) -> dict[str, float]:
        """{option: optimiser steps until the first unit is replaced}, with the option that this is mostly due to.

        In the layer with the most units, 1 / (rate * units) steps after they are mature. Empty if none is replaced.
        """
        most = max((len(layer.utility) for layer in self._layers), default=0)
        if not (self.rate and most):
            return {}
        waiting = 1 / (self.rate * most)
        slowest = "maturity" if self.maturity >= waiting else "replacement_rate"
        return {slowest: self.maturity + waiting}

    def attach(self, optimizer: Optimizer) -> "ContinualBackprop":
        """Follow the steps of ``optimizer`` and the activations of the model in training mode. Returns self.

        Raises:
            RuntimeError: it is attached already.
        """
        if self._hooks:
            raise RuntimeError("attached already: detach() first")
        self._hooks = [layer.outgoing.register_forward_pre_hook(layer.observe) for layer in self._layers]
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # a graph compiled before does not call new hooks
        return self

    def detach(self) -> None:
        """Remove the hooks; does nothing if there are none."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        self.steps += 1
        fresh = None
        if self.sum_:
            observed = [layer.observed for layer in self._layers]
            whole = torch.cat(observed)
            self.sum_(whole)
            torch._foreach_copy_(observed, list(whole.split([len(part) for part in observed])))
        for layer in self._layers:
            layer.update_utility(self.decay)
            number = layer.count_due(self.steps, self.rate, self.maturity)
            if number:
                fresh = fresh or self.fresh()
                layer.replace(number, self.steps, self.maturity, fresh, optimizer)
                self.replaced += number

    def state_dict(self) -> State:
        """The state to resume from, for ``torch.load(weights_only=True)``. As in torch, tensors are not copied."""
        layers = [
            {"utility": layer.utility, "born": layer.born, "births": list(layer.births), "due": layer.due}
            for layer in self._layers
        ]
        return {"steps": self.steps, "replaced": self.replaced, "layers": layers}

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state; load those of the model and the optimiser too.

        Raises ValueError if the state is of other layers of units; nothing is then loaded.
        """
        saved = [len(layer["utility"]) for layer in state["layers"]]
        present = [len(layer.utility) for layer in self._layers]
        if saved != present:
            raise ValueError(f"the state has layers of {saved} units, this object has layers of {present}")
        self.steps = state["steps"]
        self.replaced = state["replaced"]
        for layer, saved in zip(self._layers, state["layers"], strict=True):
            layer.utility.copy_(saved["utility"])
            layer.born.copy_(saved["born"])
            layer.births = list(saved["births"])
            layer.due = saved["due"]


@register_reset("continual_backprop", ranks=False)
def continual_backprop(training: Training) -> ContinualBackprop:
    """Replace units of the layers that are trained and supported, such as those without groups."""
    network = training.network
    options = training.options
    units = [names for names in training.units if _replaceable(network, names)]
    if not units:
        raise ValueError("finds no units in this backbone; its blocks need conv1, bn1 and conv2, without groups")
    rates = (options.replacement_rate, options.maturity, options.utility_decay)
    return ContinualBackprop(network, units, training.fresh, *rates, training.sum_)


def _replaceable(network, names):
    supported = ContinualBackprop.supports(network, *names)
    return supported and network.get_submodule(names[0]).weight.requires_grad


class _Layer:
    """One layer of units. ``born``: the step at which each was created; ``births``: the recent ones, on the host."""

    def __init__(self, model: nn.Module, incoming: str, norm: str | None, outgoing: str):
        self.names = [name for name in (incoming, norm) if name is not None]
        self.parts = [model.get_submodule(name) for name in self.names]
        number = len(_layer(model, incoming).weight)
        self.outgoing = _layer(model, outgoing)
        weight = self.outgoing.weight
        if weight.shape[1] != number:
            raise ValueError(f"units: '{incoming}' has {number} outputs, '{outgoing}' takes {weight.shape[1]}")
        if norm and getattr(model.get_submodule(norm), "num_features", number) != number:
            raise ValueError(f"units: '{norm}' does not normalise the {number} outputs of '{incoming}'")
        self.utility = torch.zeros(number, dtype=wide(weight.dtype), device=weight.device)
        self.born = torch.zeros(number, dtype=torch.int64, device=weight.device)
        # from the last forward pass: the sum of |h| of each unit, and the number of its activations
        self.observed = torch.zeros(number + 1, dtype=self.utility.dtype, device=weight.device)
        self.births = []
        self.due = 0.0  # due: c of the algorithm, below 1 between steps

    @torch.no_grad()
    def observe(self, outgoing, inputs):
        """Record |h| of each unit, in place: a CUDA graph always writes to the same memory."""
        if outgoing.training:
            h = inputs[0]
            channels = -1 if isinstance(outgoing, nn.Linear) else 1
            others = [d for d in range(h.dim()) if d != channels % h.dim()]
            self.observed[:-1] = torch.linalg.vector_norm(h, 1, dim=others, dtype=wide(h.dtype))
            self.observed[-1:].fill_(h.numel() // len(self.utility))  # an assignment would copy from the host

    def update_utility(self, decay: float) -> None:
        """Update the utility. A step without a forward pass in training mode leaves it unchanged."""
        outgoing = self.outgoing.weight.abs().transpose(0, 1).flatten(1).sum(1)
        magnitude = self.observed[:-1] / self.observed[-1]
        count = self.observed[-1]
        self.utility.lerp_(torch.where(count > 0, (magnitude * outgoing).to(self.utility), self.utility), 1 - decay)
        self.observed.zero_()

    def count_due(self, step: int, rate: float, maturity: int) -> int:
        """The number of units to replace after this step."""
        self.births = [birth for birth in self.births if step - birth <= maturity]
        mature = len(self.utility) - len(self.births) if step > maturity else 0
        self.due += rate * mature
        number = int(self.due)
        self.due -= number
        return number

    def replace(self, number: int, step: int, maturity: int, fresh: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        mature = step - self.born > maturity
        worst = self.utility.masked_fill(~mature, torch.inf).topk(number, largest=False).indices
        for name, part in zip(self.names, self.parts):
            for suffix, param in part.named_parameters():
                param.index_copy_(0, worst, fresh[f"{name}.{suffix}"].detach().to(param)[worst])
                _clear_state(optimizer, param, 0, worst)
            if getattr(part, "running_mean", None) is not None:
                part.get_buffer("running_mean").index_fill_(0, worst, 0)
                part.get_buffer("running_var").index_fill_(0, worst, 1)
        self.outgoing.weight.index_fill_(1, worst, 0)
        _clear_state(optimizer, self.outgoing.weight, 1, worst)
        self.utility.index_fill_(0, worst, 0)
        self.born.index_fill_(0, worst, step)
        self.births += [step] * number


def _layer(model: nn.Module, name: str) -> nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d:
    layer = model.get_submodule(name)
    if not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or getattr(layer, "groups", 1) != 1:
        raise ValueError(
            f"units: '{name}' is a {type(layer).__name__}; give linear layers or convolutions with groups=1"
        )
    return layer


def _clear_state(optimizer, param, dim, index):
    """Set these rows or columns to 0 in the optimiser's state of ``param``."""
    for value in optimizer.state.get(param, {}).values():
        if torch.is_tensor(value) and value.shape == param.shape:
            value.index_fill_(dim, index, 0)
