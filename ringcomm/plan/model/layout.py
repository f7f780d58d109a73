"""How a model is divided over GPUs: the axes of a `Grid`, the schedule of its pipeline, and what it keeps in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringcomm.errors import integer, refuse, unknown
from ringcomm.layout_rules import RULES, Refusal, Rule, broken
from ringcomm.plan.model.transformer import MOST, Transformer

__all__ = [
    *("PLANNED", "RECOMPUTE", "SCHEDULES", "ZERO_STAGES", "ParallelLayout", "numbers_of"),
    "with_schedule",
]

RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = {(False, False): "1f1b", (False, True): "interleaved", (True, False): "zb-h1", (True, True): "zbv"}


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

    def numbers(self, model: Transformer, batch: int) -> dict[str, Any]:
        """Return what the rules relate."""
        of_schedule = {"schedule": self.schedule, "micro_batches": self.micro_batches(batch)}
        return vars(self) | of_schedule | numbers_of(model, batch)

    def check(self, model: Transformer, batch: int, gpus: int, attention: str | None = None) -> None:
        """Check that `ringcomm.parallel` can run the layout, and that nothing of it is idle.

        Args:
            model: the model
            batch: sequences of a batch
            gpus: number of GPUs
            attention: that of the device, if it is known

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
        if error := broken(self.numbers(model, batch) | {"attention": attention}, rules=PLANNED):
            raise error


def numbers_of(model: Transformer, batch: int) -> dict[str, Any]:
    """Return what the rules of layouts relate to the axes."""
    keys = model.kv_heads or model.heads
    shared = {"layers": model.layers, "heads": model.heads, "kv_heads": keys, "ffn": model.inner, "seq": model.seq}
    return shared | {"experts": model.experts, "batch": batch}


def with_schedule(schedule: str | None = None, **fields: Any) -> ParallelLayout:
    """Return the layout with these fields; a schedule that is given brings the chunks that it needs.

    Raises:
        ArgumentError: the chunks are those of another schedule, or it needs a pipeline, and there is none.
    """
    split, several = next((kind for kind, name in SCHEDULES.items() if name == schedule), (False, False))
    layout = ParallelLayout(**{"chunks": 1 + several, "split_backward": split} | fields)
    if (split or several) and layout.pp == 1:
        raise refuse("schedule", "1f1b with pp 1", schedule)
    if schedule not in (None, layout.schedule):
        raise refuse("schedule", f"{layout.schedule}, with chunks {layout.chunks}", schedule)
    return layout


# --- Layouts that `ringcomm.parallel` can run, but that leave something idle -----------------------------------------


def _idle_chunks(pp: int, chunks: int) -> Refusal:
    return refuse("chunks", "1 with pp 1", chunks) if pp == 1 < chunks else None


def _idle_split(schedule: str, split_backward: bool, pp: int) -> Refusal:
    return refuse(f"schedule {schedule}", "pp > 1", "pp 1") if split_backward and pp == 1 else None


def _nothing_to_shard(sequence_parallel: bool, tp: int) -> Refusal:
    return refuse("sequence_parallel", "tp > 1", "tp 1") if sequence_parallel and tp == 1 else None


def _nothing_to_share(zero: int, dp: int, cp: int) -> Refusal:
    return refuse(f"zero {zero}", "dp > 1 or cp > 1", "dp 1 and cp 1") if zero and dp * cp == 1 else None


# --- What the attention of a device cannot do -------------------------------------------------------------------------


def _fused_rings(attention: str, cp: int) -> Refusal:
    unfused = attention == "unfused" and cp > 1
    return refuse("cp", "1 with unfused attention, as ring attention is fused", cp) if unfused else None


def _stored_scores(attention: str, recompute: str) -> Refusal:
    if attention == "fused" and recompute == "selective":
        return refuse("recompute", "none or full with fused attention, which stores no scores", recompute)
    return None


_OWN: tuple[Callable[..., Refusal], ...] = (
    *(_idle_chunks, _idle_split, _nothing_to_shard, _nothing_to_share),
    *(_fused_rings, _stored_scores),
)
PLANNED = (*RULES, *map(Rule.of, _OWN))
