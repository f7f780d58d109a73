"""How a model is divided over GPUs: the axes of a `Grid`, the schedule of its pipeline, and what it keeps in memory."""

from dataclasses import dataclass

from ringcomm.errors import ArgumentError, integer, refuse, unknown
from ringcomm.plan.model import Transformer, nearest_divisors

__all__ = ["RECOMPUTE", "SCHEDULES", "ZERO_STAGES", "ParallelLayout", "check_axis"]

RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = ("1f1b", "interleaved")


@dataclass(frozen=True, order=True)
class ParallelLayout:
    """A layout of `ringcomm.parallel`.

    Attributes:
        tp: ranks that share each layer
        pp: pipeline stages
        dp: replicas
        cp: ranks that share each sequence (ring attention)
        micro_batch: sequences of a micro-batch
        chunks: stages of each rank; more than one: the interleaved schedule, else 1F1B
        recompute: the activations that backward computes again: none, those of attention (selective), or all
        sequence_parallel: whether norms and dropout are sharded over `tp`
        zero: stage of ZeRO: what replicas share of states (1), gradients (2) and parameters (3)
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

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def schedule(self) -> str:
        """The name of its schedule in `ringcomm.parallel.schedule`."""
        return SCHEDULES[self.chunks > 1]

    def micro_batches(self, batch: int) -> int:
        """Return the micro-batches of each replica's share of a batch."""
        return batch // (self.dp * self.micro_batch)

    def check(self, model: Transformer, batch: int, gpus: int) -> None:
        """Check that `ringcomm.parallel` can run the layout.

        Raises:
            ArgumentError: it cannot; the message names the nearest possible values.
        """
        for name in ("tp", "pp", "dp", "cp", "micro_batch", "chunks"):
            integer(name, getattr(self, name), 1)
        for name, known in (("recompute", RECOMPUTE), ("zero", ZERO_STAGES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), map(str, known))
        if self.gpus != gpus:
            product = f"tp {self.tp} · pp {self.pp} · dp {self.dp} · cp {self.cp}"
            raise refuse("gpus", f"{product} = {self.gpus}", gpus)
        for name in ("tp", "pp", "dp", "cp"):
            check_axis(name, getattr(self, name), model, batch)
        if model.layers // self.pp % self.chunks:
            raise refuse("chunks", nearest_divisors(model.layers // self.pp, self.chunks, "layers/pp"), self.chunks)
        if batch // self.dp % self.micro_batch:
            divisors = nearest_divisors(batch // self.dp, self.micro_batch, "batch/dp")
            raise refuse("micro_batch", divisors, self.micro_batch)
        if self.chunks > 1 and (self.pp == 1 or self.micro_batches(batch) % self.pp):
            got = f"{self.micro_batches(batch)} micro-batches and pp = {self.pp}"
            raise refuse("chunks", "1, unless pp > 1 divides the micro-batches", f"{self.chunks}, with {got}")
        if self.sequence_parallel and model.seq // self.cp % self.tp:
            raise refuse("tp", nearest_divisors(model.seq // self.cp, self.tp, "seq/cp"), self.tp)
        if self.zero == 3 and (self.tp, self.cp, self.chunks) != (1, 1, 1):
            got = f"tp {self.tp}, cp {self.cp} and chunks {self.chunks}"
            raise ArgumentError(f"zero 3: expected tp 1, cp 1 and chunks 1, got {got}")


def check_axis(name: str, size: int, model: Transformer, batch: int) -> None:
    """Raise ArgumentError unless an axis of this size divides what it shares; the message names the nearest sizes."""
    shared = {"tp": ("heads", model.heads), "pp": ("layers", model.layers), "dp": ("batch", batch)}
    if name in shared:
        what, number = shared[name]
        if number % size:
            raise refuse(name, nearest_divisors(number, size, what), size)
        keys = model.kv_heads or size
        if name == "tp" and keys % size and size % keys:
            raise refuse(name, f"a multiple or a divisor of kv_heads = {keys}", size)
    elif size > 1 and model.seq % (2 * size):  # ring attention gives each rank two parts of the sequence
        divisors = nearest_divisors(model.seq // 2, size, "seq/2")
        raise refuse(name, f"1 for an odd seq of {model.seq}" if model.seq % 2 else divisors, size)
