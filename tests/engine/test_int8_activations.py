"""The engine with activations in int8: tokens are those of the definition in plain torch, however rows are batched."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.kernels.cpu.linear.linear_int8 import multiplies_bytes
from pipeline.kernels.cpu.tiles.int8_tile import forms_here
from tests.engine.test_fp8_activations import completed
from tests.engine.test_gpu_kernels import QWEN3, engine_of
from tests.model_folders import Family, write_checkpoint
from tests.weights.packers import quantize_randomly

pytestmark = pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8")
    write_checkpoint(path / "plain", Family("qwen3", "qwen3"), QWEN3, seed=4)
    return quantize_randomly(path / "plain", path / "int4", group_size=64, zero_point=True, seed=5)


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 7}], ids=["at once", "one by one"]
)
def test_tokens_are_the_oracles(folder: Path, limits: dict[str, int]) -> None:
    expected, expected_likelihoods = completed(engine_of(folder, "reference", activation_dtype="int8"))
    tokens, likelihoods = completed(engine_of(folder, "cpu", activation_dtype="int8", **limits))
    assert tokens == expected
    assert np.median(abs(likelihoods - expected_likelihoods)) < 1e-4
    _, unrounded = completed(engine_of(folder, "cpu"))
    assert np.median(abs(unrounded - expected_likelihoods)) > 1e-3, "rounding would not be seen"


def test_it_says_what_is_in_int8(folder: Path) -> None:
    with engine_of(folder, "cpu", activation_dtype="int8") as engine:
        assert engine.resolved["weights"] == "AWQ int4, groups of 64; inputs of 8 of 9 linears in int8"
        told = f"4- and 8-bit weights: numba, products of bytes ({forms_here()[0].name}); others"
        assert str(engine.resolved["kernel.linear"]).startswith(told)
