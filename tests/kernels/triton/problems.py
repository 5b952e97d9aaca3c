"""Random steps over a paged cache, and the types and tolerances of the Triton kernels' tests.

Without a GPU the kernels run in Triton's interpreter, whose products of bfloat16 are wrong: that type is for a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.reference import write_kv
from pipeline.kernels.triton.launch import Launch, recording
from pipeline.weights.packed import GroupIntWeight
from tests.kernels.triton.interpreter import spare_the_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type != "cuda":
    spare_the_interpreter()

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str
)

ATTENTION = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # absolute; values are normal
PRODUCT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest
RELATIVE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one elementwise pass


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside, launches are put into the list instead of run."""
    launches: list[Launch] = []
    with recording(launches.append):
        yield launches


def close(ours: torch.Tensor, oracle: torch.Tensor) -> bool:
    """Within rounding of the float32 oracle; sums may cancel, so not of each value alone."""
    error, size = (ours.float().cpu() - oracle).abs(), oracle.abs() + oracle.square().mean().sqrt()
    return bool((error <= RELATIVE[ours.dtype] * size).all())


def make_dots_ordered(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products add up as those of a GPU do: each output in the order of the inputs, wherever in
    the tile it stands. numpy's library orders its sums by the place."""

    def create_dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        total = d.data
        for column, row in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype)):
            total = total + column[:, None] * row[None, :]
        return TensorHandle(total, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


@dataclass(frozen=True)
class Step:
    """Queries, a cache whose unused slots are NaN, and where everything lies."""

    q_TND: torch.Tensor
    cache: LayerCache
    where: AttentionInput

    @property
    def tensors(self) -> tuple[torch.Tensor, LayerCache]:
        return self.q_TND, self.cache

    @property
    def wide(self) -> tuple[torch.Tensor, LayerCache]:
        """On the CPU, in float32 but for codes, for the oracle."""
        tensors = (tensor.cpu() if tensor.dtype == FP8 else tensor.float().cpu() for tensor in self.cache.tensors)
        return self.q_TND.float().cpu(), LayerCache(*tensors)

    def alone(self, sequence: int) -> "Step":
        """One sequence of it, over the same caches."""
        w = self.where
        start, stop = int(w.query_start_S1[sequence]), int(w.query_start_S1[sequence + 1])
        where = AttentionInput(
            np.array([0, stop - start], dtype=np.int32),
            w.context_len_S[sequence : sequence + 1],
            w.block_table_SM[sequence : sequence + 1],
            w.slot_mapping_T[start:stop],
            w.block_size,
        )
        return Step(self.q_TND[start:stop], self.cache, where)


def make_step(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    with_fp8: bool = False,
) -> Step:
    """Sequences of (context, its last tokens that are queries) in scattered blocks; `heads` of queries and of keys.

    With FP8, heads of keys and values differ in size a thousandfold.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    blocks_of = [-(-context // block_size) for context, _ in lengths]
    num_blocks = sum(blocks_of) + 3
    order = rng.permutation(num_blocks)
    table = np.full((len(lengths), max(blocks_of)), -1, dtype=np.int32)
    kind = FP8 if with_fp8 else dtype
    cache = LayerCache.allocate(num_blocks, block_size, kv_heads, head_dim, kind, torch.device("cpu"))
    cache.fill(list(range(num_blocks)), float("nan"))
    slots, taken = [], 0
    for s, (context, count) in enumerate(lengths):
        mine = order[taken : taken + blocks_of[s]]
        taken += blocks_of[s]
        table[s, : len(mine)] = mine
        position = np.arange(context)
        slot = mine[position // block_size] * block_size + position % block_size
        k_LKD, v_LKD = torch.randn(context, kv_heads, head_dim), torch.randn(context, kv_heads, head_dim)
        if with_fp8:
            v_LKD *= 10 ** (-3 * torch.rand(context, kv_heads, 1))
        write_kv(k_LKD.to(dtype), v_LKD.to(dtype), cache, torch.from_numpy(slot))
        slots.append(slot[context - count :])
    query_start = np.concatenate([[0], np.cumsum([count for _, count in lengths])]).astype(np.int32)
    where = AttentionInput(
        query_start,
        np.array([context for context, _ in lengths], dtype=np.int32),
        table,
        torch.from_numpy(np.concatenate(slots)).to(DEVICE),
        block_size,
    )
    q_TND = torch.randn(int(query_start[-1]), num_heads, head_dim).to(DEVICE, dtype)
    return Step(q_TND, LayerCache(*(tensor.to(DEVICE) for tensor in cache.tensors)), where)


def sharing(step: Step, groups: list[tuple[list[int], int]]) -> Step:
    """The same, where the members of each group begin with the same blocks, so many: the first one's. What the others
    had there is NaN."""
    table_SM = step.where.block_table_SM
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
