from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import widest_float
from pycil_wsc.registry import register_analysis
from pycil_wsc.studies.observer import Observer, Record

Part = tuple[list[Tensor], int]  # the sums over images for each layer, and the number of images
RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)


@register_analysis("dormant")
class Dormant(Observer):
    """The fraction of dormant units after a task (Sokar et al., 2023).

    A unit is dormant if its mean activation is at most ``threshold`` times its layer's mean. A layer is one application
    of ReLU, in the order of the forward pass; a unit is one of its channels. Means are over ``samples`` of the task's
    samples and the exemplars. The record's ``share`` is over all ``units``; ``layers`` has the fraction of each layer.
    """

    threshold = 0.025
    samples = 2000

    def task_trained(self, task: Task) -> Record:
        processes = self.learner.processes
        batches = self.shared_batches(self.sample(task, self.samples))
        layers = mean_activations(
            self.learner.predict,
            (images for images, _ in batches),
            lambda part: processes.gather([part], processes.count),
        )
        dormant = [units <= self.threshold * units.mean() for units in layers]
        number = sum(len(units) for units in layers)
        share = sum(units.sum().item() for units in dormant) / number if number else None
        return {
            "threshold": self.threshold,
            "units": number,
            "share": share,
            "layers": [units.double().mean().item() for units in dormant],
        }


@torch.no_grad()
def mean_activations(
    network: Callable[[Tensor], object],
    batches: Iterable[Tensor],
    gathered: Callable[[Part], list[Part]] = lambda part: [part],
) -> list[Tensor]:
    """The mean output of each channel, float64 (channels,), for each application of ReLU in ``network``.

    ``gathered`` returns the parts of all processes, given this one's. A process may have no batches.
    """
    totals = []
    images_seen = 0
    for images in batches:
        with Activations() as activations:
            network(images)
        totals = [total + sums for total, sums in zip(totals, activations.sums)] if totals else activations.sums
        images_seen += len(images)
    parts = gathered(([total.cpu() for total in totals], images_seen))
    images_seen = sum(images for _, images in parts)
    zero = torch.zeros((), dtype=torch.float64)
    return [sum(sums, zero) / images_seen for sums in zip(*(totals for totals, _ in parts if totals), strict=True)]


class Activations(TorchDispatchMode):
    """Collects the outputs of every application of ReLU: each channel's spatial mean, summed over the batch."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def __torch_dispatch__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = function(*args, **(kwargs or {}))
        if function in RELU:
            wide = output.to(widest_float(output.device))
            if output.dim() == 3:  # (B, tokens, channels), of a transformer
                wide = wide.mean(1)
            elif output.dim() > 3:
                wide = wide.flatten(2).mean(2)
            self.sums.append(wide.sum(0))
        return output
