"""Models that transformers has sharded with a tensor-parallel plan, and the same models on local tensors."""

import operator
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.distributed import DistributedConfig

from ringcomm import ArgumentError
from ringcomm.torch import local_tensors
from ringcomm.torch.direct import packs

NEW = 12
PROMPTS = torch.arange(15).view(3, 5) * 7 % 64
# Each product has more than 16³ multiplications, from where on torch gives those in bfloat16 to oneDNN.
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": None}
SIZES |= {"initializer_range": 0.15}
IS_EXACT = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # in bfloat16
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0 if IS_EXACT else 0.1, torch.float64: 0}
REPLICATED = {"model.embed_tokens": "replicate"}
MODELS = {
    "llama": (LlamaConfig(**SIZES), "auto"),
    "tied": (LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True), "auto"),
    "replicated": (LlamaConfig(**SIZES), REPLICATED),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), "auto"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16), "auto"),  # its norms inside attention have a style of their own
}


def sharded(folder, plan, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=DistributedConfig(tp_plan=plan)
    ).eval()


def tokens_of(model):
    return model.generate(PROMPTS, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[:, PROMPTS.shape[1] :]


def refusal(call, *arguments):
    try:
        call(*arguments)
    except ArgumentError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@torch.no_grad()
def run(backend, _):
    dist.init_process_group(backend)
    found = {}
    for name, (config, plan) in MODELS.items():
        if dist.get_rank() == 0:
            torch.manual_seed(1)
            whole = AutoModelForCausalLM.from_config(config)
            for parameter in whole.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.rand_like(parameter), alpha=0.2)  # biases are not zero
            whole.save_pretrained(f"{backend}-{name}")
        dist.barrier()
        expected = tokens_of(AutoModelForCausalLM.from_pretrained(f"{backend}-{name}").eval())
        for dtype, error in ERRORS.items():
            model = sharded(f"{backend}-{name}", plan, dtype)
            logits, tokens = model(PROMPTS).logits, tokens_of(model)
            assert local_tensors(model) is model
            assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
            torch.testing.assert_close(model(PROMPTS).logits, logits, rtol=error, atol=error)
            if dtype is not torch.bfloat16 or IS_EXACT:
                assert torch.equal(tokens_of(model), tokens)
            embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
            assert embedding is not None
            assert (head is None) == packs(embedding)
            assert local_tensors(model) is model  # unchanged
            for each in (model, model.model):
                text = refusal(each.save_pretrained, f"{backend}-shards")
                assert text.startswith("model of save_pretrained: expected one with whole weights"), text
            assert not Path(f"{backend}-shards").exists()
            if dtype is torch.float32:
                assert torch.equal(tokens, expected)
        found[name] = tokens.tolist()
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64))
    before = [*gpt2.parameters()]
    assert local_tensors(gpt2) is gpt2  # nothing is sharded
    assert all(map(operator.is_, gpt2.parameters(), before))
    assert all(parameter.requires_grad for parameter in before)
    gpt2._tp_size = 2  # as another version may leave a model
    text = refusal(local_tensors, gpt2)
    assert text.startswith("model: expected one that transformers 5.24 has sharded, got one of transformers"), text
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": 65})).save_pretrained(f"{backend}-odd")
    dist.barrier()
    text = refusal(local_tensors, sharded(f"{backend}-odd", "auto", torch.float32))
    assert text == f"out_features of lm_head: expected a multiple of the {dist.get_world_size()} ranks, got 65", text
    model = sharded(f"{backend}-llama", {"model.layers.*.mlp.down_proj": "rowwise_split_input"}, torch.float32)
    before = [*model.parameters()]
    text = refusal(local_tensors, model)
    assert text.startswith("model.layers.0.mlp.down_proj of the model: expected"), text
    assert text.endswith("got RowwiseParallel on a Linear"), text
    assert all(map(operator.is_, model.parameters(), before))
    return found
