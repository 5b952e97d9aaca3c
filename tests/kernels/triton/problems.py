"""Random steps over a paged cache, and the types and tolerances of the Triton kernels' tests.

Without a GPU the kernels run in Triton's interpreter, whose products of bfloat16 are wrong: that type is for a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.triton.attention.dispatch import plan_key
from pipeline.kernels.triton.launch import Launch, recording
from pipeline.weights.packed import GroupIntWeight
from tests.kernels.steps import Lengths, paged_step, widened
from tests.kernels.triton.interpreter import speed_up_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type != "cuda":
    speed_up_interpreter()

TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)

ATTENTION = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # absolute; values are normal
PRODUCT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest
RELATIVE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one elementwise pass


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Append launches to the yielded list instead of running them."""
    launches: list[Launch] = []
    with recording(launches.append):
        yield launches


def close(ours: torch.Tensor, oracle: torch.Tensor) -> bool:
    """Return whether ours is within rounding of the float32 oracle. Sums may cancel: the mean size counts too."""
    error, size = (ours.float().cpu() - oracle).abs(), oracle.abs() + oracle.square().mean().sqrt()
    return bool((error <= RELATIVE[ours.dtype] * size).all())


def make_dots_ordered(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products add up as on a GPU: each output in the order of the inputs, at any index of the
    tile. numpy's library orders its sums by the index."""

    def create_dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        total = d.data
        for column, row in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype)):
            total = total + column[:, None] * row[None, :]
        return TensorHandle(total, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


@dataclass(frozen=True)
class Step:
    """Queries, a cache whose unused slots are NaN, and attention metadata."""

    q_TND: torch.Tensor
    cache: LayerCache
    attn_metadata: AttentionInput

    @property
    def tensors(self) -> tuple[torch.Tensor, LayerCache]:
        return self.q_TND, self.cache

    @property
    def wide(self) -> tuple[torch.Tensor, LayerCache]:
        """Queries and cache for the oracle: on the CPU, in float32 except codes."""
        return self.q_TND.float().cpu(), widened(self.cache)

    def plan(self, window: int | None) -> Any:
        """Return the plan that attention made for the layers with this window."""
        return self.attn_metadata.plans[plan_key(window, *self.cache.k_CBKD.shape[2:])]


def make_step(
    lengths: Lengths,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    with_fp8: bool = False,
) -> Step:
    """Build a `paged_step` and its queries; `heads` of queries and of keys."""
    torch.manual_seed(seed)
    attn_metadata, cache = paged_step(
        lengths, heads[1], head_dim, block_size, dtype, np.random.default_rng(seed), with_fp8
    )
    attn_metadata = replace(attn_metadata, slot_mapping_T=attn_metadata.slot_mapping_T.to(DEVICE))
    q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), heads[0], head_dim).to(DEVICE, dtype)
    return Step(q_TND, LayerCache(*(tensor.to(DEVICE) for tensor in cache.tensors)), attn_metadata)


def sharing(step: Step, groups: list[tuple[list[int], int]]) -> Step:
    """Let each group's members begin with this number of the first one's blocks. The replaced blocks become NaN."""
    table_SM = step.attn_metadata.block_table_SM
    for (first, *others), blocks in groups:
        step.cache.fill(table_SM[others, :blocks].ravel().tolist(), float("nan"))
        table_SM[others, :blocks] = table_SM[first, :blocks]
    return step


def random_weight(num_outputs: int, num_inputs: int, group: int, bias: bool = False, seed: int = 0) -> GroupIntWeight:
    torch.manual_seed(seed)
    groups = (num_outputs, num_inputs // group)
    return GroupIntWeight(
        torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8),
        ((torch.rand(groups) + 0.5) * num_inputs**-0.5 / 4.6).half().float(),
        torch.randint(0, 16, groups).float(),
        group,
        torch.randn(num_outputs).half().float() if bias else None,
    )
