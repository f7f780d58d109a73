"""Measure decode steps of a Llama on the ranks of one machine; print the rows of the table in docs/parallel.md.

    python benchmarks/decode.py [--model 1.1B] [--batch 8] [-n 2] [--rounds 3] [--steps 32]

Needs transformers. Contenders take turns, in processes of their own with one thread each: the Decoder of
ringcomm.parallel, transformers with a tensor-parallel plan, and the same on local tensors; both in one process, too,
with as many threads as there are ranks. Weights are random, in bfloat16. A figure is the median over the rounds of the
mean time of a step after a prompt of 16 tokens, with the choice of the greedy token.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ringcomm.parallel import Decoder, Grid, gpt_stages, stream_tokens
from ringcomm.pretrained import load_pretrained, pretrained_config
from ringcomm.torch import local_tensors

SMALL = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 8}
TINY_LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
MODELS = {"66M": SMALL, "1.1B": TINY_LLAMA}
PROMPT = 16  # tokens
Generate = Callable[[torch.Tensor, int], float]  # ids, steps → seconds of the steps

fork = multiprocessing.get_context("fork")  # of processes that have imported all this


def ours(folder: str) -> Generate:
    grid = Grid(tp=dist.get_world_size())
    stages = [stage.bfloat16() for stage in gpt_stages(pretrained_config(folder), grid)]
    load_pretrained(folder, stages, grid)
    decoder = Decoder(stages, grid)

    def generate(ids: torch.Tensor, steps: int) -> float:
        tokens = stream_tokens(decoder, ids.tolist(), steps + 1)
        next(tokens)
        return seconds(lambda: [*tokens])

    return generate


def theirs(folder: str) -> Generate:
    import transformers
    from transformers.distributed import DistributedConfig

    plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if dist.get_world_size() > 1 else {}
    return generation(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **plan))


def on_local_tensors(folder: str) -> Generate:
    import transformers
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=plan)
    return generation(local_tensors(model))


def generation(model: torch.nn.Module) -> Generate:
    import transformers

    @torch.inference_mode()
    def generate(ids: torch.Tensor, steps: int) -> float:
        cache = transformers.DynamicCache(config=model.config)

        def step(ids: torch.Tensor) -> torch.Tensor:
            return model(ids, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

        def decode(ids: torch.Tensor) -> None:
            for _ in range(steps):
                ids = step(ids)

        ids = step(ids)
        return seconds(lambda: decode(ids))

    return generate


def seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def on_rank(
    rank: int,
    size: int,
    threads: int,
    backend: str,
    make: Callable[[str], Generate],
    folder: str,
    arguments: argparse.Namespace,
    store: str,
    answer: Any,  # multiprocessing's Queue
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(threads)
    files = FileStore(store, size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=size)
    generate = make(folder)
    ids = torch.randint(32_000, (arguments.batch, PROMPT), generator=torch.Generator().manual_seed(0))
    generate(ids, 2)
    taken = generate(ids, arguments.steps) / arguments.steps
    if rank == 0:
        answer.put(taken)
        answer.close()
        answer.join_thread()
    dist.barrier()
    os._exit(0)  # Gloo's threads may hold its group


def save_model(model: str, folder: str) -> None:
    import transformers

    sizes = {"vocab_size": 32_000, "num_key_value_heads": 4, "max_position_embeddings": 2048, **MODELS[model]}
    config = transformers.LlamaConfig(**sizes, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)


def measured(size: int, *arguments: Any) -> float:
    """Return the seconds of a step, given the further arguments of `on_rank` as far as `arguments`."""
    with tempfile.TemporaryDirectory() as own:
        answer = fork.Queue()
        given = (size, *arguments, f"{own}/store", answer)
        ranks = [fork.Process(target=on_rank, args=(rank, *given)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        taken: float = answer.get(timeout=120)
        for rank in ranks:
            rank.join()
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="66M")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("-n", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    arguments = parser.parse_args()
    import transformers  # noqa: F401 (once for all processes, which are forked)

    n = arguments.n
    contenders = {
        "Decoder, ringcomm": (n, 1, "ringcomm", ours),
        "local_tensors, ringcomm": (n, 1, "ringcomm", on_local_tensors),
        "transformers, ringcomm": (n, 1, "ringcomm", theirs),
        "transformers, Gloo": (n, 1, "gloo", theirs),
        "Decoder, one process": (1, n, "ringcomm", ours),
        "transformers, one process": (1, n, "ringcomm", theirs),
    }
    with tempfile.TemporaryDirectory() as folder:
        writer = fork.Process(target=save_model, args=(arguments.model, folder))
        writer.start()
        writer.join()
        rounds = [
            {name: measured(*contender, folder, arguments) for name, contender in contenders.items()}
            for _ in range(arguments.rounds)
        ]
    for name in contenders:
        step = statistics.median(taken[name] for taken in rounds)
        print(f"| {arguments.model} | {arguments.batch} | {name} | {step * 1e3:.1f} | {arguments.batch / step:,.0f} |")


if __name__ == "__main__":
    main()
