"""The backward of a stage in two parts: first the gradient of its input, later those of its weights.

Autograd computes only the gradients it is asked for. The first part asks for that of the input, and records the
incoming gradients of each node of the graph that also leads to weights. The second part runs these nodes again, for
their weights only: a linear layer computes grad · weight in the first part, and gradᵀ · input in the second. The node
of a torch.autograd.Function computes all its gradients at once. It runs once, and the first part records the gradients
that it passes on towards weights.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["backward_input"]

Gradients = tuple[Tensor | None, ...]


def backward_input(output: GradientEdge, x: Tensor, grad: Tensor | None) -> tuple[Tensor | None, Callable[[], None]]:
    """Return the gradient of a stage's input, and a function that adds those of the weights to their `grad`.

    All gradients have the bits of one backward. What autograd saved stays in memory until the function has run, except
    after the last weights, as in a loss.

    If the input needs no gradient, as that of the first stage of a model, the function runs the whole backward. The
    gradient of a weight that is used more than once is computed in the first part.

    Args:
        output: where backward begins
        x: the input, a leaf
        grad: gradient of the output; None for a loss
    """
    if not x.requires_grad:
        return None, partial(torch.autograd.backward, [output], [grad])
    path = _nodes_between(output.node, get_gradient_edge(x).node)
    weights = {node: _weights(node, path) for node in path}
    uses = Counter(weight for found in weights.values() for weight in found)
    reused = [weight for weight, count in uses.items() if count > 1]
    recorded: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = []

    def record(node: Any, own: list[Tensor], grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        if isinstance(node, BackwardCFunction):
            found = [
                (GradientEdge(child, index), each)
                for (child, index), each in zip(node.next_functions, grad_inputs, strict=True)
                if child not in path and each is not None
            ]
        else:
            found = [(GradientEdge(node, i), each) for i, each in enumerate(grad_outputs) if each is not None]
        recorded.append(([edge for edge, _ in found], [each for _, each in found], own))

    hooks = []
    for node, found in weights.items():
        if own := [weight for weight in found if uses[weight] == 1]:
            hooks.append(node.register_hook(partial(record, node, own)))
    try:
        arguments = {"retain_graph": True, "allow_unused": True}
        grad_x, *grads = torch.autograd.grad([output], [x, *reused], [grad], **arguments)
    finally:
        for hook in hooks:
            hook.remove()

    def backward_weight() -> None:
        for edges, incoming, own in recorded:
            torch.autograd.backward(edges, incoming, inputs=own)
        used = [(weight, each) for weight, each in zip(reused, grads, strict=True) if each is not None]
        torch.autograd.backward([weight for weight, _ in used], [each for _, each in used])

    return grad_x, backward_weight


def _nodes_between(output: Node, x: Node) -> set[Node]:
    """Return the nodes through which the gradient of the output reaches the input, with both."""
    users = defaultdict(list)
    for node in _reached([output], _children):
        for child in _children(node):
            users[child].append(node)
    return set(_reached([x], lambda node: users[node]))


def _weights(node: Node, path: set[Node]) -> list[Tensor]:
    """Return the leaves that the gradients of a node reach outside the path."""
    below = _reached([child for child in _children(node) if child not in path], _children)
    return [each.variable for each in below if hasattr(each, "variable")]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child]


def _reached(nodes: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return these nodes and all that follow, each once."""
    found = list(dict.fromkeys(nodes))
    seen = set(found)
    for node in found:  # which grows
        new = [each for each in following(node) if each not in seen]
        seen.update(new)
        found.extend(dict.fromkeys(new))
    return found
