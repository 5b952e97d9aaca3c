"""Adapters in grouped products against the reference in float32."""

import numpy as np
import pytest
import torch

from pipeline.kernels.adapters import AdapterTokens
from pipeline.kernels.reference import LoopedLora
from pipeline.kernels.triton.kernel_set import triton_kernels
from tests.kernels.lora import random_updates
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT, recorded_launches

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of empty columns in the interpreter
CPU = torch.device("cpu")
STEPS = {
    "one token": ((5,), (0,)),
    "one base token": ((5,), (-1,)),
    "one adapter": ((5,), (0,) * 19),
    "three and the base model between": ((4, 33, 8), (0, -1, 2, 2, -1, 1, 0, 1, -1)),
    "one without this linear": ((4, 0, 16), (1, 0, -1, 1, 2)),
    "several tiles of an adapter": ((3, 7), (1, *(0,) * 70, -1, 0)),
    "an adapter without tokens": ((3, 7, 2), (2, 2, 0)),
}


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).half().float()


@DTYPES
@pytest.mark.parametrize("step", STEPS)
def test_updates_equal_those_of_the_reference(step: str, dtype: torch.dtype) -> None:
    """Outputs and inputs end within a tile. Rows without an update keep their bits."""
    ranks, adapters = STEPS[step]
    updates, adapter_T = random_updates(ranks, 72, 160), np.array(adapters)
    x_TK, y_TN = normal(len(adapters), 160), normal(len(adapters), 72)
    expected, ours = y_TN.clone(), y_TN.to(DEVICE, dtype, copy=True)
    LoopedLora(updates, torch.float32, CPU)(expected, x_TK, AdapterTokens(adapter_T, len(ranks), CPU))
    lora, tokens = triton_kernels(dtype, DEVICE).prepare_lora(updates), AdapterTokens(adapter_T, len(ranks), DEVICE)
    lora(ours, x_TK.to(DEVICE, dtype), tokens)
    assert float((ours.float().cpu() - expected).abs().max() / expected.abs().max()) < 3 * PRODUCT[dtype]
    changed_T = torch.tensor([adapter >= 0 and updates[adapter] is not None for adapter in adapters])
    assert torch.equal((ours.cpu() != y_TN.to(dtype)).any(dim=1), changed_T)


def test_adapters_share_two_launches_and_linears_the_list_of_tokens() -> None:
    kernels, tokens = triton_kernels(torch.float32, DEVICE), AdapterTokens(np.array([0, 1, -1, 2]), 3, DEVICE)
    loras = [kernels.prepare_lora(random_updates((4, 8, 2), 32, 64)) for _ in range(2)]
    x_TK, y_TN = normal(4, 64).to(DEVICE), normal(4, 32).to(DEVICE)
    with recorded_launches() as launches:
        for lora in loras:
            lora(y_TN, x_TK, tokens)
    assert [launch.kernel.__name__ for launch in launches] == ["_assign", *["_multiply_grouped"] * 4]


@pytest.mark.parametrize("adapters", [(), (-1, -1, -1)], ids=["no tokens", "only the base model"])
def test_rows_without_an_adapter_launch_nothing(adapters: tuple[int, ...]) -> None:
    """The last layer may compute only such tokens of a step with adapters."""
    lora = triton_kernels(torch.float32, DEVICE).prepare_lora(random_updates((4,), 32, 64))
    tokens = AdapterTokens(np.array(adapters, dtype=np.int64), 1, DEVICE)
    with recorded_launches() as launches:
        lora(normal(len(adapters), 32).to(DEVICE), normal(len(adapters), 64).to(DEVICE), tokens)
    assert launches == []
