"""Shared by tests of pretrained weights: tiny models in files of transformers, and the logits of their formulas."""

import json
import math

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

B, S, VOCAB, H, HEADS, LAYERS, INNER = 2, 6, 37, 16, 4, 4, 24  # 37 is padded if sharded
IDS = torch.arange(B * S).view(B, S) * 5 % VOCAB
NAMES = {"vocab_size": VOCAB, "architectures": ["…"], "transformers_version": "5.24.0"}
GPT2 = {
    **NAMES, "model_type": "gpt2", "n_positions": 8, "n_layer": LAYERS, "n_embd": H, "n_head": HEADS,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.1, "scale_attn_weights": True,
}  # fmt: skip
LLAMA = {
    **NAMES, "model_type": "llama", "max_position_embeddings": 8, "num_hidden_layers": LAYERS, "hidden_size": H,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": INNER, "hidden_act": "silu",
    "rms_norm_eps": 1e-3, "head_dim": H // HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip


# --- The formulas, with weights by the names of transformers ----------------------------------------------------------


def attended(query, key, value):
    """Attend causally, head by head."""
    heads = [x.unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for x in (query, key, value)]
    query, key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in heads)
    scores = query @ key.transpose(2, 3) / math.sqrt(H // HEADS)
    scores = scores + torch.full((S, S), float("-inf"), dtype=scores.dtype).triu(1)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def gpt2(weights, ids):
    def layer(name, x):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (H,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-3)

    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:S]
    for block in (f"transformer.h.{number}" for number in range(LAYERS)):
        attention = layer(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x)).split(H, -1)
        x = x + layer(f"{block}.attn.c_proj", attended(*attention))
        inner = F.gelu(layer(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)), approximate="tanh")
        x = x + layer(f"{block}.mlp.c_proj", inner)
    output = weights.get("lm_head.weight", weights["transformer.wte.weight"])
    return norm("transformer.ln_f", x) @ output.T


def llama(weights, ids):
    def layer(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, x):
        return F.rms_norm(x, (H,), weights[f"{name}.weight"], 1e-3)

    def turned(x):
        width = H // HEADS
        angles = torch.arange(S)[:, None] * 500.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.cat([angles, angles], -1)[:, None]
        x = x.unflatten(-1, (-1, width))
        other = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return (x * angles.cos() + other * angles.sin()).flatten(-2)

    x = weights["model.embed_tokens.weight"][ids]
    for block in (f"model.layers.{number}" for number in range(LAYERS)):
        y = norm(f"{block}.input_layernorm", x)
        query, key, value = (layer(f"{block}.self_attn.{each}_proj", y) for each in "qkv")
        x = x + layer(f"{block}.self_attn.o_proj", attended(turned(query), turned(key), value))
        y = norm(f"{block}.post_attention_layernorm", x)
        gate, up = (layer(f"{block}.mlp.{each}_proj", y) for each in ("gate", "up"))
        x = x + layer(f"{block}.mlp.down_proj", F.silu(gate) * up)
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm("model.norm", x) @ output.T


FORMULAS = {"gpt2": gpt2, "llama": llama}


def drawn(settings):
    """Return weights in float64, by the names of transformers."""
    shapes = {}
    if settings["model_type"] == "gpt2":
        inner = settings.get("n_inner") or 4 * H
        shapes |= {"transformer.wte.weight": (VOCAB, H), "transformer.wpe.weight": (settings["n_positions"], H)}
        for block in (f"transformer.h.{number}." for number in range(LAYERS)):
            layers = {
                "attn.c_attn": (H, 3 * H),
                "attn.c_proj": (H, H),
                "mlp.c_fc": (H, inner),
                "mlp.c_proj": (inner, H),
            }
            for name, shape in {**layers, "ln_1": (H,), "ln_2": (H,)}.items():
                shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[-1:]}
        shapes |= {"transformer.ln_f.weight": (H,), "transformer.ln_f.bias": (H,)}
    else:
        kv = settings["num_key_value_heads"] * H // HEADS
        shapes |= {"model.embed_tokens.weight": (VOCAB, H), "model.norm.weight": (H,)}
        for block in (f"model.layers.{number}." for number in range(LAYERS)):
            layers = {"self_attn.q_proj": (H, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H)}
            layers |= {"self_attn.o_proj": (H, H), "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H)}
            for name, shape in {**layers, "mlp.down_proj": (H, INNER)}.items():
                shapes[f"{block}{name}.weight"] = shape
                if settings.get("attention_bias"):
                    shapes[f"{block}{name}.bias"] = shape[:1]
            shapes |= {f"{block}{norm}_layernorm.weight": (H,) for norm in ("input", "post_attention")}
    if not settings.get("tie_word_embeddings", settings["model_type"] == "gpt2"):
        shapes["lm_head.weight"] = (VOCAB, H)
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64, generator=draw) / 4 for name, shape in shapes.items()}


def written(folder, settings, weights, count=1):
    """Write a folder as transformers does, with the weights in `count` files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if count == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    found = {name: f"model-{number % count}.safetensors" for number, name in enumerate(weights)}
    for file in set(found.values()):
        save_file({name: x for name, x in weights.items() if found[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return folder


def read(folder):
    """Return all weights in a folder, which has an index."""
    from safetensors.torch import load_file

    found = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {file: load_file(folder / file) for file in set(found["weight_map"].values())}
    assert sum(map(len, tensors.values())) == len(found["weight_map"])
    weights = {name: tensors[file][name] for name, file in found["weight_map"].items()}
    assert found["metadata"]["total_size"] == sum(x.nbytes for x in weights.values())
    return weights
