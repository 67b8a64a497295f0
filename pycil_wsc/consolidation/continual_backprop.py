"""Continual backpropagation: units of little use give way to new ones, a few at a time, all through training."""

import torch
from torch import nn

from pycil_wsc.consolidation.moments import wide


class ContinualBackprop:
    """Generate and test, by the utility and age of units: Dohare et al., "Loss of plasticity in deep continual learning" (2024), algorithm 1.

    After each optimiser step, in each layer of units, with h a unit's activations and w the weights that lead on from it::

        u <- decay * u + (1 - decay) * mean |h| * sum |w|     utility: what the unit contributes
        a <- a + 1                                            age, in steps
        c <- c + rate * (number of units with a > maturity)
        while c >= 1: of those units the one with the least u is replaced; c <- c - 1

    A new unit has initial values on the way in, zeros on the way out, no momentum and age 0. Nothing waits for the device.

    >>> from torch import nn
    >>> from pycil_wsc.consolidation import ContinualBackprop
    >>> def new(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> model = new()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> rule = ContinualBackprop(model, [("0", None, "2")], fresh=lambda: dict(new().named_parameters()), rate=0.01, maturity=5).attach(optimizer)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(2, (4,))).backward()
    ...     optimizer.step()
    >>> rule.detach()
    >>> rule.replaced
    2

    Args:
        model: the network that is trained.
        units: for each layer of units the names, in ``model``, of the linear or convolutional layer that leads to them, of their batch norm
            or None, and of the layer they lead to. A unit is an output of the first, and of a convolution a channel.
        fresh: function without arguments -> {name: initial values} of the model's parameters, drawn anew; called at each step that replaces.
        rate: units replaced in a step, as a share of the mature ones.
        maturity: steps that a unit is safe.
        decay: of the utility's running mean.

    Raises:
        ValueError: a layer is of another kind, or two do not fit together.
    """

    def __init__(self, model, units, fresh, rate=1e-5, maturity=1000, decay=0.99):
        if not 0 <= rate <= 1 or maturity < 0 or not 0 <= decay < 1:
            raise ValueError(
                f"rate={rate!r}, maturity={maturity!r}, decay={decay!r}: give a share, a number of steps, and a number from 0 to below 1"
            )
        self.fresh, self.rate, self.maturity, self.decay = fresh, rate, maturity, decay
        self.steps = self.replaced = 0
        self._hooks = []
        self._layers = [_Layer(model, *names) for names in units]

    def attach(self, optimizer):
        """Follow ``optimizer`` and the activations of the model in training mode. Returns the object itself."""
        if self._hooks:
            raise RuntimeError("attached already: detach() first")
        self._hooks = [layer.outgoing.register_forward_pre_hook(layer.see) for layer in self._layers]
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        return self

    def detach(self):
        """Follow no longer; without effect if nothing is followed."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        self.steps += 1
        fresh = None
        for layer in self._layers:
            layer.update_utility(self.decay)
            if number := layer.due(self.steps, self.rate, self.maturity):
                fresh = fresh or self.fresh()
                layer.replace(number, self.steps, self.maturity, fresh, optimizer)
                self.replaced += number

    def state_dict(self):
        """All that is needed to go on, for ``torch.load(weights_only=True)``. As in torch, the tensors are not copies."""
        layers = [
            {"utility": layer.utility, "born": layer.born, "births": list(layer.births), "due": layer.owed}
            for layer in self._layers
        ]
        return {"steps": self.steps, "replaced": self.replaced, "layers": layers}

    def load_state_dict(self, state):
        """Go on from a saved state: load model and optimiser too."""
        self.steps, self.replaced = state["steps"], state["replaced"]
        for layer, saved in zip(self._layers, state["layers"], strict=True):
            layer.utility.copy_(saved["utility"])
            layer.born.copy_(saved["born"])
            layer.births, layer.owed = list(saved["births"]), saved["due"]


class _Layer:
    """One layer of units. ``born``: the step each was made at; ``births``: the latest of these once more, where no device must be asked."""

    def __init__(self, model, incoming, norm, outgoing):
        self.names = [name for name in (incoming, norm) if name is not None]
        self.parts = [model.get_submodule(name) for name in self.names]
        self.incoming, self.outgoing = self.parts[0], model.get_submodule(outgoing)
        for name, layer in (incoming, self.incoming), (outgoing, self.outgoing):
            if not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or getattr(layer, "groups", 1) != 1:
                raise ValueError(
                    f"units: '{name}' is a {type(layer).__name__}; give linear layers or convolutions in one group"
                )
        weight, number = self.outgoing.weight, len(self.incoming.weight)
        if weight.shape[1] != number:
            raise ValueError(f"units: '{incoming}' has {number} outputs, '{outgoing}' takes {weight.shape[1]}")
        self.utility = torch.zeros(number, dtype=wide(weight.dtype), device=weight.device)
        self.born = torch.zeros(number, dtype=torch.int64, device=weight.device)
        self.magnitude = torch.full_like(
            self.utility, -1
        )  # mean |h| of the last forward pass; negative where there was none
        self.births, self.owed = [], 0.0

    @torch.no_grad()
    def see(self, outgoing, inputs):
        """The mean |h| of each unit, (units,), into the same memory each time: a CUDA graph writes there too."""
        if outgoing.training:
            h = inputs[0]
            channels = -1 if isinstance(outgoing, nn.Linear) else 1
            others = [d for d in range(h.dim()) if d != channels % h.dim()]
            self.magnitude.copy_(
                torch.linalg.vector_norm(h, 1, dim=others, dtype=wide(h.dtype)) / (h.numel() / len(self.utility))
            )

    def update_utility(self, decay):
        """A step without a forward pass in training mode tells nothing of the units."""
        leading_on = self.outgoing.weight.abs().transpose(0, 1).flatten(1).sum(1)
        told = torch.where(self.magnitude < 0, self.utility, (self.magnitude * leading_on).to(self.utility))
        self.utility.lerp_(told, 1 - decay)
        self.magnitude.fill_(-1)

    def due(self, step, rate, maturity):
        """How many units to replace after this step."""
        self.births = [birth for birth in self.births if step - birth <= maturity]
        mature = len(self.utility) - len(self.births) if step > maturity else 0
        self.owed += rate * mature
        number = int(self.owed)
        self.owed -= number
        return number

    def replace(self, number, step, maturity, fresh, optimizer):
        mature = step - self.born > maturity
        worst = self.utility.masked_fill(~mature, torch.inf).topk(number, largest=False).indices
        for name, part in zip(self.names, self.parts):
            for suffix, param in part.named_parameters():
                param.index_copy_(0, worst, fresh[f"{name}.{suffix}"].detach().to(param)[worst])
                _forget(optimizer, param, 0, worst)
            if getattr(part, "running_mean", None) is not None:
                part.running_mean.index_fill_(0, worst, 0)
                part.running_var.index_fill_(0, worst, 1)
        self.outgoing.weight.index_fill_(1, worst, 0)
        _forget(optimizer, self.outgoing.weight, 1, worst)
        self.utility.index_fill_(0, worst, 0)
        self.born.index_fill_(0, worst, step)
        self.births += [step] * number


def _forget(optimizer, param, dim, index):
    """The optimiser's own tensors of these rows or columns become 0."""
    for value in optimizer.state.get(param, {}).values():
        if torch.is_tensor(value) and value.shape == param.shape:
            value.index_fill_(dim, index, 0)
