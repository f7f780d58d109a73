"""GPT-2 and Llama of transformers in the stages of ringcomm.parallel, on every grid, and back in transformers."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ringcomm.parallel import Grid, gpt_stages
from ringcomm.parallel.collectives import all_gathered
from ringcomm.pretrained import load_pretrained, pretrained_config, save_pretrained

VOCAB = 37  # padded if sharded
IDS = torch.arange(12).view(2, 6) * 5 % VOCAB
TINY_GPT2 = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 4}
TINY_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
TINY_LLAMA = {"vocab_size": VOCAB, "max_position_embeddings": 8, "hidden_size": 16, "intermediate_size": 24}
TINY_LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
UNTIED, TIED = ({"tie_word_embeddings": tied} for tied in (False, True))
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**TINY_GPT2)),
    "gpt2-untied": lambda: GPT2LMHeadModel(GPT2Config(**TINY_GPT2, **UNTIED, n_inner=24, activation_function="gelu")),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, **TIED, attention_bias=True, mlp_bias=True)),
}
LLAMA_ERROR = 1e-5  # transformers computes its norms and rotations in float32


def logits_of(model, grid):
    """Return the logits of all stages, on every rank."""
    passed = [IDS]
    for rank in grid.pp.ranks:
        passed = [model(passed[0]) if dist.get_rank() == rank else None]
        dist.broadcast_object_list(passed, rank, grid.pp.group)
    return all_gathered(passed[0], grid.tp, 2)[..., :VOCAB]


@torch.no_grad()
def run(backend, size):
    dist.init_process_group(backend)
    found = []
    for name, make in MODELS.items():
        theirs, draw = make().double().eval(), torch.Generator().manual_seed(0)
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3, generator=draw)
        expected, source = theirs(IDS).logits, Path(backend, name)
        if dist.get_rank() == 0:
            theirs.save_pretrained(source, max_shard_size="20KB" if size > 1 else "1MB")
        dist.barrier()
        for tp in (tp for tp in (1, 2, 4) if size % tp == 0):
            with Grid(tp=tp, pp=size // tp) as grid:
                (model,) = gpt_stages(pretrained_config(source), grid)
                load_pretrained(source, [model.double()], grid)
                logits, target = logits_of(model, grid), source / f"tp-{tp}"
                save_pretrained(target, [model], grid)
            error = LLAMA_ERROR if "llama" in name else 1e-12
            torch.testing.assert_close(logits, expected, rtol=error, atol=error)
            back = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
            assert type(back) is type(theirs)
            assert back.dtype == torch.float64
            assert torch.equal(back(IDS).logits, expected)
            found.append(logits.tolist())
    return found
