"""How a model is divided over GPUs: the axes of a `Grid`, the schedule of its pipeline, and what it keeps in memory."""

from dataclasses import dataclass
from math import gcd
from typing import TypedDict, Unpack

from ringcomm.errors import integer, refuse, unknown
from ringcomm.plan.model.transformer import MOST, Transformer, nearest_divisors

__all__ = ["RECOMPUTE", "SCHEDULES", "ZERO_STAGES", "LayoutFields", "ParallelLayout", "check_axis", "with_schedule"]

RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = {(False, False): "1f1b", (False, True): "interleaved", (True, False): "zb-h1", (True, True): "zbv"}


class LayoutFields(TypedDict, total=False):
    """Some fields of a ParallelLayout, or the name of its schedule."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    chunks: int
    recompute: str
    sequence_parallel: bool
    zero: int
    split_backward: bool
    ep: int
    schedule: str


@dataclass(frozen=True, order=True)
class ParallelLayout:
    """A layout of `ringcomm.parallel`.

    Attributes:
        tp: ranks that share each layer
        pp: pipeline stages
        dp: replicas
        cp: ranks that share each sequence (ring attention)
        micro_batch: sequences of a micro-batch
        chunks: stages of each rank; more than one: the interleaved schedule or zbv, else 1F1B or zb-h1
        recompute: the activations that backward computes again: none, those of attention (selective), or all
        sequence_parallel: whether norms and dropout are sharded over `tp`
        zero: stage of ZeRO: what replicas share of states (1), gradients (2) and parameters (3)
        split_backward: whether gradients of weights wait for idle time, as in zb-h1 and zbv
        ep: replicas that divide the experts of each layer among them
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    micro_batch: int = 1
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero: int = 0
    split_backward: bool = False
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def schedule(self) -> str:
        """The name of its schedule in `ringcomm.pipelining.schedule`."""
        return SCHEDULES[self.split_backward, self.chunks > 1]

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage. The stages of zbv run back along the ranks."""
        return 0 if self.schedule == "zbv" else self.pp - 1

    def micro_batches(self, batch: int) -> int:
        """Return the micro-batches of each replica's share of a batch."""
        return batch // (self.dp * self.micro_batch)

    def check(self, model: Transformer, batch: int, gpus: int) -> None:
        """Check that `ringcomm.parallel` can run the layout.

        Raises:
            ArgumentError: it cannot; the message names the nearest possible values.
        """
        for name in ("tp", "pp", "dp", "cp", "micro_batch", "chunks", "ep"):
            integer(name, getattr(self, name), 1, MOST)
        integer("batch", batch, 1, MOST)
        for name, known in (("recompute", RECOMPUTE), ("zero", ZERO_STAGES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), map(str, known))
        if self.gpus != gpus:
            product = f"tp {self.tp} · pp {self.pp} · dp {self.dp} · cp {self.cp}"
            raise refuse("gpus", f"{product} = {self.gpus}", gpus)
        for name in ("tp", "pp", "dp", "cp"):
            check_axis(name, getattr(self, name), model, batch)
        self._check_divisors(model, batch)
        self._check_schedule(batch)
        self._check_sharding(model)

    def _check_divisors(self, model: Transformer, batch: int) -> None:
        """Check what experts, chunks and micro-batches divide."""
        if self.ep > 1 and (not model.experts or gcd(self.dp, model.experts) % self.ep or self.zero == 3):
            what = f"a divisor of dp = {self.dp} and of the {model.experts} experts; 1 for zero 3"
            raise refuse("ep", what if model.experts else "1 without experts", self.ep)
        if model.layers // self.pp % self.chunks:
            raise refuse("chunks", nearest_divisors(model.layers // self.pp, self.chunks, "layers/pp"), self.chunks)
        if batch // self.dp % self.micro_batch:
            divisors = nearest_divisors(batch // self.dp, self.micro_batch, "batch/dp")
            raise refuse("micro_batch", divisors, self.micro_batch)

    def _check_schedule(self, batch: int) -> None:
        """Check what the schedule requires."""
        if self.split_backward and (self.recompute != "none" or self.zero == 3 or self.chunks > 2 or self.pp == 1):
            got = f"pp {self.pp}, recompute {self.recompute}, zero {self.zero} and chunks {self.chunks}"
            raise refuse(f"schedule {self.schedule}", "pp > 1, recompute none, zero < 3 and at most 2 chunks", got)
        if self.schedule == "interleaved" and (self.pp == 1 or self.micro_batches(batch) % self.pp):
            got = f"{self.micro_batches(batch)} micro-batches and pp = {self.pp}"
            raise refuse("chunks", "1, unless pp > 1 divides the micro-batches", f"{self.chunks}, with {got}")

    def _check_sharding(self, model: Transformer) -> None:
        """Check what sequence parallelism and ZeRO require."""
        if self.sequence_parallel and self.tp == 1:
            raise refuse("sequence_parallel", "tp > 1", "tp 1")
        if self.sequence_parallel and model.seq // self.cp % self.tp:
            raise refuse("tp", nearest_divisors(model.seq // self.cp, self.tp, "seq/cp"), self.tp)
        if self.zero and self.dp * self.cp == 1:
            raise refuse(f"zero {self.zero}", "dp > 1 or cp > 1", "dp 1 and cp 1")
        if self.zero == 3 and (self.tp, self.cp, self.chunks) != (1, 1, 1):
            got = f"tp {self.tp}, cp {self.cp} and chunks {self.chunks}"
            raise refuse("zero 3", "tp 1, cp 1 and chunks 1", got)


def with_schedule(**fields: Unpack[LayoutFields]) -> ParallelLayout:
    """Return the layout with these fields; a schedule that is given brings the chunks that it needs.

    Raises:
        ArgumentError: the chunks are those of another schedule.
    """
    schedule = fields.pop("schedule", None)
    split, several = next((kind for kind, name in SCHEDULES.items() if name == schedule), (False, False))
    known: LayoutFields = {"chunks": 1 + several, "split_backward": split}
    layout = ParallelLayout(**known | fields)  # type: ignore[misc]
    if schedule not in (None, layout.schedule):
        raise refuse("schedule", f"{layout.schedule}, with chunks {layout.chunks}", schedule)
    return layout


def check_axis(name: str, size: int, model: Transformer, batch: int) -> None:
    """Raise ArgumentError unless an axis of this size divides what it shares; the message names the nearest sizes."""
    shared = {"tp": ("heads", model.heads), "pp": ("layers", model.layers), "dp": ("batch", batch)}
    if name in shared:
        what, number = shared[name]
        if number % size:
            raise refuse(name, nearest_divisors(number, size, what), size)
        keys = model.kv_heads or size
        if name == "tp" and keys % size and size % keys:
            raise refuse(name, f"a multiple or a divisor of the {keys} heads of keys and values", size)
        if name == "tp" and model.inner % size:
            raise refuse(name, nearest_divisors(model.inner, size, "ffn"), size)
    elif size > 1 and model.seq % (2 * size):  # ring attention gives each rank two parts of the sequence
        divisors = nearest_divisors(model.seq // 2, size, "seq/2")
        raise refuse(name, f"1 for an odd seq of {model.seq}" if model.seq % 2 else divisors, size)
