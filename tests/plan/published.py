"""Published steps of GPT on A100s and H100s, and what `ringcomm plan` predicts for them: the tables of docs/plan.md.

vtrain_measured.csv: runs of Megatron-LM with full recomputation, measured by the authors of vTrain (Bang et al., MICRO
2024, arXiv 2312.12391; MIT license, github.com/VIA-Research/vTrain). Every second row of theirs, with our column names.

llm_foundry_a100.csv, llm_foundry_h100.csv: MPT of 0.76 to 70 billion parameters with FSDP and FlashAttention in Triton,
in bfloat16, measured by MosaicML (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md; Apache
license). Those of their rows with these models on 80 GB GPUs; seconds are tokens of a batch over tokens per second.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

from ringcomm.plan.fit import errors, read_runs
from ringcomm.plan.model.devices import device
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.candidate import price
from ringcomm.plan.search.search import search

VTRAIN = Path(__file__).with_name("vtrain_measured.csv")
LLM_FOUNDRY = {name: VTRAIN.with_name(f"llm_foundry_{name[:4]}.csv") for name in ("a100-80gb", "h100-80gb")}
A100 = "a100-80gb"
TRITON = 0.18  # share of the data sheet of an H100 that their attention kernel reached: that of the best fit

# Narayanan et al., arXiv 2104.04473, table 1, with full recomputation: billions of parameters, heads, hidden, layers,
# tp, pp, GPUs, batch, TFLOP/s of a GPU by equation 3.
WEAK_SCALING = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]

# Korthikanti et al., arXiv 2205.05198, table 3: billions of parameters, heads, hidden, layers, tp, pp, chunks, batch,
# micro-batch; then of table 5 the seconds with full recomputation, and with selective and sequence parallelism.
RECOMPUTATION = [
    (22, 64, 6144, 48, 8, 1, 1, 4, 4, 1.42, 1.10),
    (175, 96, 12288, 96, 8, 8, 3, 64, 1, 18.13, 13.75),
    (530, 128, 20480, 105, 8, 35, 3, 280, 1, 49.05, 37.83),
    (1000, 160, 25600, 128, 8, 64, 1, 512, 1, 94.42, 71.49),
]
# Figure 1, in GiB of activations on a GPU: without recomputation, and as above.
ACTIVATIONS = {
    22: (59.25, 9.5625),
    175: (66.84375, 12.3515625),
    530: (114.0234375, 23.076171875),
    1000: (131.25, 26.5625),
}


def megatron():
    """Return the device of these runs: attention unfused and dropout, as in Megatron-LM of 2022."""
    return replace(device(A100), attention="unfused")


def gpt(heads, hidden, layers):
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)


@cache
def vtrain():
    return read_runs(VTRAIN, vocab=51200, recompute="full", sequence_parallel=False)


def vtrain_errors(accelerator=None):
    return errors(vtrain(), accelerator or megatron())


@cache
def llm_foundry(name):
    return read_runs(LLM_FOUNDRY[name], vocab=50432, recompute="none", sequence_parallel=False)


def llm_foundry_errors(name, fused, longest=1 << 16):
    """Return the errors of the runs with sequences up to a length."""
    runs = [run for run in llm_foundry(name) if run.model.seq <= longest]
    return errors(runs, replace(device(name), fused=fused))


def weak_scaling():
    """Yield billions of parameters, measured TFLOP/s, predicted TFLOP/s and micro-batch.

    The table has no micro-batches and no chunks: the fastest micro-batch with 1F1B is taken.
    """
    for billions, heads, hidden, layers, tp, pp, gpus, batch, measured in WEAK_SCALING:
        model = gpt(heads, hidden, layers)
        fixed = {"tp": tp, "pp": pp, "cp": 1, "chunks": 1, "recompute": "full", "sequence_parallel": False, "zero": 0}
        best = search(Workload(model, megatron(), gpus, batch), fixed).best[0]
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        yield billions, measured, flops / (gpus * best.cost.seconds * 1e12), best.layout.micro_batch


def recomputation():
    """Yield billions of parameters, kind of recomputation, measured and predicted seconds."""
    for billions, heads, hidden, layers, tp, pp, chunks, batch, micro_batch, *measured in RECOMPUTATION:
        for (recompute, sequence_parallel), seconds in zip(
            (("full", False), ("selective", True)), measured, strict=True
        ):
            layout = ParallelLayout(tp, pp, 1, 1, micro_batch, chunks, recompute, sequence_parallel)
            candidate = price(Workload(gpt(heads, hidden, layers), megatron(), tp * pp, batch), layout)
            yield billions, recompute, seconds, candidate.cost.seconds


def off(pairs):
    """Return mean and worst error of (measured, predicted) pairs."""
    found = [abs(predicted / measured - 1) for measured, predicted in pairs]
    return mean(found), max(found)


def tables():
    """Yield the lines of the tables in docs/plan.md."""
    yield "| Parameters, 10⁹ | Measured, TFLOP/s | Predicted, TFLOP/s | Micro-batch | Error |"
    yield "|---|---|---|---|---|"
    for billions, measured, predicted, micro_batch in weak_scaling():
        yield f"| {billions} | {measured} | {predicted:.0f} | {micro_batch} | {predicted / measured - 1:+.1%} |"
    yield ""
    yield "| Parameters, 10⁹ | Recomputation | Measured, s | Predicted, s | Error |"
    yield "|---|---|---|---|---|"
    for billions, recompute, measured, predicted in recomputation():
        yield f"| {billions} | {recompute} | {measured:.2f} | {predicted:.2f} | {predicted / measured - 1:+.1%} |"


if __name__ == "__main__":
    print(*tables(), sep="\n")
    found = abs(vtrain_errors())
    print(
        f"\nvTrain: mean {found.mean():.1%}, worst {found.max():.1%}, below 20 %: {(found < 0.2).sum()} of {len(found)}"
    )
    print("weak scaling: mean {:.1%}, worst {:.1%}".format(*off(row[1:3] for row in weak_scaling())))
    print("recomputation: mean {:.1%}, worst {:.1%}".format(*off(row[2:] for row in recomputation())))
