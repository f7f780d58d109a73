"""ringcomm, through torch.distributed."""

from __future__ import annotations

from .gloo import TorchLibrary


def start(folder: str, _: str) -> TorchLibrary:
    return TorchLibrary("ringcomm", folder)
