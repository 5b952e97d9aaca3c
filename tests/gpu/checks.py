"""Checks of kernels before they are timed: each result against the reference in float32, on the very inputs timed.

The reference gets the same inputs, rounded to the kernel's type before. An error is the largest difference over the
largest value of the reference's result. A kernel that fails to compile or to start is a failed check with its reason.
Odd shapes, the batch-invariant kernels and the engine's tokens are tested by `tests/gpu`.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipeline.bench.measure import table

TOLERANCES = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8_CODE = 0.08  # the step between the largest codes of FP8, over the largest: values on a tie may round either way

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Results of a kernel, each with the reference's."""


@dataclass(frozen=True)
class Check:
    """error: None where the kernel failed, for the reason in `failure`."""

    kernel: str
    case: str
    dtype: str
    served_by: str
    error: float | None
    tolerance: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    def to_text(self) -> str:
        why = self.failure or f"error {self.error:.1e}, {self.tolerance:.1e} allowed"
        return f"{self.kernel} {self.dtype}, {self.case}: {why}"


@dataclass(frozen=True)
class Correctness:
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        return {"passed": len(self.checks) - len(self.failed), "checks": [asdict(check) for check in self.checks]}

    def to_text(self) -> str:
        lines = [
            f"Against the reference in float32, on the inputs that are timed: {len(self.checks) - len(self.failed)} of "
            f"{len(self.checks)} checks passed. Largest errors, over the largest value:",
        ]
        rows = []
        for kernel, dtype in dict.fromkeys((check.kernel, check.dtype) for check in self.checks):
            of = [check for check in self.checks if (check.kernel, check.dtype) == (kernel, dtype)]
            errors = [check.error for check in of if check.error is not None]
            error = max(errors) if errors else "none ran"
            rows.append((kernel, dtype, len(of), error, of[0].tolerance, of[0].served_by))
        lines += table("kernel <20 | type <9 | checks >6 | error >9.1e | allowed >9.1e | served by <1", rows)
        lines += [f"FAILED {check.to_text()}" for check in self.failed]
        return "\n".join(lines)


def check(
    kernel: str, case: str, dtype: torch.dtype, served_by: str, tolerance: float, run: Callable[[], Pairs]
) -> Check:
    error, failure = None, ""
    try:
        with torch.inference_mode():
            worst = max(relative_error(actual, expected) for actual, expected in run())
        if math.isfinite(worst):
            error = worst
        else:
            failure = "values that are not finite, or another shape than the reference's"
    except Exception as reason:  # whatever a compiler or a driver raises is this check's result
        failure = f"{type(reason).__name__}: {str(reason).strip()[:500]}"
    return Check(kernel, case, str(dtype).removeprefix("torch."), served_by, error, tolerance, failure)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinite where anything is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    wide, exact = actual.float(), expected.float()
    if not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - exact).abs().max() / exact.abs().max().clamp_min(1e-20))
