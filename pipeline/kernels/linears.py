"""The interface of linears with packed weights. Suffixes: those of `kernels/contract.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from pipeline.weights.packed import LinearWeight

Linear = Callable[[Any], torch.Tensor]
"""x_TK -> y_TN, in x's type. Owns its packed weight. If it implements `InputKernels`, it also accepts their results."""


@runtime_checkable
class InputKernels(Protocol):
    """Kernels that compute a linear's inputs.

    They belong to the set (`Kernels`), or to the linear, which then returns its inputs in a private form. The linear's
    outputs are bit-identical either way.
    """

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, /
    ) -> tuple[Any, torch.Tensor]: ...

    def gate_mul(self, gate_up_T2F: torch.Tensor, activation: str, /) -> Any: ...


class Workspace:
    """Memory that the linears of a model share. It holds no weights: its contents change from call to call."""


@dataclass(frozen=True)
class RoundedLinears:
    """Linears on rounded activations, as `fp8.py` or `int8.py` of `kernels/activations/` defines them.

    prepare(weight) -> Linear, like `Kernels.prepare_linear`; None if the weight has no exact form in this type.
    """

    prepare: Callable[[LinearWeight], Linear | None]
    backends: str
