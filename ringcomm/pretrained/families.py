"""How Hugging Face's transformers describes GPT-2 and Llama: config.json, and the names of their layers."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from ringcomm.errors import describe_error, refuse, unknown
from ringcomm.parallel.model.gpt import GPTConfig
from ringcomm.parallel.state.host_memory import Folder

__all__ = ["Source", "pretrained_config", "read_json", "settings_of", "sources_of"]

gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "gelu": F.gelu, "relu": F.relu, "silu": F.silu,
}  # fmt: skip


class Family(NamedTuple):
    """The models of one `model_type`."""

    architecture: str
    block: str  # prefix of the layers of block {}
    layers: Mapping[str, str]  # theirs, for each of ours; x:1 is the second third of the outputs of x
    fields: Mapping[str, str]  # of GPTConfig, by key of config.json
    defaults: Mapping[str, Any]  # of fields
    only: Mapping[str, Any]  # keys that must be absent or have this value


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", "transformer.h.{}.",
        {
            "embedding": "transformer.wte", "positions": "transformer.wpe", "norm_1": "ln_1", "norm_2": "ln_2",
            "attention.query": "attn.c_attn:0", "attention.key_value": "attn.c_attn:1 attn.c_attn:2",
            "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
            "norm": "transformer.ln_f", "head": "lm_head",
        },
        {
            "vocab_size": "vocab_size", "n_positions": "context", "n_layer": "layers", "n_embd": "hidden",
            "n_head": "heads", "n_inner": "inner", "activation_function": "activation", "layer_norm_epsilon": "eps",
            "tie_word_embeddings": "tied",
        },
        {"activation": "gelu_new"},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": Family(
        "LlamaForCausalLM", "model.layers.{}.",
        {
            "embedding": "model.embed_tokens", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
            "attention.query": "self_attn.q_proj", "attention.key_value": "self_attn.k_proj self_attn.v_proj",
            "attention.out": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj", "norm": "model.norm", "head": "lm_head",
        },
        {
            "vocab_size": "vocab_size", "max_position_embeddings": "context", "num_hidden_layers": "layers",
            "hidden_size": "hidden", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
            "intermediate_size": "inner", "hidden_act": "activation", "attention_bias": "bias", "mlp_bias": "bias",
            "rms_norm_eps": "eps", "rope_theta": "rotary_base", "tie_word_embeddings": "tied",
        },
        {
            "gated": True, "rms_norm": True, "activation": "silu", "bias": False, "eps": 1e-6, "rotary_base": 10_000.0,
            "tied": False,
        },
        {"rope_type": "default", "type": "default"},
    ),
}  # fmt: skip


class Source(NamedTuple):
    """Where outputs of one of our layers are in the files: in part `part` of `parts` equal parts of a tensor.

    The tensor is (out, in), or (in, out) if it is `transposed`, as in the class Conv1D of GPT-2.
    """

    tensor: str
    part: int
    parts: int
    transposed: bool


def sources_of(name: str, model_type: str) -> list[Source]:
    """Return where a parameter is in the files; of two sources, the outputs for each head alternate.

    Raises:
        ArgumentError: models of this type have no such parameter.
    """
    family = FAMILIES[model_type]
    block, layer, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", name).groups()  # type: ignore[union-attr]  # every name has this form
    if layer not in family.layers:
        raise refuse("parameters", f"those of a {model_type}", name)
    prefix = "" if block is None else family.block.format(block)
    found = []
    for source in family.layers[layer].split():
        there, colon, third = source.partition(":")
        transposed = kind == "weight" and ".c_" in there
        found.append(Source(f"{prefix}{there}.{kind}", int(third or 0), 3 if colon else 1, transposed))
    return found


def pretrained_config(folder: Folder) -> GPTConfig:
    """Return the configuration of the model in a folder of transformers, with dropout 0.

    Raises:
        ArgumentError: the folder has no config.json, or that of a model which GPTConfig does not describe.
    """
    path = Path(folder, "config.json")
    settings = read_json(path)
    settings |= settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        raise refuse(f"model_type in {path}", " or ".join(FAMILIES), model_type)
    family = FAMILIES[model_type]
    values = dict(family.defaults)
    values |= {field: settings[key] for key, field in family.fields.items() if key in settings}
    if values["activation"] not in ACTIVATIONS:
        raise unknown(f"activation in {path}", values["activation"], ACTIVATIONS)
    try:
        config = GPTConfig(**{**values, "activation": ACTIVATIONS[values["activation"]]})
    except TypeError as error:  # names the fields that are missing
        raise refuse(str(path), f"the settings of a {model_type}", error) from error
    same = {key: values[field] for key, field in family.fields.items() if field in values}
    for key, value in {**family.only, **same, "head_dim": config.hidden // config.heads}.items():
        if settings.get(key, value) not in (value, None):
            raise refuse(f"{key} in {path}", value, settings[key])
    return config


def settings_of(config: GPTConfig) -> dict[str, Any]:
    """Return what config.json says of a configuration, without its training options.

    Raises:
        ArgumentError: neither a GPT-2 nor a Llama has it.
    """
    llama = config.gated and config.rms_norm and config.rotary_base
    gpt2 = config.bias and not (config.gated or config.rms_norm or config.rotary_base)
    if config.experts or not (llama or (gpt2 and config.kv_heads in (None, config.heads))):
        raise refuse("config", "that of a GPT-2 or a Llama", config)
    model_type = "llama" if llama else "gpt2"
    x = torch.linspace(-3, 3, 7)  # functions that `partial` has made are never equal
    names = [name for name, known in ACTIVATIONS.items() if torch.equal(known(x), config.activation(x))]
    if not names:
        raise refuse("activation", " or ".join(ACTIVATIONS), config.activation)
    values = {**vars(config), "activation": names[0], "inner": config.inner or 4 * config.hidden}
    values["kv_heads"] = config.kv_heads or config.heads
    family = FAMILIES[model_type]
    known = {"model_type": model_type, "architectures": [family.architecture]}
    return known | {key: values[field] for key, field in family.fields.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a file in JSON; raise ArgumentError if there is none."""
    try:
        contents: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refuse("folder", f"one with {path.name}", f"{path.parent} ({describe_error(error)})") from error
    return contents
