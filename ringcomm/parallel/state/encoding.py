"""Values of a checkpoint that are no tensors, as tensors: a number as a scalar, a dict as the bytes of its file."""

from collections.abc import Mapping
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ringcomm.errors import refuse

__all__ = ["Extra", "decode", "encode"]

Extra = float | Mapping[str, Any]


def encode(name: str, value: Extra) -> Tensor:
    """Return a value as a tensor. Raises ArgumentError, with the name, if `decode` could not return it."""
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if not isinstance(value, Mapping):
        raise refuse(name, "an int, a float or a dict", type(value).__name__)
    file = BytesIO()
    torch.save(dict(value), file)
    found = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    try:
        decode(found)
    except UnpicklingError as error:
        raise refuse(name, "numbers, strings, tensors, lists and dicts", error) from error
    return found


def decode(value: Tensor) -> Any:
    return torch.load(BytesIO(value.numpy().tobytes()), weights_only=True) if value.dim() else value.item()
