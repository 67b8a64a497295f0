from collections import defaultdict

from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import widest_float
from pycil_wsc.registry import register_analysis
from pycil_wsc.studies.observer import Observer, Record

Weights = dict[str, Tensor]


@register_analysis("drift")
class Drift(Observer):
    """How far the weights move between and within tasks, in total and per layer (a module's own parameters).

    ``between``: the distance |theta_t - theta_(t-1)| between the weights after this task and after the previous one,
    over the parameters that existed then, and the same relative to the previous norm; None after the first task. Parts
    that each task makes anew, which networks name in ``made_anew``, are left out.
    ``within``: the distance moved in each epoch and, for each layer, the sum over the epochs. The step to the averaged
    weights at the end of a task is included in ``between`` only.
    """

    watches_epochs = True

    def task_started(self, task: Task) -> None:
        self.state |= {"last": self.weights(), "epochs": [], "path": {}}

    def epoch_ended(self, task: Task) -> None:
        weights = self.weights()
        layers = layer_norms(differences(weights, self.state["last"]))
        self.state["epochs"].append(total_norm(layers))
        self.state["path"] = {name: self.state["path"].get(name, 0.0) + distance for name, distance in layers.items()}
        self.state["last"] = weights

    def task_trained(self, task: Task) -> Record:
        weights = self.weights()
        previous = self.state.get("previous")
        record = {
            "between": between(self.lasting(weights), previous) if previous else None,
            "within": {"norm": self.state["epochs"], "layers": self.state["path"]},
        }
        self.state = {"previous": weights}
        return record

    def weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self.learner.network.named_parameters()}

    def lasting(self, weights: Weights) -> Weights:
        """Those of ``weights`` that a task takes over from the previous one, as far as they existed."""
        anew = []  # the beginnings of names
        for path, module in self.learner.network.named_modules():
            anew += [f"{path}.{part}.".lstrip(".") for part in getattr(module, "made_anew", ())]
        return {name: weight for name, weight in weights.items() if not f"{name}.".startswith(tuple(anew))}


def between(weights: Weights, previous: Weights) -> dict[str, object]:
    layers = layer_norms(differences(weights, previous))
    before = layer_norms(previous)
    relative = {name: distance / before[name] if before[name] else None for name, distance in layers.items()}
    return {"norm": total_norm(layers), "layers": layers, "relative": relative}


def differences(weights: Weights, previous: Weights) -> Weights:
    """``weights`` - ``previous`` by name, in the part that both have: a head or a layer may have grown."""
    changes = {}
    for name, now in weights.items():
        if name in previous:
            before = previous[name]
            part = tuple(slice(min(sizes)) for sizes in zip(now.shape, before.shape))
            changes[name] = now[part] - before[part].to(now.device)
    return changes


def layer_norms(tensors: Weights) -> dict[str, float]:
    """{layer: Euclidean norm}; a layer is the tensors of one module."""
    squares = defaultdict(float)
    for name, tensor in tensors.items():
        squares[name.rpartition(".")[0]] += tensor.to(widest_float(tensor.device)).square().sum().item()
    return {layer: square**0.5 for layer, square in squares.items()}


def total_norm(layers: dict[str, float]) -> float:
    return sum(distance**2 for distance in layers.values()) ** 0.5
