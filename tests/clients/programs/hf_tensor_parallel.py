"""Models that transformers has sharded with a tensor-parallel plan, and the same models on local tensors."""

import operator

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.distributed import DistributedConfig

from ringcomm import ArgumentError
from ringcomm.torch import local_tensors

NEW = 12
PROMPTS = torch.arange(10).view(2, 5) * 7 % 64
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": None}
SIZES |= {"initializer_range": 0.3}
REPLICATED = {"model.embed_tokens": "replicate"}
MODELS = {
    "llama": (LlamaConfig(**SIZES), "auto"),
    "tied": (LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True), "auto"),
    "replicated": (LlamaConfig(**SIZES), REPLICATED),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), "auto"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), "auto"),  # its norms inside attention have a style of their own
}


def sharded(folder, plan, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=DistributedConfig(tp_plan=plan)
    ).eval()


def tokens_of(model):
    return model.generate(PROMPTS, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[:, PROMPTS.shape[1] :]


def refusal(model):
    try:
        local_tensors(model)
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
        for dtype, error in ((torch.float32, 1e-4), (torch.float64, 0), (torch.bfloat16, None)):
            model = sharded(f"{backend}-{name}", plan, dtype)
            logits, tokens = model(PROMPTS).logits, tokens_of(model)
            assert local_tensors(model) is model
            assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
            if error is not None:
                torch.testing.assert_close(model(PROMPTS).logits, logits, rtol=error, atol=error)
                assert torch.equal(tokens_of(model), tokens)
            if dtype is torch.float32:
                assert torch.equal(tokens, expected)
        found[name] = tokens.tolist()
    assert refusal(model).endswith("got a Qwen3ForCausalLM")
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64))
    assert refusal(gpt2) == "model: expected one that from_pretrained has sharded with a tp_plan, got a GPT2LMHeadModel"
    model = sharded(f"{backend}-llama", {"model.layers.*.mlp.down_proj": "rowwise_split_input"}, torch.float32)
    before = [*model.parameters()]
    text = refusal(model)
    assert text.startswith("model.layers.0.mlp.down_proj of the model: expected"), text
    assert text.endswith("got RowwiseParallel on a Linear"), text
    assert all(map(operator.is_, model.parameters(), before))
    return found
