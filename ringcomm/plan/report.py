"""Layouts as text and JSON: where the time and the memory go, why the others lose, and how to run the best."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ringcomm.plan.model.devices import Accelerator, gib
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.price.layer import CAUSAL
from ringcomm.plan.price.step import PARTS
from ringcomm.plan.price.traffic import bytes_sent
from ringcomm.plan.search.neighbors import Explainer
from ringcomm.plan.search.search import TIE, Candidate, SearchResult, differences

__all__ = ["as_json", "describe", "details", "grid", "train_command", "utilization"]

LEAST = 0.001  # of the step: shorter parts are left out of explanations
MANY = 3  # entries of a list that are shown


def describe(result: SearchResult, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    """Yield the lines of a search: the best layouts, why the others lose, and what is out."""
    best, *others = result.best
    explainer = Explainer(model, device, batch, result)
    yield from _head(model, device, result.best, batch)
    room = f"the {gib(device.available)} of a GPU's {gib(device.memory)} that CUDA, NCCL and the allocator leave"
    yield f"{result.legal:,} layouts, of which {result.fitting:,} fit into {room}"
    yield ""
    yield from _table(result.best, model, device, batch)
    yield ""
    yield "What makes layout 1 possible, and what it gains: with one choice changed,"
    for each in explainer.near():
        yield f"    {_change(each, best)}: {_outcome(each, best, device)}"
    if others:
        yield ""
        yield "Why the others lose, part by part; and what their choices, one by one, would bring to layout 1:"
    for number, each in enumerate(others, 2):
        yield f"{number:>3} takes {_compared(each, best)}"
        if steps := [
            f"{_change(step, best)}: {_outcome(step, best, device, False)}" for step in explainer.between(each.layout)
        ]:
            yield f"    1 with {'; with '.join(steps)}"
    if result.short or any(result.indivisible.values()):
        yield ""
    if result.short:
        nearest = sorted(result.short.items(), key=lambda item: item[1])
        lacking = [f"tp {tp}, pp {pp} by {gib(missing)}" for (tp, pp), missing in nearest]
        yield f"out of memory, whatever the rest: {_some(lacking, '; ')}"
    divided = {"tp": f"{model.heads} heads", "pp": f"{model.layers} layers", "dp": f"a batch of {batch}"}
    if uneven := [f"{divided[axis]} by {axis} {_some(sizes)}" for axis, sizes in result.indivisible.items() if sizes]:
        yield f"not divisible: {'; '.join(uneven)}"
    yield from _how_to_run(best.layout, model, device, batch)


def details(candidate: Candidate, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    """Yield the lines of one layout: the parts of its time and of its memory."""
    cost, memory = candidate.cost, candidate.memory
    yield from _head(model, device, [candidate], batch)
    yield ""
    yield from _table([candidate], model, device, batch, legend=False)
    yield ""
    for part, seconds in cost.parts.items():
        if seconds > 0:
            yield f"{part:<12}{_seconds(seconds):>10}{seconds / cost.seconds:>8.1%}  {PARTS[part]}"
    yield ""
    for part, size in memory._asdict().items():
        yield f"{part:<12}{gib(size):>10}{size / memory.total:>8.1%}"
    if not _fits(candidate, device):
        yield f"does not fit: {gib(memory.total - device.available)} more than the {gib(device.available)} of a GPU"
    yield from _how_to_run(candidate.layout, model, device, batch)


def as_json(
    candidates: Sequence[Candidate],
    model: Transformer,
    device: Accelerator,
    batch: int,
    result: SearchResult | None = None,
) -> dict[str, Any]:
    """Return the same for programs: seconds, bytes and shares. `sent` is what a rank of the first stage sends.

    `tflops_per_gpu` are those of the model, without what is computed again. `near` has the layouts that differ from the
    best in one choice.
    """

    def facts(candidate: Candidate) -> dict[str, Any]:
        layout, share = candidate.layout, utilization(candidate, model, device, batch)
        return {
            **asdict(layout),
            "schedule": layout.schedule,
            "seconds": candidate.cost.seconds,
            "bytes_per_gpu": candidate.memory.total,
            "tflops_per_gpu": share * device.flops / 1e12,
            "utilization": share,
            "breakdown": dict(candidate.cost.parts),
            "sent": bytes_sent(model, layout, device.element, batch),
            "memory": candidate.memory._asdict(),
            "fits": _fits(candidate, device),
            "grid": grid(layout),
            "command": train_command(layout, model, device, batch),
        }

    found: dict[str, Any] = {
        "model": asdict(model) | {"parameters": model.parameters},
        "device": asdict(device),
        "gpus": candidates[0].layout.gpus,
        "batch": batch,
        "plans": [facts(each) for each in candidates],
        "rejected": [],
    }
    if result:
        found |= {"legal": result.legal, "fitting": result.fitting}
        found["near"] = [facts(each) for each in Explainer(model, device, batch, result).near()]
        short = [{"reason": "memory", "tp": tp, "pp": pp, "bytes": size} for (tp, pp), size in result.short.items()]
        uneven = [
            {"reason": "not divisible", axis: size} for axis, sizes in result.indivisible.items() for size in sizes
        ]
        found["rejected"] = short + uneven
    return found


def grid(layout: ParallelLayout) -> str:
    """Return the `Grid` of a layout."""
    others = "".join(f", {name}={size}" for name in ("cp", "ep") if (size := getattr(layout, name)) > 1)
    return f"Grid(dp={layout.dp}, tp={layout.tp}, pp={layout.pp}{others})"


def train_command(layout: ParallelLayout, model: Transformer, device: Accelerator, batch: int) -> str:
    """Return the command of examples/train_gpt.py that runs a layout."""
    least = -(-layout.gpus // device.node)
    nodes = next(count for count in range(least, layout.gpus + 1) if layout.gpus % count == 0)
    start = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else "--standalone"
    where = "--backend nccl --device cuda --precision bfloat16" if device.asynchronous else "--precision float32"
    names = ("dp", "tp", "pp", "cp", "ep", "schedule", "chunks", "recompute", "zero")
    chosen = [f"--{name} {getattr(layout, name)}" for name in names if getattr(layout, name) != getattr(PLAIN, name)]
    chosen += ["--sequence-parallel"] * layout.sequence_parallel
    sizes = f"--batch {batch} --context {model.seq} --layers {model.layers} --hidden {model.hidden}"
    sizes += f" --kv-heads {model.kv_heads}" * bool(model.kv_heads) + f" --ffn {model.ffn}" * bool(model.ffn)
    sizes += " --gated" * model.gated + f" --experts {model.experts} --top-k {model.top_k}" * bool(model.experts)
    return (
        f"torchrun {start} --nproc-per-node {layout.gpus // nodes} examples/train_gpt.py {where} {' '.join(chosen)} "
        f"--micro-batches {layout.micro_batches(batch)} {sizes} --heads {model.heads}"
    )


PLAIN = ParallelLayout()  # the defaults of the example


def utilization(candidate: Candidate, model: Transformer, device: Accelerator, batch: int) -> float:
    """Return the model FLOPs utilization: FLOPs without those computed again, over what the GPUs could do.

    Of the scores, fused attention has to compute half.
    """
    flops = model.step_flops(batch, CAUSAL if device.attention == "fused" else 1)
    return flops / (candidate.cost.seconds * candidate.layout.gpus * device.flops)


# --- Pieces of text ---------------------------------------------------------------------------------------------------


def _head(model: Transformer, device: Accelerator, best: Sequence[Candidate], batch: int) -> Iterator[str]:
    size, gpus = model.parameters, best[0].layout.gpus
    experts = f"{model.experts} experts, {model.top_k} for a token, " if model.experts else ""
    active = f", {_count(model.active_parameters)} for a token" if model.experts else ""
    yield (
        f"GPT of {_count(size)} parameters{active}: {model.layers} layers, hidden {model.hidden}, {model.heads} heads, "
        f"{experts}vocabulary {model.vocab}; batches of {batch} sequences of {model.seq}"
    )
    priced = "fused attention without dropout, as the command below runs it"
    if device.attention == "unfused":
        priced = "unfused attention with dropout, as in Megatron-LM of 2022; the command below runs neither"
    yield f"{gpus} × {device.name}, {min(device.node, gpus)} to a node; {priced}"
    yield f"constants of {device.name}: {device.basis}"
    sure = f"no prediction for {device.name} was compared with a measured step"
    if device.error:
        sure = f"predictions of measured steps were off by {device.error:.0%} in the mean"
        tied = sum(each.cost.seconds <= (1 + device.error) * best[0].cost.seconds for each in best)
        sure += f"; layouts 1 to {tied} differ by less" * (tied > 1)
    yield f"how sure: {sure}"


def _table(
    candidates: Sequence[Candidate], model: Transformer, device: Accelerator, batch: int, legend: bool = True
) -> Iterator[str]:
    """Yield a row for each layout, and what the columns mean; those of parts are shares of the step in percent."""
    shown = [part for part in PARTS if any(each.cost.parts[part] > LEAST * each.cost.seconds for each in candidates)]
    widths = [max(6, len(part) + 2) for part in shown]
    titles = "".join(f"{part:>{width}}" for part, width in zip(shown, widths, strict=True))
    axes = {"tp": 4, "pp": 4, "dp": 6, "cp": 4} | ({"ep": 4} if model.experts else {})
    yield (
        f"{'':>3} {''.join(f'{axis:>{width}}' for axis, width in axes.items())}"
        f"{'micro':>6}{'chunks':>7} {'recompute':<10}{'sp':<4}{'zero':<5}{'step':>9}{'MFU':>7}{'memory':>10}  {titles}"
    )
    for number, each in enumerate(candidates, 1):
        layout, cost = each.layout, each.cost
        shares = (100 * cost.parts[part] / cost.seconds for part in shown)
        sharded = "yes" if layout.sequence_parallel else "no"
        yield (
            f"{number:>3} {''.join(f'{getattr(layout, axis):>{width}}' for axis, width in axes.items())}"
            f"{layout.micro_batch:>6}{layout.chunks:>7} {layout.recompute:<10}{sharded:<4}{layout.zero:<5}"
            f"{_seconds(cost.seconds):>9}{utilization(each, model, device, batch):>7.1%}{gib(each.memory.total):>10}  "
            + "".join(f"{share:>{width}.1f}" for share, width in zip(shares, widths, strict=True))
        )
    if legend:
        yield ""
        yield f"micro: sequences of a micro-batch; sp: sequence parallelism; within {TIE:.1%} the simpler comes first"
        yield "MFU: the model's FLOPs in a step, of what the GPUs could do; right of the memory, percent of the step:"
        yield from (f"{part:>15}: {PARTS[part]}" for part in shown)


def _fits(candidate: Candidate, device: Accelerator) -> bool:
    return candidate.memory.total <= device.available


def _change(candidate: Candidate, best: Candidate) -> str:
    """Return the fields in which a layout differs from the best."""
    layout, texts = asdict(candidate.layout), {True: "yes", False: "no"}
    changed = {name: value for name, value in layout.items() if value != getattr(best.layout, name)}
    words = {name: texts[value] if isinstance(value, bool) else value for name, value in changed.items()}
    return ", ".join(f"{name.replace('_', '-')} {word}" for name, word in words.items())


def _outcome(candidate: Candidate, best: Candidate, device: Accelerator, parts: bool = True) -> str:
    """Return what a change of the best layout brings: seconds, or the bytes by which it does not fit."""
    if _fits(candidate, device):
        return _compared(candidate, best, parts)
    less = 1 - candidate.cost.seconds / best.cost.seconds
    faster = f" ({less:.1%} faster)" if less > TIE else ""
    return f"does not fit, {gib(candidate.memory.total - device.available)} too large{faster}"


def _compared(candidate: Candidate, best: Candidate, parts: bool = True) -> str:
    """Return how much longer a layout takes than the best, and why: the terms add up to the difference."""
    whole, terms = best.cost.seconds, differences(candidate, best)
    more = candidate.cost.seconds - whole
    if abs(more) <= TIE * whole:
        return "as long"
    shown = [(part, seconds) for part, seconds in terms if abs(seconds) > LEAST * whole]
    rest = more - sum(seconds for _, seconds in shown)
    shown += [("smaller parts", rest)] if abs(rest) > LEAST * whole / 10 else []
    text = ", ".join(f"{part} {'+' if seconds > 0 else '-'}{_seconds(abs(seconds))}" for part, seconds in shown)
    return f"{more / whole:.1%} longer, {_seconds(more)}" + f": {text}" * parts


def _some(texts: Sequence[object], comma: str = ", ") -> str:
    """Return the first of a list, and how many more it has."""
    more = f" and {len(texts) - MANY} more" if len(texts) > MANY else ""
    return comma.join(map(str, texts[:MANY])) + more


def _how_to_run(layout: ParallelLayout, model: Transformer, device: Accelerator, batch: int) -> Iterator[str]:
    yield ""
    yield grid(layout)
    yield train_command(layout, model, device, batch)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
