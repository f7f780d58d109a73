"""Tensors of torch that say they are on the emulated GPU: a torch without CUDA has no others."""

import torch

from ringcomm.arrays.adapters import ADAPTERS, CODES, GPU_ARRAYS, TENSOR, TorchAdapter
from ringcomm.devices import emulated
from ringcomm.devices.contract import Pointer

__all__ = ["DeviceTensor", "install", "on_device"]


class DeviceTensor(torch.Tensor):
    is_cuda, is_cpu = True, False
    get_device = staticmethod(lambda: 0)
    __torch_function__ = torch._C._disabled_torch_function_impl


class HostFuture(torch.futures.Future):
    """A future of tensors on any device: those for GPUs need CUDA."""

    def __init__(self, *, devices=None):  # noqa: ARG002
        super().__init__()

    def __class_getitem__(cls, _):  # torch's own future is a generic class
        return cls


class DeviceTensorAdapter(TorchAdapter):
    def memory(self, x, writable):  # noqa: ARG002
        return Pointer(emulated.device, x.data_ptr()), x.numel(), CODES[x.dtype]


def on_device(tensor):
    return tensor.as_subclass(DeviceTensor)


def install(monkeypatch):
    """Let ringcomm take such tensors."""
    monkeypatch.setitem(ADAPTERS, DeviceTensor, DeviceTensorAdapter(torch))
    row = TENSOR, lambda _: emulated.device.stream().ptr, None
    monkeypatch.setitem(GPU_ARRAYS["emulated"], DeviceTensor, row)
    monkeypatch.setattr(emulated.EmulatedDevice, "blocking", False)
    monkeypatch.setattr(torch.futures, "Future", HostFuture)
