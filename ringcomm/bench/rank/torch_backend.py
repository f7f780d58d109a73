"""ringcomm, through torch.distributed."""

from .gloo import TorchLibrary


def start(folder: str, _: str) -> TorchLibrary:
    return TorchLibrary("ringcomm", folder)
