"""Models that Hugging Face's transformers has sharded, on local tensors: for inference without DTensors.

`from_pretrained` with a tensor-parallel plan makes parameters DTensors, and replaces the forward of
a sharded module by one of a *style*. In every call that swaps the parameters for local tensors, or turns inputs and
outputs into DTensors and back. Here a style is replaced once by the arithmetic on this rank's shard, and the sum or
gather that it needs.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.errors import refuse
from ringcomm.torch.direct import Function, in_place_sum, packed_linear, packs

__all__ = ["local_tensors"]

TESTED = "5.24"  # the version of transformers in whose modules this looks for styles

Model = TypeVar("Model", bound=nn.Module)
Layer = Callable[
    [Any, dist.ProcessGroup], Function
]  # a module, whose parameters are local, and its group → its forward


def local_tensors(model: Model) -> Model:
    """Turn a model that transformers has sharded with a `tp_plan` into local tensors and direct calls, for inference.

    All ranks call this; nothing is sent. The model changes in place: its parameters become this rank's shards, without
    gradients. Where `packed_linear` packs the weight of a linear layer, the layer has no `weight` any more: outputs
    have the same bits in bfloat16 on CPUs with AVX512-BF16 or AMX, but for tiny products, and may be rounded otherwise
    elsewhere and in float32. So the model can be neither trained nor converted nor saved:
    `save_pretrained` raises. ::

        dist.init_process_group("ringcomm")
        plan = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=plan)
        ringcomm.torch.local_tensors(model).generate(ids)

    Communication of the model: as before, an all-reduce for each rowwise layer and embedding, and an all-gather for
    the output layer.

    Args:
        model: one whose `nn.Linear` have the styles "colwise", "colwise_gather_output", "rowwise" and "replicate", and
            its `nn.Embedding` "embedding_rowwise" or "replicate", as Llama, Mistral and Qwen3

    Returns:
        The same model; unchanged if nothing is sharded over several ranks, or the model is on local tensors already.

    Raises:
        ArgumentError: the model has another style, or is sharded otherwise. It has not changed.
    """
    from torch.distributed.tensor import DTensor  # imports much of torch

    if vars(model).get("save_pretrained") is _refuse_to_save:
        return model
    styles = {name: (module, *found) for name, module in model.named_modules() if (found := _style_of(module))}
    if not styles and (getattr(model, "_tp_size", None) or 1) > 1:
        expected, got = f"one that transformers {TESTED} has sharded", f"one of transformers {version('transformers')}"
        raise refuse("model", expected, got)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and name.rpartition(".")[0] not in styles:
            raise refuse(f"{name} of the model", "a tensor, or a DTensor of a tp_plan", "another DTensor")
    if not styles:
        return model
    layers = [(each[0], each[2].get_group(), _layer(name, *each)) for name, each in styles.items()]
    local: dict[Any, nn.Parameter] = {}  # so that tied weights stay tied
    for module, *_ in layers:
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                shard = local.setdefault(parameter, nn.Parameter(parameter.to_local()))
                module.register_parameter(name, shard)
    model.requires_grad_(False)
    for module, group, layer in layers:
        del module.forward  # the style's, which has hidden that of the class
        if layer:
            module.forward = layer(module, group)
    for module, _, layer in layers:
        if layer and isinstance(module, nn.Linear) and packs(module.weight):
            module.register_parameter("weight", None)  # packed, and read nowhere else; a tied embedding keeps its own
    for each in model.modules():
        if hasattr(each, "save_pretrained"):
            each.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    return model


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise refuse(
        "model of save_pretrained", "one with whole weights", "one on local_tensors, which are a rank's shards"
    )


def _style_of(module: nn.Module) -> tuple[Any, Any] | None:
    """Return the style of a module, and the mesh on which it is sharded: its forward is a closure with both."""
    forward = vars(module).get("forward")
    kept = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    return (kept["self"], kept["mesh"]) if {"self", "mesh", "original_forward"} <= kept.keys() else None


def _layer(name: str, module: nn.Module, style: Any, mesh: Any) -> Layer | None:
    """Return what makes the forward of a module with a style; None: its parameters are replicated.

    Raises:
        ArgumentError: the style, or the module, is not known; or outputs that are gathered have uneven shards.
    """
    from torch.distributed.tensor import Replicate, Shard

    kind = type(style).__name__
    layouts = [getattr(style, each, None) for each in ("input_layouts", "output_layouts", "shard_dim")]
    known: list[tuple[type, str, list[Any], Layer | None]] = [
        (nn.Linear, "ColwiseParallel", [Replicate(), Shard(-1), None], _column),
        (nn.Linear, "ColwiseParallel", [Replicate(), Replicate(), None], _gathered_column),
        (nn.Linear, "RowwiseParallel", [Shard(-1), Replicate(), None], _row),
        (nn.Embedding, "EmbeddingParallel", [None, None, 0], _embedding),
        (type(module), "TensorParallelLayer", [None, None, None], None),
    ]
    for of, its_kind, its_layouts, layer in known:
        if type(module) is of and kind == its_kind and layouts == its_layouts and _is_plain(module, style, layer):
            if layer is _gathered_column and module.out_features % mesh.size():
                raise refuse(f"out_features of {name}", f"a multiple of the {mesh.size()} ranks", module.out_features)
            return layer
    expected = "a whole nn.Linear or nn.Embedding with a style that local_tensors knows"
    raise refuse(f"{name} of the model", expected, f"{kind} on a {type(module).__name__}")


def _is_plain(module: Any, style: Any, layer: Layer | None) -> bool:
    """Return whether nothing about a module is special: quantized weights, outputs that are DTensors."""
    if getattr(module, "_hf_quantized_needs_local_tp", False) or not getattr(style, "use_local_output", True):
        return False
    return layer is not _embedding or module.max_norm is None


def _column(module: nn.Linear, _: dist.ProcessGroup) -> Function:
    return packed_linear(module.weight, module.bias)


def _gathered_column(module: nn.Linear, group: dist.ProcessGroup) -> Function:
    linear, size = packed_linear(module.weight, module.bias), dist.get_world_size(group)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        parts = y.new_empty(size, *y.shape)
        dist.all_gather([*parts], y, group=group)
        return parts.movedim(0, -2).flatten(-2)

    return forward


def _row(module: nn.Linear, group: dist.ProcessGroup) -> Function:
    linear, bias, sum_in_place = packed_linear(module.weight), module.bias, in_place_sum(group, module.weight.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        sum_in_place(y)
        return y if bias is None else y + bias

    return forward


def _embedding(module: nn.Embedding, group: dist.ProcessGroup) -> Function:
    weight, sum_in_place = module.weight, in_place_sum(group, module.weight.device)
    first = dist.get_rank(group) * -(-module.num_embeddings // dist.get_world_size(group))

    def forward(ids: torch.Tensor) -> torch.Tensor:
        here = ids - first
        elsewhere = (here < 0) | (here >= len(weight))
        x = F.embedding(here.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        sum_in_place(x)
        return x

    return forward
