"""Layouts as text and JSON: where the time and the memory go, why the others lose, and how to run the best."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ringcomm.plan.cost import CAUSAL, PARTS
from ringcomm.plan.devices import Accelerator
from ringcomm.plan.layout import ParallelLayout
from ringcomm.plan.model import Transformer
from ringcomm.plan.search import Candidate, SearchResult, differences
from ringcomm.plan.traffic import bytes_sent

__all__ = ["as_json", "describe", "details", "grid", "train_command", "utilization"]

LEAST = 0.001  # of the step: shorter parts are left out of explanations


def describe(result: SearchResult, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    """Yield the lines of a search: the best layouts, why the others lose, and what is out."""
    best, *others = result.best
    gpus = best.layout.gpus
    yield from _head(model, device, gpus, batch)
    room = f"{_gb(device.available)} of {_gb(device.memory)}, of which {_gb(device.reserved)} are kept free"
    yield f"{result.legal:,} layouts, {result.fitting:,} of them fit into {room}; the fastest:"
    yield ""
    yield from _table(result.best, model, device, batch)
    yield ""
    for number, each in enumerate(others, 2):
        more = each.cost.seconds - best.cost.seconds
        yield f"{number:>3} takes {more / best.cost.seconds:.1%} longer, {_seconds(more)}: {_explained(each, best)}"
    if result.short:
        nearest = sorted(result.short.items(), key=lambda item: item[1])
        text = "; ".join(f"tp {tp}, pp {pp} by {_gb(missing)}" for (tp, pp), missing in nearest)
        yield f"out of memory, whatever the rest: {text}"
    divided = {"tp": f"{model.heads} heads", "pp": f"{model.layers} layers", "dp": f"a batch of {batch}"}
    for axis, sizes in result.indivisible.items():
        if sizes:
            yield f"not divisible: {divided[axis]} by {axis} {', '.join(map(str, sizes))}"
    yield ""
    yield from _how_to_run(best.layout, model, device, batch)


def _explained(candidate: Candidate, best: Candidate) -> str:
    """Return what a layout loses against the best, and what it gains; the terms add up to the difference."""
    terms = differences(candidate, best)
    shown = [(part, seconds) for part, seconds in terms if abs(seconds) > LEAST * best.cost.seconds]
    rest = sum(seconds for _, seconds in terms) - sum(seconds for _, seconds in shown)
    shown += [("rest", rest)] if abs(rest) > LEAST * best.cost.seconds / 10 else []
    return ", ".join(f"{part} {'+' if seconds > 0 else '-'}{_seconds(abs(seconds))}" for part, seconds in shown)


def details(candidate: Candidate, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    """Yield the lines of one layout: the parts of its time and of its memory."""
    gpus, cost, memory = candidate.layout.gpus, candidate.cost, candidate.memory
    yield from _head(model, device, gpus, batch)
    yield ""
    yield from _table([candidate], model, device, batch)
    yield ""
    for part, seconds in cost.parts.items():
        if seconds > 0:
            yield f"{part:<12}{_seconds(seconds):>10}{seconds / cost.seconds:>8.1%}  {PARTS[part]}"
    yield ""
    for part, size in memory._asdict().items():
        yield f"{part:<12}{_gb(size):>10}{size / memory.total:>8.1%}"
    if memory.total > device.available:
        yield f"does not fit: {_gb(memory.total - device.available)} more than the {_gb(device.available)} of a GPU"
    yield ""
    yield from _how_to_run(candidate.layout, model, device, batch)


def as_json(
    candidates: Sequence[Candidate],
    model: Transformer,
    device: Accelerator,
    batch: int,
    result: SearchResult | None = None,
) -> dict[str, Any]:
    """Return the same for programs: seconds, bytes and shares. `sent` is what a rank of the first stage sends.

    `tflops_per_gpu` are those of the model, without what is computed again.
    """
    found: dict[str, Any] = {
        "model": asdict(model) | {"parameters": model.parameters},
        "device": asdict(device),
        "gpus": candidates[0].layout.gpus,
        "batch": batch,
        "plans": [
            {
                **asdict(each.layout),
                "schedule": each.layout.schedule,
                "seconds": each.cost.seconds,
                "bytes_per_gpu": each.memory.total,
                "tflops_per_gpu": utilization(each, model, device, batch) * device.flops / 1e12,
                "utilization": utilization(each, model, device, batch),
                "breakdown": dict(each.cost.parts),
                "sent": bytes_sent(model, each.layout, device.element, batch),
                "memory": each.memory._asdict(),
                "fits": each.memory.total <= device.available,
                "grid": grid(each.layout),
                "command": train_command(each.layout, model, device, batch),
            }
            for each in candidates
        ],
        "rejected": [],
    }
    if result:
        found |= {"legal": result.legal, "fitting": result.fitting}
        short = [{"reason": "memory", "tp": tp, "pp": pp, "bytes": size} for (tp, pp), size in result.short.items()]
        uneven = [
            {"reason": "not divisible", axis: size} for axis, sizes in result.indivisible.items() for size in sizes
        ]
        found["rejected"] = short + uneven
    return found


def grid(layout: ParallelLayout) -> str:
    """Return the `Grid` of a layout."""
    return f"Grid(dp={layout.dp}, tp={layout.tp}, pp={layout.pp}{f', cp={layout.cp}' * (layout.cp > 1)})"


def train_command(layout: ParallelLayout, model: Transformer, device: Accelerator, batch: int) -> str:
    """Return the command of examples/train_gpt.py that runs a layout."""
    least = -(-layout.gpus // device.node)
    nodes = next(count for count in range(least, layout.gpus + 1) if layout.gpus % count == 0)
    start = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else "--standalone"
    where = "--backend nccl --device cuda --precision bfloat16" if device.asynchronous else "--precision float32"
    options = {
        "dp": (layout.dp, 1),
        "tp": (layout.tp, 1),
        "pp": (layout.pp, 1),
        "cp": (layout.cp, 1),
        "schedule": (layout.schedule, "1f1b"),
        "chunks": (layout.chunks, 1),
        "recompute": (layout.recompute, "none"),
        "zero": (layout.zero, 0),
    }
    chosen = [f"--{name} {value}" for name, (value, default) in options.items() if value != default]
    chosen += ["--sequence-parallel"] * layout.sequence_parallel
    sizes = f"--batch {batch} --context {model.seq} --layers {model.layers} --hidden {model.hidden}"
    sizes += f" --kv-heads {model.kv_heads}" * bool(model.kv_heads) + f" --ffn {model.ffn}" * bool(model.ffn)
    return (
        f"torchrun {start} --nproc-per-node {layout.gpus // nodes} examples/train_gpt.py {where} {' '.join(chosen)} "
        f"--micro-batches {layout.micro_batches(batch)} {sizes} --heads {model.heads}"
    )


def utilization(candidate: Candidate, model: Transformer, device: Accelerator, batch: int) -> float:
    """Return the model FLOPs utilization: FLOPs without those computed again, over what the GPUs could do.

    Of the scores, fused attention has to compute half.
    """
    flops = model.step_flops(batch, CAUSAL if device.attention == "fused" else 1)
    return flops / (candidate.cost.seconds * candidate.layout.gpus * device.flops)


def _head(model: Transformer, device: Accelerator, gpus: int, batch: int) -> Iterator[str]:
    size = model.parameters
    readable = f"{size / 1e9:.1f} B" if size >= 1e8 else f"{size / 1e6:.2f} M"
    yield (
        f"GPT of {readable} parameters: {model.layers} layers, hidden {model.hidden}, {model.heads} heads, vocabulary "
        f"{model.vocab}; batches of {batch} sequences of {model.seq}"
    )
    yield f"{gpus} × {device.name} ({device.basis}), {min(device.node, gpus)} to a node; attention {device.attention}"


def _table(candidates: Sequence[Candidate], model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    """Yield a row for each layout; the columns of parts are shares of the step in percent."""
    shown = [part for part in PARTS if any(each.cost.parts[part] > LEAST * each.cost.seconds for each in candidates)]
    yield (
        f"{'':>3} {'tp':>4}{'pp':>4}{'dp':>6}{'cp':>4}{'micro':>6}{'chunks':>7} {'recompute':<10}{'sp':<4}{'zero':<5}"
        f"{'step':>9}{'MFU':>7}{'memory':>10}  " + "".join(f"{part:>{_wide(part)}}" for part in shown)
    )
    for number, (layout, cost, memory) in enumerate(candidates, 1):
        share = utilization(candidates[number - 1], model, device, batch)
        yield (
            f"{number:>3} {layout.tp:>4}{layout.pp:>4}{layout.dp:>6}{layout.cp:>4}{layout.micro_batch:>6}"
            f"{layout.chunks:>7} {layout.recompute:<10}{'yes' if layout.sequence_parallel else 'no':<4}{layout.zero:<5}"
            f"{_seconds(cost.seconds):>9}{share:>7.1%}{_gb(memory.total):>10}  "
            + "".join(f"{100 * cost.parts[part] / cost.seconds:>{_wide(part)}.1f}" for part in shown)
        )


def _wide(part: str) -> int:
    return max(6, len(part) + 2)


def _how_to_run(layout: ParallelLayout, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    yield grid(layout)
    yield train_command(layout, model, device, batch)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
