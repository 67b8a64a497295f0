"""The most memory that tensors take at any time, counted where they are made."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operators return for as long as they live, on any device: ``peak`` bytes at most."""

    def __init__(self):
        super().__init__()
        self.storages, self.total, self.peak = {}, 0, 0  # total: of all listed, some of which may be freed

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
        if ref is None or ref.expired():  # the address may have been another's
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.total += storage.nbytes() - size
