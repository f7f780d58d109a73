"""Layouts as text: where the time and the memory go, why the others lose, and how to run the best."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ringcomm.plan.model.devices import gib
from ringcomm.plan.price.candidate import Candidate
from ringcomm.plan.price.step import PARTS
from ringcomm.plan.search.neighbors import between, near
from ringcomm.plan.search.search import TIE, SearchResult, differences
from ringcomm.plan.train_command import grid, train_command

__all__ = ["describe", "details"]

LEAST = 0.001  # of the step: shorter parts are left out of explanations
MANY = 3  # entries of a list that are shown


def describe(result: SearchResult) -> Iterator[str]:
    """Yield the lines of a search: the best layouts, why the others lose, and what is out."""
    best, *others = result.best
    model, device, batch = result.workload.model, result.workload.device, result.workload.batch
    yield from _head(result.best)
    room = f"the {gib(device.available)} of a GPU's {gib(device.memory)} that CUDA, NCCL and the allocator leave"
    yield f"{result.legal:,} layouts, of which {result.fitting:,} fit into {room}"
    yield ""
    yield from _table(result.best, legend=True)
    yield ""
    yield "What makes layout 1 possible, and what it gains: with one choice changed,"
    for each in near(result):
        yield f"    {_change(each, best)}: {_outcome(each, best)}"
    if others:
        yield ""
        yield "Why the others lose, part by part; and what their choices, one by one, would bring to layout 1:"
    for number, each in enumerate(others, 2):
        yield f"{number:>3} takes {_compared(each, best)}"
        if steps := [
            f"{_change(step, best)}: {_outcome(step, best, parts=False)}" for step in between(result, each.layout)
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
    yield from _how_to_run(best)


def details(candidate: Candidate) -> Iterator[str]:
    """Yield the lines of one layout: the parts of its time and of its memory."""
    cost, memory, available = candidate.cost, candidate.memory, candidate.workload.device.available
    yield from _head([candidate])
    yield ""
    yield from _table([candidate])
    yield ""
    for part, seconds in cost.parts._asdict().items():
        if seconds > 0:
            yield f"{part:<12}{_seconds(seconds):>10}{seconds / cost.seconds:>8.1%}  {PARTS[part]}"
    yield ""
    for part, size in memory._asdict().items():
        yield f"{part:<12}{gib(size):>10}{size / memory.total:>8.1%}"
    if not candidate.fits:
        yield f"does not fit: {gib(memory.total - available)} more than the {gib(available)} of a GPU"
    yield from _how_to_run(candidate)


# --- Pieces of text ---------------------------------------------------------------------------------------------------


def _head(best: Sequence[Candidate]) -> Iterator[str]:
    workload = best[0].workload
    model, device, gpus, size = workload.model, workload.device, workload.gpus, workload.model.parameters
    experts = f"{model.experts} experts, {model.top_k} for a token, " if model.experts else ""
    active = f", {_count(model.active_parameters)} for a token" if model.experts else ""
    yield (
        f"GPT of {_count(size)} parameters{active}: {model.layers} layers, hidden {model.hidden}, {model.heads} heads, "
        f"{experts}vocabulary {model.vocab}; batches of {workload.batch} sequences of {model.seq}"
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


def _table(candidates: Sequence[Candidate], legend: bool = False) -> Iterator[str]:
    """Yield a row for each layout, and what the columns mean; those of parts are shares of the step in percent."""
    percent = [[100 * seconds / each.cost.seconds for seconds in each.cost.parts] for each in candidates]
    shown = [part for part, column in zip(PARTS, zip(*percent, strict=True), strict=True) if max(column) > 100 * LEAST]
    widths = [max(6, len(part) + 2) for part in shown]
    titles = "".join(f"{part:>{width}}" for part, width in zip(shown, widths, strict=True))
    axes = {"tp": 4, "pp": 4, "dp": 6, "cp": 4} | ({"ep": 4} if candidates[0].workload.model.experts else {})
    yield (
        f"{'':>3} {''.join(f'{axis:>{width}}' for axis, width in axes.items())}"
        f"{'micro':>6}{'chunks':>7} {'recompute':<10}{'sp':<4}{'zero':<5}{'step':>9}{'MFU':>7}{'memory':>10}  {titles}"
    )
    for number, each in enumerate(candidates, 1):
        layout, cost = each.layout, each.cost
        shares = (100 * getattr(cost.parts, part) / cost.seconds for part in shown)
        sharded = "yes" if layout.sequence_parallel else "no"
        yield (
            f"{number:>3} {''.join(f'{getattr(layout, axis):>{width}}' for axis, width in axes.items())}"
            f"{layout.micro_batch:>6}{layout.chunks:>7} {layout.recompute:<10}{sharded:<4}{layout.zero:<5}"
            f"{_seconds(cost.seconds):>9}{each.utilization:>7.1%}{gib(each.memory.total):>10}  "
            + "".join(f"{share:>{width}.1f}" for share, width in zip(shares, widths, strict=True))
        )
    if legend:
        yield ""
        yield f"micro: sequences of a micro-batch; sp: sequence parallelism; within {TIE:.1%} the simpler comes first"
        yield "MFU: the model's FLOPs in a step, of what the GPUs could do; right of the memory, percent of the step:"
        yield from (f"{part:>15}: {PARTS[part]}" for part in shown)


def _change(candidate: Candidate, best: Candidate) -> str:
    """Return the fields in which a layout differs from the best."""
    layout, texts = asdict(candidate.layout), {True: "yes", False: "no"}
    changed = {name: value for name, value in layout.items() if value != getattr(best.layout, name)}
    words = {name: texts[value] if isinstance(value, bool) else value for name, value in changed.items()}
    return ", ".join(f"{name.replace('_', '-')} {word}" for name, word in words.items())


def _outcome(candidate: Candidate, best: Candidate, parts: bool = True) -> str:
    """Return what a change of the best layout brings: seconds, or the bytes by which it does not fit."""
    if candidate.fits:
        return _compared(candidate, best, parts)
    less = 1 - candidate.cost.seconds / best.cost.seconds
    faster = f" ({less:.1%} faster)" if less > TIE else ""
    return f"does not fit, {gib(candidate.memory.total - candidate.workload.device.available)} too large{faster}"


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


def _how_to_run(candidate: Candidate) -> Iterator[str]:
    yield ""
    yield grid(candidate.layout)
    yield train_command(candidate.workload, candidate.layout)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
