"""Keeps torch.compile out of the backend: a call is a graph break, as with a backend in C++."""

from types import FunctionType
from typing import TypeVar

import torch

__all__ = ["untraced"]

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Let torch.compile neither inline the functions of a class nor compile what they call. Costs nothing per call.

    torch.compiler.disable would wrap each function, and import the compiler.
    """
    evaluation = torch._C._dynamo.eval_frame
    for function in vars(cls).values():
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by torch
            if hasattr(evaluation, "set_code_exec_strategy"):
                skip = evaluation._FrameAction.SKIP
                strategy = evaluation._FrameExecStrategy(skip, skip)  # of the frame, and of those that it calls
                evaluation.set_code_exec_strategy(function.__code__, strategy)
    return cls
