"""Weights of GPT-2 and Llama in the format of Hugging Face's transformers, read and written on any grid.

A folder has `config.json`, and the weights in `model.safetensors` or in several files with an index. Queries, keys and
values are three matrices in Llama and thirds of one in GPT-2; here the key and value of a head are adjacent.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.errors import RingcommError, describe_error, refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.model.gpt import GPTStage
from ringcomm.parallel.sharding import (
    collect_shard_specs,
    full_shape,
    full_tensors,
    named_parameters,
    shard_of,
    tied_copies,
)
from ringcomm.parallel.state.host_memory import Folder
from ringcomm.pretrained.families import (
    Source,
    pretrained_config,
    read_json,
    settings_of,
    sources_of,
)

__all__ = ["load_pretrained", "save_pretrained"]

INDEX = "model.safetensors.index.json"


def load_pretrained(folder: Folder, chunks: Sequence[GPTStage], grid: Grid) -> None:
    """Load the weights in a folder into the stages of a model. All ranks of the grid call it.

    The stages are those of `gpt_stages`, with `pretrained_config(folder)` or another `context` and training options.
    Files are mapped into memory: a rank reads only the pages of its shards, which it converts to the dtype of its
    parameters. Load before you construct an object with masters, such as MixedPrecision. ::

        config = replace(pretrained_config(folder), sequence_parallel=True)
        chunks = gpt_stages(config, grid)
        load_pretrained(folder, chunks, grid)

    Raises:
        ArgumentError: the folder does not have the model of the stages. All ranks raise.
        RingcommError: safetensors is not installed, or a file cannot be read. All ranks raise; the model may be partly
            loaded.
    """
    with grid.raise_on_all(), torch.no_grad(), ExitStack() as stack:
        config, read = pretrained_config(folder), _reader(Path(folder), stack)
        theirs = settings_of(config)
        for chunk in chunks:
            ours = settings_of(replace(chunk.config, context=config.context))
            for key in theirs:
                if ours.get(key) != theirs[key]:
                    raise refuse(f"{key} of the stages", f"{theirs[key]}, as in {folder}", ours.get(key))
            specs, width = collect_shard_specs(chunk), config.hidden // config.heads
            for name, parameter in named_parameters(chunk):
                spec, sources = specs.get(name), sources_of(name, theirs["model_type"])
                length, *others = full_shape(parameter, spec)
                parts = [read(source, (length // len(sources), *others)) for source in sources]
                if spec:
                    spec = spec._replace(length=spec.length // len(sources))
                    parts = [shard_of(part, spec, grid.tp) for part in parts]
                parameter.copy_(_joined(parts, width))


def save_pretrained(folder: Folder, chunks: Sequence[GPTStage], grid: Grid) -> None:
    """Save a model to a folder, from which transformers' `from_pretrained` loads it. All ranks of the grid call it.

    Each pipeline rank of the first replica writes one file, in the dtype of the parameters. No tokenizer is saved.

    Communication: an all-gather of each sharded tensor over tp, in the first replica: a rank sends (t-1)/t of its
    bytes. The writing ranks hold all tensors of their stages in memory of the CPU.

    Raises:
        ArgumentError: the model is neither a GPT-2 nor a Llama, or the folder has weights. All ranks raise.
        RingcommError: safetensors is not installed, or a file cannot be written. All ranks raise.
    """
    folder = Path(folder)
    with grid.raise_on_all(), _file_errors(folder):
        safetensors, config = _safetensors(), chunks[0].config
        settings, width = settings_of(config), config.hidden // config.heads
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(folder.glob("*.safetensors*")):
            raise refuse("folder", "one without weights", f"one with {present[0]}")
        specs = {name: spec for chunk in chunks for name, spec in collect_shard_specs(chunk).items()}
        parameters: dict[str, Tensor] = {}
        for chunk in chunks:
            copies = tied_copies(chunk)
            parameters |= {name: each.detach() for name, each in named_parameters(chunk) if name not in copies}
        sources = {name: sources_of(name, settings["model_type"]) for name in parameters}
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    stages: list[Any] = [None] * grid.pp.size
    with grid.abort_on_error():
        for name, parameter in parameters.items() if grid.dp_cp.rank == 0 else ():
            full = full_tensors({name: parameter}, specs, grid.tp)[name]
            for source, part in zip(sources[name], _divided(full, len(sources[name]), width), strict=True):
                if grid.tp.rank == 0:
                    parts[source.tensor][source.part] = (part.T if source.transposed else part).cpu()
        tensors = {name: torch.cat([part for _, part in sorted(each.items())], -1) for name, each in parts.items()}
        dist.all_gather_object(stages, {name: x.nbytes for name, x in tensors.items()}, group=grid.pp.group)
    with grid.raise_on_all(), _file_errors(folder):
        files = [f"model-{rank:05}-of-{grid.pp.size:05}.safetensors" for rank in range(1, grid.pp.size + 1)]
        if tensors:
            safetensors.torch.save_file(tensors, folder / files[grid.pp.rank], {"format": "pt"})
        if grid.world.rank == 0:
            settings["torch_dtype"] = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
            total = {"total_size": sum(size for sizes in stages for size in sizes.values())}
            found = {name: file for file, sizes in zip(files, stages, strict=True) for name in sizes}
            (folder / "config.json").write_text(json.dumps(settings, indent=2))
            (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": found}, indent=2))


def _reader(folder: Path, stack: ExitStack) -> Callable[[Source, tuple[int, ...]], Tensor]:
    """Return a function that returns a source of a given shape, in memory mapped from its file.

    A file is opened once it is needed, and closed by `stack`.
    """
    safetensors, one_file = _safetensors(), "model.safetensors"

    @cache
    def opened(file: str) -> Any:
        with _file_errors(folder / file):
            return stack.enter_context(safetensors.safe_open(folder / file, "pt"))

    if (folder / one_file).exists():
        files = dict.fromkeys(opened(one_file).keys(), one_file)
    else:
        files = read_json(folder / INDEX)["weight_map"]

    def read(source: Source, shape: tuple[int, ...]) -> Tensor:
        name = source.tensor
        if name not in files:
            name = name.partition(".")[2]  # in a model that was saved without its head
        if name not in files:
            raise refuse(f"weights in {folder}", f"some with {source.tensor}", f"{len(files)} others")
        tensor: Tensor = opened(files[name]).get_tensor(name)
        stored = (source.parts * shape[0], *shape[1:])
        stored = stored[::-1] if source.transposed else stored
        if tensor.shape != stored:
            raise refuse(f"shape of {name} in {folder}", stored, tuple(tensor.shape))
        return (tensor.T if source.transposed else tensor).chunk(source.parts)[source.part]

    return read


def _joined(parts: list[Tensor], width: int) -> Tensor:
    """Return a parameter, given what its sources have: of two, `width` outputs of each alternate."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.reshape(-1, width, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


def _divided(parameter: Tensor, count: int, width: int) -> list[Tensor]:
    """Return what each of the sources of a parameter has: the inverse of `_joined`."""
    if count == 1:
        return [parameter]
    return [part.flatten(0, 1) for part in parameter.view(-1, count, width, *parameter.shape[1:]).unbind(1)]


def _safetensors() -> Any:
    try:
        import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise RingcommError("pretrained weights need safetensors: pip install 'ringcomm[safetensors]'") from None
    return import_module("safetensors")


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert errors of files to RingcommErrors."""
    try:
        yield
    except (OSError, _safetensors().SafetensorError) as error:
        raise RingcommError(f"{path}: {describe_error(error)}") from error
