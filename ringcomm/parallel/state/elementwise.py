"""Whether an optimizer updates each element by itself, so that it can update a parameter piece by piece."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import describe_error, refuse
from ringcomm.parallel.state.optimizers import optimized

__all__ = ["VECTOR", "check_elementwise"]

# Elements: pieces begin at multiples. Fused optimizers round the rest of a vector differently, and so may matrix
# products at addresses that are not multiples of 64 bytes, as those of torch are.
VECTOR = 64
SHAPE, HALF = (16, 16), 128  # of a matrix, and the elements of its first half


def check_elementwise(what: str, factory: Callable[[Any], Optimizer], device: torch.device) -> None:
    """Raise ArgumentError if an optimizer updates half of a matrix in another way than it does in the whole matrix.

    Adafactor, Muon and LAMB do; a step of LBFGS or SparseAdam raises. An optimizer that cannot be created for a matrix
    is accepted: `factory` may depend on the parameters; and so is one that updates equal matrices differently, with
    random numbers. `factory` is called three times; the random numbers of torch are afterwards those that they would
    have been without.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        refused = _refused(factory, device)
    if refused:
        raise refuse(what, "one that updates each element by itself, as AdamW does", refused)


def _refused(factory: Callable[[Any], Optimizer], device: torch.device) -> str | None:
    """Return the name of an optimizer that does not update each element by itself, and its error, else None."""
    whole, again, half = matrices = [_matrix(device) for _ in range(3)]
    try:
        of_whole, of_again, of_half = optimizers = [factory([each]) for each in matrices]
        if [x for each in optimizers for x in optimized(each)] != matrices:
            return None
    except Exception:
        return None
    name = type(of_half).__name__
    try:
        expected = _update(of_whole, whole)
        if not torch.equal(expected, _update(of_again, again)):
            return None
        _cut(of_half, half)
        found = _update(of_half, half)
    except Exception as error:  # Muon takes matrices only, LBFGS a closure, SparseAdam sparse gradients
        return f"{name}, which raised {describe_error(error)}"
    tolerance = 1e-3 * float(expected[:HALF].abs().max())
    return None if torch.allclose(found, expected[:HALF], rtol=0, atol=tolerance) else name


def _matrix(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 2, 2 * HALF, dtype=torch.float32, device=device).view(SHAPE))


def _cut(optimizer: Optimizer, matrix: nn.Parameter) -> None:
    """Leave an optimizer the first half of a matrix, flat, and the states that it already has for it."""
    matrix.data = matrix.detach().reshape(-1)[:HALF]
    state = optimizer.state.get(matrix, {})
    state.update({key: x.reshape(-1)[:HALF] for key, x in state.items() if isinstance(x, Tensor) and x.dim()})


def _update(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """Return by how much two steps with given gradients move a parameter."""
    before = parameter.detach().clone()
    for step in range(2):
        count = torch.arange(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        parameter.grad = (count * (step + 1)).sin().view(parameter.shape)
        optimizer.step()
    return (parameter.detach() - before).view(-1)
