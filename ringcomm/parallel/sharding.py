"""Which part of the full model this rank's parameters are.

A layer declares it in attributes. `shard_specs`, a dict, names its parameters that are sharded over the tensor axis,
each with a `ShardSpec`. `tied_copies`, a set, names copies of parameters that another stage counts. `expert_axes`, an
`ExpertAxes`, declares that the layer is an expert, which only some of the replicas have. All other parameters are
replicated over the tensor axis and the replicas. Names are those of the full model, so a parameter's name is unique
among the stages, except for tied copies. If a vocabulary is not a multiple of the axis, the last shard ends in zero
padding.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_gathered
from ringcomm.parallel.grid import Axis

__all__ = [
    "ExpertAxes",
    "Modules",
    "ShardSpec",
    "as_list",
    "clean_name",
    "collect_shard_specs",
    "counted_parameters",
    "expert_axes",
    "full_tensors",
    "local_part",
    "named_parameters",
    "named_shards",
    "tied_copies",
]


class ShardSpec(NamedTuple):
    """A sharded parameter: the dimension it is split along, and the length of that dimension in the full model."""

    dim: int
    length: int


class ExpertAxes(NamedTuple):
    """The axes of an expert: the ranks that hold the other experts of its layer, and those that hold the same ones."""

    ep: Axis
    edp: Axis


Modules = nn.Module | Iterable[nn.Module]


def as_list(chunks: Modules) -> list[nn.Module]:
    """Return the modules as a list; a single module, even a container, is one element."""
    return [chunks] if isinstance(chunks, nn.Module) else list(chunks)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their names, which are the same if the module is compiled."""
    for name, parameter in module.named_parameters():
        yield clean_name(name), parameter


class NamedShard(NamedTuple):
    """This rank's part of a parameter of the full model, which has its name there.

    `is_copy`: another stage has the tied original, and counts it.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec | None
    is_copy: bool


def named_shards(chunks: Modules) -> list[NamedShard]:
    """Return the parameters of the chunks, each once."""
    found: dict[nn.Parameter, NamedShard] = {}
    for chunk in as_list(chunks):
        specs, copies = collect_shard_specs(chunk), tied_copies(chunk)
        for name, parameter in named_parameters(chunk):
            shard = NamedShard(name, parameter, specs.get(name), name in copies)
            if found.setdefault(parameter, shard).is_copy:
                found[parameter] = shard  # the original, if this rank has both
    return list(found.values())


def collect_shard_specs(module: nn.Module) -> dict[str, ShardSpec]:
    """Return the specs of the sharded parameters of a module, by full name."""
    declared = _declared(module, "shard_specs", dict)
    return {clean_name(f"{prefix}.{name}"): spec for prefix, _, specs in declared for name, spec in specs.items()}


def tied_copies(module: nn.Module) -> set[str]:
    """Return the full names of the parameters of a module that another stage counts."""
    return {clean_name(f"{prefix}.{x}") for prefix, _, names in _declared(module, "tied_copies", set) for x in names}


def expert_axes(chunks: Modules) -> dict[torch.Tensor, ExpertAxes]:
    """Return the parameters and buffers of experts, each with its axes."""
    experts = (each for chunk in as_list(chunks) for each in _declared(chunk, "expert_axes", ExpertAxes))
    return {x: axes for _, layer, axes in experts for x in (*layer.parameters(), *layer.buffers())}


def _declared(module: nn.Module, attribute: str, kind: type) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the layers with an attribute of a kind, which it might not be in another library, their names before."""
    for prefix, layer in module.named_modules():
        if isinstance(value := getattr(layer, attribute, None), kind):
            yield prefix, layer, value


def counted_parameters(chunks: Modules, tp: Axis) -> set[nn.Parameter]:
    """Return the parameters this rank counts, so that together the ranks of a model count each element once.

    The experts of a layer are divided among several replicas, each of which counts its own.
    """
    shards = [each for each in named_shards(chunks) if not each.is_copy]
    return {each.parameter for each in shards if each.spec or tp.rank == 0}


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "").lstrip(".")


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def shard_of(full: torch.Tensor, spec: ShardSpec, tp: Axis) -> torch.Tensor:
    """Return this rank's shard of a full tensor, padded with zeros to the length of the others."""
    if full.shape[spec.dim] != spec.length:
        raise refuse(f"dimension {spec.dim} of the full tensor", spec.length, full.shape[spec.dim])
    length = -(-spec.length // tp.size)
    start = min(tp.rank * length, spec.length)
    return _padded(full.narrow(spec.dim, start, min(length, spec.length - start)), spec.dim, length)


def _padded(local: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    if local.shape[dim] == length:
        return local
    padded = local.new_zeros(*local.shape[:dim], length, *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded


def as_dtensor(x: torch.Tensor, spec: ShardSpec | None, tp: Axis) -> torch.Tensor:
    """Return a shard as a DTensor over the axis, without padding, in the same memory; a replicated tensor as it is."""
    if spec is None or tp.size == 1:
        return x
    length, full = x.shape[spec.dim], full_shape(x, spec)
    start = min(tp.rank * length, spec.length)
    local = x.narrow(spec.dim, 0, min(length, spec.length - start))
    mesh = DeviceMesh.from_group(tp.group, x.device.type, mesh_dim_names=(tp.name,))
    stride = torch.empty(full, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(spec.dim)], shape=full, stride=stride)


def as_shard(x: torch.Tensor, spec: ShardSpec, tp: Axis) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or of a full tensor; any other tensor as it is.

    Communication: none if the DTensor is sharded as in `as_dtensor`, otherwise an all-gather.
    """
    length = -(-spec.length // tp.size)
    if isinstance(x, DTensor):
        if x.placements == (Shard(spec.dim),) and x.device_mesh.mesh.tolist() == [*tp.ranks]:
            return _padded(x.to_local(), spec.dim, length)
        x = x.full_tensor()
    return shard_of(x, spec, tp) if x.shape[spec.dim] == spec.length else x


def full_tensors(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ShardSpec], tp: Axis
) -> dict[str, torch.Tensor]:
    """Gather the full tensors of local ones, on every rank of the axis.

    All ranks pass the same names. Each rank sends (t-1)/t of the bytes of every sharded tensor.
    """

    def gathered(x: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        return all_gathered(x, tp, spec.dim).narrow(spec.dim, 0, spec.length)

    return {name: gathered(x, specs[name]) if name in specs else x for name, x in tensors.items()}


def full_shape(x: torch.Tensor, spec: ShardSpec | None) -> torch.Size:
    """Return the shape of the full tensor of a local one."""
    shape = list(x.shape)
    if spec:
        shape[spec.dim] = spec.length
    return torch.Size(shape)
