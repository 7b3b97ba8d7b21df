"""Measures the peak memory of tensors without computing or allocating anything."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of live tensors on the device "meta" that are made in its context; ``peak`` is the maximum."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if is_meta(tensor)}
        for tensor in filter(is_meta, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:  # otherwise a view, or written in place
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def is_meta(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
