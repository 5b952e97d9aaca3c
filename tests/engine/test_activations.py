"""The engine with activations in 8 bits: tokens are those of the definition in plain torch, in any batch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.startup import memory
from pipeline.engine.startup.memory import layer_bytes_on_gpu, weight_bytes
from pipeline.kernels.activations.act_quant import NOT_ROUNDED, Activations
from pipeline.kernels.cpu.linear.linear_int8 import has_vnni
from pipeline.kernels.cpu.tiles.int8_tile import forms_here
from pipeline.model.config import read_config
from pipeline.weights.formats import read_format
from tests.engine.test_gpu_kernels import engine_of
from tests.kernels.triton.problems import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]
FP8, INT8 = (Activations.for_all_weights(dtype) for dtype in ("fp8", "int8"))
ONE_BY_ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 7}
SERVED: list[tuple[str, str, dict[str, int]]] = [
    ("fp8", "triton", {}),
    ("fp8", "cpu", {}),
    ("fp8", "cpu", ONE_BY_ONE),
    ("int8", "cpu", {}),
    ("int8", "cpu", ONE_BY_ONE),
]


def completed(engine: Engine) -> tuple[list[list[int]], np.ndarray]:
    """Return greedy tokens of ragged prompts, two of which begin alike, and their log-probabilities."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 16).tolist()
    prompts = [(stem if n < 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate((10, 1, 5))]
    with engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0))
    likelihoods = [token.logprob for completion in done for token in completion.logprobs or ()]
    return [completion.token_ids for completion in done], np.array(likelihoods)


@pytest.fixture(scope="module")
def oracles(int4_folder: Path) -> dict[str, tuple[list[list[int]], np.ndarray]]:
    forms = ("auto", "fp8", "int8")
    return {form: completed(engine_of(int4_folder, "reference", activation_dtype=form)) for form in forms}


def skip_without_products_of_bytes(form: str) -> None:
    if form == "int8" and not has_vnni():
        pytest.skip("this processor has no AVX2")


@pytest.mark.parametrize(("form", "kernels", "limits"), SERVED)
def test_tokens_are_the_oracles(
    form: str, kernels: str, limits: dict[str, int], int4_folder: Path, oracles: dict[str, Any]
) -> None:
    skip_without_products_of_bytes(form)
    tokens, likelihoods = completed(engine_of(int4_folder, kernels, activation_dtype=form, **limits))
    assert tokens == oracles[form][0]
    assert np.median(abs(likelihoods - oracles[form][1])) < 1e-4


def test_each_form_gives_other_logits(oracles: dict[str, Any]) -> None:
    for one, other, least in (("auto", "fp8", 1e-2), ("auto", "int8", 1e-3)):
        assert np.median(abs(oracles[one][1] - oracles[other][1])) > least, "rounding would not be detected"


@pytest.mark.parametrize(
    ("form", "kernels", "linear"),
    [
        ("fp8", "triton", ".*fp8"),
        ("int8", "cpu", rf"4- and 8-bit weights: numba, products of bytes \({forms_here()[0].name}\); others"),
    ],
)
def test_the_resolved_settings_name_what_is_in_8_bits(form: str, kernels: str, linear: str, int4_folder: Path) -> None:
    skip_without_products_of_bytes(form)
    with engine_of(int4_folder, kernels, activation_dtype=form) as engine:
        assert engine.resolved["weights"] == f"AWQ int4, groups of 64; inputs of 8 of 9 linears in {form}"
        assert re.match(linear, str(engine.resolved["kernel.linear"]))
    with engine_of(int4_folder, kernels) as engine:
        assert form not in f"{engine.resolved['weights']} {engine.resolved['kernel.linear']}"


def test_a_draft_model_keeps_its_own_activations(int4_folder: Path) -> None:
    plain = str(int4_folder.with_name("plain"))
    speculation: Any = {"method": "draft_model", "model": plain, "num_speculative_tokens": 2, "forced": True}
    with engine_of(int4_folder, "cpu", activation_dtype="fp8", speculation=speculation) as engine:
        assert "8 of 9 linears in fp8" in str(engine.resolved["weights"])


def test_memory_is_planned_with_a_byte_a_weight(int4_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(int4_folder)
    gpu, linears = torch.device("cuda"), config.num_linear_parameters()
    rest = 2 * (config.num_parameters() - linears)
    planned = weight_bytes(config, gpu, torch.bfloat16, activations=FP8)
    assert planned == pytest.approx(rest + linears, abs=1)
    assert planned < weight_bytes(config, gpu, torch.bfloat16)
    int4, int8 = ({"num_bits": bits, "type": "int", "strategy": "channel"} for bits in (4, 8))
    groups = {"a": {"targets": ["re:.*attn"], "weights": int4}, "b": {"targets": ["Linear"], "weights": int8}}
    options = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    mixed = replace(config, quantization=read_format(options, int4_folder))
    for activations, per_weight in ((NOT_ROUNDED, 2), (FP8, 1)):
        bytes_on_gpu = weight_bytes(mixed, gpu, torch.bfloat16, activations=activations)
        assert bytes_on_gpu == rest + per_weight * linears
        assert layer_bytes_on_gpu(mixed, torch.bfloat16, activations) == [per_weight * linears // 2] * 2
    cpu, embeddings = torch.device("cpu"), 2 * config.vocab_size * config.hidden_size * torch.bfloat16.itemsize
    for alone, per_weight in ((False, 2 + 0.5 + 8 / 64), (True, 0.5 + 3 / 64)):  # with a dense form too, or without
        monkeypatch.setattr(memory, "supports_int4_alone", lambda dtype, alone=alone: alone)
        for activations, expected in ((INT8, 0.5 + 8 / 64), (FP8, 1), (NOT_ROUNDED, per_weight)):
            planned = weight_bytes(config, cpu, torch.bfloat16, activations=activations)
            assert planned == pytest.approx(embeddings + linears * expected, abs=1)
