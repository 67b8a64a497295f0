"""Peak memory of tensors, counted when operators return them."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the live storages that operators have returned, on any device; ``peak`` is their maximum, in bytes."""

    def __init__(self):
        super().__init__()
        self.storages, self.total, self.peak = {}, 0, 0  # total: of all in storages, freed or not

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        if self.total > self.peak:
            self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
            self.total = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.total)
        return result

    def _add(self, storage):
        ref, size = self.storages.get(storage._cdata, (None, 0))
        if ref is None or ref.expired():  # the address of a freed storage may be used again
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.total += storage.nbytes() - size
