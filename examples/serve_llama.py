"""Generate text with a Llama whose layers are divided among the ranks (tensor parallelism), and print the speed.

    ringcomm run -n 2 examples/serve_llama.py
    ringcomm run -n 4 examples/serve_llama.py --folder llama --prompt "1 15043 3186" --prompt "1 910" --end 2

A folder has config.json and the weights in safetensors, as transformers saves them, of a Llama or a GPT-2. Without one,
a random Llama of the given size is written to a temporary folder, and read from there. Prompts are tokens, because
there is no tokenizer here; without one, they are random. Tokens are greedy unless a temperature is given. Every rank
computes with as many threads as OMP_NUM_THREADS says.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

import ringcomm.torch
from ringcomm import ArgumentError
from ringcomm.parallel import Decoder, GPTConfig, Grid, Sampling, count_parameters, gpt_stages, stream_tokens
from ringcomm.pretrained import load_pretrained, pretrained_config, save_pretrained


def main() -> None:
    arguments = parser().parse_args()
    ringcomm.torch.init_process_group()
    grid = Grid(tp=dist.get_world_size())
    try:
        serve(arguments, grid)
    except ArgumentError as error:
        sys.exit(f"serve_llama.py: error: {error}")
    dist.destroy_process_group()


def serve(arguments: argparse.Namespace, grid: Grid) -> None:
    dtype = getattr(torch, arguments.dtype)
    sampling = None
    if arguments.temperature:
        top_p = 1.0 if arguments.top_p is None else arguments.top_p
        sampling = Sampling(arguments.temperature, arguments.top_k, top_p, arguments.seed)
    elif arguments.top_k is not None or arguments.top_p is not None:
        raise ArgumentError("--top-k, --top-p: expected with a --temperature above 0, got none")
    with folder_of(arguments, grid) as folder:
        config = pretrained_config(folder)
        stages = [stage.to(dtype) for stage in gpt_stages(config, grid)]
        load_pretrained(folder, stages, grid)
    parameters = count_parameters(stages, grid)
    decoder = Decoder(stages, grid)
    del stages  # the decoder has its own copy of most weights

    draw = random.Random(arguments.seed)
    prompts = arguments.prompt or [draw.choices(range(config.vocab_size), k=16) for _ in range(arguments.batch)]
    [*stream_tokens(decoder, prompts, min(2, arguments.new_tokens))]  # the first calls choose kernels
    started = time.perf_counter()
    steps = stream_tokens(decoder, prompts, arguments.new_tokens, end=arguments.end, sampling=sampling)
    tokens, first = [next(steps)], time.perf_counter()
    tokens += steps
    ended = time.perf_counter()
    if grid.world.rank > 0:
        return
    print(f"{parameters:,} parameters in {arguments.dtype} on {grid.tp.size} ranks")
    for prompt, new in zip(prompts, zip(*tokens, strict=True), strict=True):
        print(*prompt, "->", *(token for token in new if token is not None))
    decoded = sum(token is not None for step in tokens[1:] for token in step)
    print(f"prefill: {sum(map(len, prompts))} tokens in {(first - started) * 1e3:.1f} ms")
    if decoded:
        seconds = ended - first
        print(f"decode: {decoded / seconds:,.1f} tokens/s, {seconds / (len(tokens) - 1) * 1e3:.2f} ms a step")


@contextmanager
def folder_of(arguments: argparse.Namespace, grid: Grid) -> Iterator[str]:
    """Yield the folder with the weights: the one that is given, or a temporary one with random weights."""
    if arguments.folder:
        yield arguments.folder
        return
    config = GPTConfig(
        arguments.vocab, arguments.context, arguments.layers, arguments.hidden, arguments.heads,
        kv_heads=arguments.kv_heads, inner=arguments.inner, activation=F.silu, gated=True, bias=False, rms_norm=True,
        rotary_base=10_000.0, tied=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name)  # that of rank 0; the others stay empty
        save_pretrained(name[0], gpt_stages(config, grid, seed=arguments.seed), grid)
        yield name[0]
        dist.barrier()  # all have read it


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", help="with config.json and the weights; without it, the weights are random")
    add("--layers", type=int, default=12, help="of a random Llama, as are the following sizes: 66 million parameters")
    add("--hidden", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--inner", type=int, default=1280, help="size of the activations in an MLP")
    add("--vocab", type=int, default=32_000)
    add("--context", type=int, default=2048, help="tokens of the longest sequence")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--prompt", type=tokens, action="append", metavar="TOKENS", help="a prompt of the batch: numbers")
    add("--batch", type=int, default=1, help="number of random prompts, of 16 tokens")
    add("--new-tokens", type=int, default=64, metavar="N", help="for each prompt, at most")
    add("--end", type=int, action="append", metavar="TOKEN", help="a token that ends a sequence")
    add("--temperature", type=float, default=0.0, help="of sampling; 0: greedy tokens")
    add("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    add("--top-p", type=float, metavar="P", help="draw from the most probable tokens of probability P")
    add("--seed", type=int, default=0, help="of weights, prompts and sampling")
    return parser


def tokens(text: str) -> list[int]:
    return [int(each) for each in text.split()]


if __name__ == "__main__":
    main()
