"""The rules of a layout: which numbers of ranks can share a model and a batch.

Each rule is a function of the numbers it relates. `ringcomm.parallel` checks the rules of what it builds, and
`ringcomm.plan` those of whole layouts, also while it searches: a rule holds as long as some of its numbers are unknown.

| name | number |
|---|---|
| tp, pp, dp, cp, ep | ranks of an axis of a `Grid` |
| chunks | stages of a rank of the pipeline |
| layers, heads, kv_heads, ffn, experts | those of the model; ffn: inner size of an MLP |
| seq, batch, micro_batch | tokens of a sequence; sequences of a batch of all replicas, and of a micro-batch of one |
| schedule, split_backward | of the pipeline; whether it splits backward |
| micro_batches | those of a replica |
| sequence_parallel, recompute, zero | as in `ParallelLayout` |
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from math import isqrt
from typing import Any, NamedTuple

from ringcomm.errors import ArgumentError, refuse

__all__ = ["CHUNKS", "RULES", "Refusal", "Rule", "broken", "check", "divisors", "nearest_divisors"]

CHUNKS = {"interleaved": 2, "zbv": 2}  # at least, and exactly; other schedules have one

Refusal = ArgumentError | None


class Rule(NamedTuple):
    """A function that returns the refusal of numbers that break a rule, and their names, which are its parameters."""

    refusal: Callable[..., Refusal]
    needs: tuple[str, ...]

    @classmethod
    def of(cls, refusal: Callable[..., Refusal]) -> "Rule":
        return cls(refusal, tuple(signature(refusal).parameters))


RULES: list[Rule] = []


def check(**known: Any) -> None:
    """Raise the ArgumentError of the first rule that these numbers break."""
    if error := broken(known):
        raise error


def broken(known: Mapping[str, Any], rules: Iterable[Rule] = RULES) -> Refusal:
    """Return the refusal of the first rule that these numbers break."""
    for refusal, needs in rules:
        try:
            numbers = [known[name] for name in needs]
        except KeyError:  # not known yet
            continue
        if error := refusal(*numbers):
            return error
    return None


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def nearest_divisors(number: int, wanted: int, name: str) -> str:
    """Return "a divisor of name = number (nearest: …)", for the message of a refusal."""
    below = max((each for each in divisors(number) if each <= wanted), default=1)
    above = min((each for each in divisors(number) if each >= wanted), default=number)
    near = f"{below}" if below == above else f"{below} or {above}"
    return f"a divisor of {name} = {number} (nearest: {near})"


def _rule(function: Callable[..., Refusal]) -> Callable[..., Refusal]:
    RULES.append(Rule.of(function))
    return function


def _divides(axis: str, size: int, what: str, number: int) -> Refusal:
    return refuse(axis, nearest_divisors(number, size, what), size) if number % size else None


# --- What the ranks of an axis divide ---------------------------------------------------------------------------------


@_rule
def _heads(tp: int, heads: int) -> Refusal:
    return _divides("tp", tp, "heads", heads)


@_rule
def _kv_heads(tp: int, kv_heads: int) -> Refusal:
    if kv_heads % tp and tp % kv_heads:
        return refuse("tp", f"a multiple or a divisor of kv_heads = {kv_heads}", tp)
    return None


@_rule
def _inner(tp: int, ffn: int) -> Refusal:
    return _divides("tp", tp, "ffn", ffn)


@_rule
def _layers(pp: int, layers: int) -> Refusal:
    return _divides("pp", pp, "layers", layers)


@_rule
def _replicas(dp: int, batch: int) -> Refusal:
    return _divides("dp", dp, "batch", batch)


@_rule
def _sequence(cp: int, seq: int) -> Refusal:
    """Each rank has two parts of a sequence, one near its beginning and one near its end, for a causal mask."""
    if cp == 1 or seq % (2 * cp) == 0:
        return None
    return refuse("cp", f"1 for an odd seq of {seq}" if seq % 2 else nearest_divisors(seq // 2, cp, "seq/2"), cp)


@_rule
def _sharded_sequence(sequence_parallel: bool, tp: int, cp: int, seq: int) -> Refusal:
    return _divides("tp", tp, "seq/cp", seq // cp) if sequence_parallel else None


@_rule
def _expert_replicas(ep: int, dp: int) -> Refusal:
    return _divides("ep", ep, "dp", dp)


@_rule
def _experts(ep: int, experts: int) -> Refusal:
    if ep > 1 and not experts:
        return refuse("ep", "1 without experts", ep)
    return _divides("ep", ep, "experts", experts)


@_rule
def _chunks_of_schedule(schedule: str, chunks: int) -> Refusal:
    least = CHUNKS.get(schedule, 1)
    if chunks == least or (chunks > least and schedule == "interleaved"):
        return None
    return refuse(f"chunks of {schedule}", f"{'at least ' * (schedule == 'interleaved')}{least} per rank", chunks)


@_rule
def _chunks(pp: int, chunks: int, layers: int) -> Refusal:
    return _divides("chunks", chunks, "layers/pp", layers // pp)


@_rule
def _micro_batch(dp: int, micro_batch: int, batch: int) -> Refusal:
    return _divides("micro_batch", micro_batch, "batch/dp", batch // dp)


# --- What does not go together ----------------------------------------------------------------------------------------


@_rule
def _turns_of_chunks(schedule: str, pp: int, micro_batches: int) -> Refusal:
    if schedule == "interleaved" and micro_batches % pp:
        return refuse("micro-batches of interleaved", f"a multiple of pp = {pp}", micro_batches)
    return None


@_rule
def _recomputed(schedule: str, split_backward: bool, recompute: str) -> Refusal:
    if split_backward and recompute != "none":
        return refuse(f"recompute with {schedule}, which splits backward", "none", recompute)
    return None


@_rule
def _split_shards(schedule: str, split_backward: bool, zero: int) -> Refusal:
    """FSDP makes the parameters DTensors, whose backward cannot be split."""
    if split_backward and zero == 3:
        return refuse(f"zero with {schedule}, which splits backward", "at most 2", zero)
    return None


@_rule
def _sharded_parameters(zero: int, tp: int, cp: int, ep: int, chunks: int) -> Refusal:
    """FSDP shards one module of each rank over dp."""
    if zero < 3 or (tp, cp, ep, chunks) == (1, 1, 1, 1):
        return None
    return refuse("zero 3", "tp 1, cp 1, ep 1 and chunks 1", f"tp {tp}, cp {cp}, ep {ep} and chunks {chunks}")
