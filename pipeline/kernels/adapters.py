"""The interface of LoRA adapters. Suffixes: those of `kernels/contract.py`, and R the rank of an update."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

P = TypeVar("P")


@dataclass(frozen=True)
class LowRankUpdate:
    """Update of a linear by an adapter: y += (x @ a_RK.T) @ b_NR.T, with R its rank. b includes the adapter's scale."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.a_RK.nbytes + self.b_NR.nbytes

    def select_outputs(self, row_N: torch.Tensor) -> "LowRankUpdate":
        """Return the update of these outputs (int64), in this order."""
        return LowRankUpdate(self.a_RK, self.b_NR[row_N])

    def select_inputs(self, start: int, stop: int) -> "LowRankUpdate":
        """Return the update that reads only inputs start:stop. Those of a partition of the inputs add up to the whole
        update."""
        return LowRankUpdate(self.a_RK[:, start:stop].contiguous(), self.b_NR)


@dataclass(frozen=True)
class AdapterTokens:
    """Index of each token's adapter. One object serves all linears of a step that compute the same tokens."""

    adapter_T: np.ndarray  # int64; -1: none
    num_adapters: int
    device: torch.device
    _plans: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def plan(self, make: Callable[["AdapterTokens"], P]) -> P:
        """Return `make(self)`, computed by the first linear of the step."""
        if make not in self._plans:
            self._plans[make] = make(self)
        return self._plans[make]


class Lora(Protocol):
    """The updates of a linear by all adapters, on the device."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, y_TN: torch.Tensor, x_TK: torch.Tensor, tokens: AdapterTokens) -> None:
        """Add the update of each token's adapter to y, in place."""
        ...
