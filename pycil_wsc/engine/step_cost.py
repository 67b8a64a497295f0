"""What a training step costs in arithmetic, whatever the machine and however busy it is."""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class StepCost:
    """Floating-point operations per image of one phase's steps, counted once, in its first step.

    Forward and backward passes through convolutions and matrix products, teachers and frozen parts included; a multiplication
    and an addition are two.
    """

    per_image = None

    @property
    def unknown(self):
        return self.per_image is None

    @contextlib.contextmanager
    def measured(self, images):
        with FlopCounterMode(display=False) as counter:
            yield
        self.per_image = counter.get_total_flops() // images


class PeakBytes(TorchDispatchMode):
    """Within, the storages that operators return are counted for as long as they live: ``peak`` bytes at the most, on any device."""

    def __init__(self):
        super().__init__()
        self.storages, self.total, self.peak = {}, 0, 0  # total: of all that are listed, some of which may be gone

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        if self.total > self.peak:
            self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
            self.total = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.total)
        return result

    def _meet(self, storage):
        ref, size = self.storages.get(storage._cdata, (None, 0))
        if ref is None or ref.expired():  # the address may have been another's
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.total += storage.nbytes() - size
