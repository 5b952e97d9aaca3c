"""Batch-invariant linears and attention: within rounding of the oracle, and a row's bits do not depend on its batch.
Each comparison finds differences of the kernels that do not promise it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.triton.attention.dispatch import PagedAttention
from pipeline.kernels.triton.batch_invariant import (
    BatchInvariantAttention,
    prepare_linear,
)
from pipeline.kernels.triton.launch import A100, H100
from pipeline.kernels.triton.linear.dispatch import DequantBuffer, TwoPathLinear
from pipeline.kernels.triton.linear.fixed_order import fixed_launches, part_inputs, tile_for
from pipeline.weights.packed import DenseWeight
from tests.kernels.activations.test_fp8 import fp8_weight
from tests.kernels.steps import softmax_options
from tests.kernels.triton import problems
from tests.kernels.triton.problems import ATTENTION, DEVICE, DTYPES, PRODUCT, Step, make_step, random_weight

# numpy's, of padding rows: 0 / 0 in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _dots_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    problems.make_dots_ordered(monkeypatch)


NUM_INPUTS, NUM_OUTPUTS = 1100, 70  # two parts, the second one shorter, and a last step that is not whole
TOKENS = 1, 7, 64, 65, 129


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def differing(linear: Callable[[torch.Tensor], torch.Tensor], x_MK: torch.Tensor) -> list[int]:
    """Return the numbers in TOKENS at which that many rows alone differ from the same rows among all rows of x."""
    whole_MN = linear(x_MK)
    return [count for count in TOKENS if not torch.equal(linear(x_MK[-count:]), whole_MN[-count:])]


@DTYPES
def test_a_row_of_a_product_is_independent(dtype: torch.dtype) -> None:
    weight = DenseWeight(normal(NUM_OUTPUTS, NUM_INPUTS) * NUM_INPUTS**-0.5, normal(NUM_OUTPUTS))
    linear = prepare_linear(weight, dtype, DEVICE)
    x_MK = normal(130, NUM_INPUTS).to(DEVICE, dtype)
    assert weight.bias_N is not None
    oracle = x_MK.float().cpu() @ weight.weight_NK.to(dtype).float().T + weight.bias_N.to(dtype).float()
    found = linear(x_MK)
    assert found.dtype == dtype
    assert float((found.float().cpu() - oracle).abs().max() / oracle.abs().max()) < PRODUCT[dtype]
    assert differing(linear, x_MK) == []
    apart = torch.cat([x_MK, x_MK], dim=1)[:, :NUM_INPUTS]
    assert torch.equal(linear(apart[:3]), found[:3])
    assert linear(x_MK[:0]).shape == (0, NUM_OUTPUTS)


def test_torchs_product_is_not() -> None:
    weight_NK, x_MK = (normal(*sizes).to(DEVICE) for sizes in ((NUM_OUTPUTS, NUM_INPUTS), (130, NUM_INPUTS)))
    assert differing(lambda x: x @ weight_NK.T, x_MK)


ORDER_K = torch.randperm(512, generator=torch.Generator().manual_seed(2))
PACKED = {
    "4 bits": random_weight(40, 512, 64, bias=True),
    "reordered": replace(random_weight(40, 512, 64, bias=True), input_order_K=ORDER_K),
    "fp8": replace(fp8_weight(40, 512, (40, 128)), bias_N=torch.randn(40)),
}


@pytest.mark.parametrize(("with_scratch", "name"), [(False, "4 bits"), *((True, name) for name in PACKED)])
def test_packed_weights_have_one_path(with_scratch: bool, name: str) -> None:
    """Widening once or in each call gives the same bits, which are not those of the fused product."""
    weight = PACKED[name]
    scratch = DequantBuffer(torch.float32, DEVICE) if with_scratch else None
    linear = prepare_linear(weight, torch.float32, DEVICE, scratch)
    x_MK = normal(130, 512).to(DEVICE)
    assert weight.bias_N is not None
    oracle = x_MK.cpu() @ weight.dequantize(torch.float32).T + weight.bias_N
    assert float((linear(x_MK).cpu() - oracle).abs().max() / oracle.abs().max()) < PRODUCT[torch.float32]
    assert differing(linear, x_MK) == []
    if with_scratch and name != "reordered":
        assert torch.equal(linear(x_MK), prepare_linear(weight, torch.float32, DEVICE)(x_MK))
        fused, dense = TwoPathLinear(weight, torch.float32, DEVICE, scratch), linear(x_MK[:7])
        assert not torch.equal(fused(x_MK[:7]), dense)


def test_parts_depend_on_the_weight_alone() -> None:
    """Cuts of the inputs and the tile are the same at every number of tokens."""
    for target in (A100, H100):
        tile = tile_for(torch.bfloat16, target)
        for num_outputs, num_inputs in ((4096, 14336), (6144, 4096), (1024, 3072), (128256, 4096), (896, 4864)):
            part = part_inputs(num_outputs, num_inputs, tile)
            assert part % tile.depth == 0
            assert part >= min(512, num_inputs)
            seen = set()
            for num_tokens in (1, 100, 128, 129, 5000):
                sizes = (num_tokens, num_inputs), (num_outputs, num_inputs), (num_tokens, num_outputs)
                x, weight, out = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
                first = fixed_launches(x, weight, None, out, target)[0]
                constants = dict(first.constants)
                parts = first.grid[1] * constants.pop("PARTS")
                assert parts * part >= num_inputs > (parts - 1) * part
                seen.add((parts, first.num_warps, first.num_stages, *constants.items()))
            assert len(seen) == 1
    assert part_inputs(128256, 4096, tile) == 4096, "many outputs need no parts"
    assert part_inputs(4096, 4096, tile) < 4096


# -- attention


BATCH = [(1100, 1), (70, 3), (129, 129), (200, 40), (1, 1)]


def of_rows(
    attention: Callable[..., torch.Tensor],
    step: Step,
    rows: np.ndarray,
    window: int | None,
    *options: float | torch.Tensor | None,
) -> torch.Tensor:
    """Compute some query tokens, each as a separate sequence."""
    q_RND = step.q_TND[torch.from_numpy(rows)]
    return attention(q_RND, step.cache, step.attn_metadata.rows(rows), 0.3, window, *options)


@DTYPES
@pytest.mark.parametrize(("window", "kind"), [(None, ""), (13, ""), (None, "softcap and sinks")])
def test_a_query_is_independent_of_others_in_its_tile(window: int | None, kind: str, dtype: torch.dtype) -> None:
    step = make_step(BATCH, (2, 1), 16, 64, dtype)
    attention, options = BatchInvariantAttention(DEVICE), softmax_options(kind, 2, DEVICE)
    together = attention(*step.tensors, step.attn_metadata, 0.3, window, *options)
    oracle = reference_attention(*step.wide, step.attn_metadata, 0.3, window, *softmax_options(kind, 2))
    assert torch.isfinite(together).all()
    assert float((together.float().cpu() - oracle).abs().max()) < ATTENTION[dtype]
    some = np.r_[0, 1, 3, 4, 67, 68, 131, 132, 140, 171, 172, 173]
    for row in some:
        assert torch.equal(of_rows(attention, step, np.array([row]), window, *options)[0], together[row])
    rows = np.random.default_rng(1).permutation(len(step.q_TND))[:50]
    assert torch.equal(of_rows(attention, step, rows, window, *options), together[torch.from_numpy(rows)])


def test_the_other_kernels_depend_on_the_batch() -> None:
    step = make_step([(1100, 1), (70, 3), (1300, 1)], (2, 1), 16, 64, torch.float32)
    together = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
    alone = torch.cat([of_rows(PagedAttention(DEVICE), step, np.array([row]), None) for row in range(5)])
    assert not torch.equal(alone, together)


@pytest.mark.parametrize(("group", "head_dim"), [(5, 80), (7, 16), (1, 144)])
def test_groups_and_head_sizes(group: int, head_dim: int) -> None:
    step = make_step([(67, 1), (130, 20), (70, 3)], (2 * group, 2), head_dim, 16, torch.float32)
    ours = BatchInvariantAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
    oracle = reference_attention(*step.wide, step.attn_metadata, 0.3, None)
    assert float((ours.cpu() - oracle).abs().max()) < ATTENTION[torch.float32]
