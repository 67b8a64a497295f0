"""The forward and backward pass of a step as a CUDA graph: recorded once per phase, then launched as one."""

import logging

import torch


class Passes:
    """(images, targets) -> (loss, number classified right), both on the device; gradients are in ``p.grad`` afterwards."""

    def __init__(self, compute, optimizer):
        self.compute, self.optimizer = compute, optimizer

    def __call__(self, images, targets):
        loss, logits = self.compute(images, targets)
        loss.backward()
        return loss.detach(), (logits.detach().argmax(1) == targets).sum()

    def clear(self):
        """Before the next step's passes."""
        self.optimizer.zero_grad(set_to_none=True)


class RecordedPasses(Passes):
    """The same, replayed: for batches of the first one's size, after ``eager`` of them in which the libraries choose their algorithms.

    What is recorded reads its input from two buffers and leaves loss, count and gradients in others: they are good until the next call.
    A loss that waits for the device cannot be recorded: then every step is computed as usual, and the log says so.

    ``record``: a function without arguments -> a function that does the same again, and has not been done yet.
    """

    eager = 3

    def __init__(self, compute, optimizer, parameters, record=None):
        super().__init__(compute, optimizer)
        self.parameters, self.record = list(parameters), record or cuda_graph
        self.steps, self.replay, self.size = 0, None, None

    def __call__(self, images, targets):
        self.size = self.size or len(images)
        if len(images) != self.size or not self.record:
            return super().__call__(images, targets)
        self.steps += 1
        if self.steps <= self.eager:
            return super().__call__(images, targets)
        if not self.replay and not self._record(images, targets):
            return super().__call__(images, targets)
        self.images.copy_(images)
        self.targets.copy_(targets)
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        self.replay()
        return self.loss, self.right

    def _record(self, images, targets):
        self.images, self.targets = images.clone(), targets.clone()
        self.clear()
        try:
            self.replay = self.record(self._passes)
        except RuntimeError as error:
            logging.getLogger("pycil_wsc").warning("cuda_graph: the loss cannot be recorded, so every step is launched as usual (%s)", str(error).splitlines()[0])
            self.record = None
            self.clear()
            return False
        self.gradients = [parameter.grad for parameter in self.parameters]
        return True

    def _passes(self):
        self.loss, self.right = super().__call__(self.images, self.targets)


def cuda_graph(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
