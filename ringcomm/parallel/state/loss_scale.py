"""The loss scale of float16, whose small gradients would underflow."""

from collections.abc import Mapping
from typing import TypedDict

import torch

__all__ = ["LossScale", "LossScaleOptions"]


class LossScaleOptions(TypedDict, total=False):
    """The options of a LossScale."""

    init_scale: float
    growth_interval: int


class LossScale:
    """A factor for the loss: halved when gradients overflow, doubled after `growth_interval` steps without overflow.

    After Micikevicius et al., Mixed Precision Training (arXiv 1710.03740). It is always 1 for other dtypes than
    float16: bfloat16 has the range of float32.

    Args:
        dtype: that of the parameters
        init_scale: initial scale
        growth_interval: steps without overflow before the scale doubles
    """

    def __init__(
        self, dtype: torch.dtype | None = None, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self._dynamic, self._growth_interval = dtype == torch.float16, growth_interval
        self.value = init_scale if self._dynamic else 1.0
        self._good_steps = 0  # since the scale changed

    def update(self, *, found_inf: bool) -> None:
        """Account for a step; `found_inf`: it was skipped, because a gradient was not finite."""
        if not self._dynamic:
            return
        self._good_steps = 0 if found_inf else self._good_steps + 1
        if found_inf:
            self.value /= 2
        elif self._good_steps == self._growth_interval:
            self.value, self._good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state, empty for other dtypes than float16."""
        return {"scale": self.value, "good_steps": self._good_steps} if self._dynamic else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state; without effect unless both this scale and the saved one are of float16."""
        if self._dynamic and state.get("scale"):
            self.value, self._good_steps = state["scale"], int(state["good_steps"])
