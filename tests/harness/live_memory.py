"""Count the bytes of live tensors: the memory of a computation, the same in every run and on every machine."""

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside the block, follows the memory of the tensors that operations of this thread return, until it is freed.

    Memory that several tensors share counts once; what a kernel allocates for itself is not seen.

    Attributes:
        peak: most bytes after any operation; may be set
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._sizes = weakref.WeakKeyDictionary()  # of storages, when an operation last returned them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operations on its local tensor, which come here
        out, grown = func(*args, **(kwargs or {})), False
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                if self._sizes.get(storage) != storage.nbytes():
                    self._sizes[storage], grown = storage.nbytes(), True
        if grown:  # to count all after each operation would take longer than most operations
            self.peak = max(self.peak, self.bytes)
        return out

    @property
    def bytes(self):
        """Bytes that are live now, except those in files."""
        return sum(storage.nbytes() for storage in self._sizes if storage.filename is None)

    @property
    def file_bytes(self):
        """Bytes of files that are mapped now."""
        return sum(storage.nbytes() for storage in self._sizes if storage.filename is not None)
