"""Parameters whose values are being gathered: whatever uses them first waits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["mark_gathered", "mark_gathering"]

# What torch may ask of a parameter without its values. Everything else waits.
GRAD: Any = Tensor.grad  # to mypy a tensor, not the descriptor
WITHOUT_VALUES = {
    *(GRAD.__get__, GRAD.__set__),
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "requires_grad", "shape")),
    *(Tensor.dim, Tensor.element_size, Tensor.numel),
}


def mark_gathering(parameters: Iterable[Tensor], finish: Callable[[], None]) -> None:
    """Let the next use of these parameters, reads and writes alike, call `finish` first; it calls `mark_gathered`.

    They change their class, not their identity. Those of a class of their own cannot: then `finish` is called at once.
    """
    parameters = list(parameters)
    for each in _of_class(nn.Parameter, parameters):
        each.__class__, each._finish = _GatheringParameter, finish
    if len(_of_class(_GatheringParameter, parameters)) < len(parameters):
        finish()


def mark_gathered(parameters: Iterable[Tensor]) -> None:
    """Make these parameters ordinary ones again."""
    for each in _of_class(_GatheringParameter, parameters):
        each.__class__ = nn.Parameter
        del each._finish


def _of_class(cls: type, parameters: Iterable[Tensor]) -> list[Any]:
    return [each for each in parameters if type(each) is cls]


class _GatheringParameter(nn.Parameter):
    _finish: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in WITHOUT_VALUES:
            for x in tree_leaves((args, kwargs)):
                if type(x) is cls:
                    x._finish()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # These two would name the class of the copy before they read the values.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self._finish()
        copy: nn.Parameter = self.__deepcopy__(memo)  # of the class that it has now
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._finish()
        return self.__reduce_ex__(protocol)
