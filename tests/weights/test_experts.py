"""Weights of experts: MXFP4 blocks of all experts in one tensor, as gpt-oss has them, and FP8 linears per expert."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pipeline.engine.startup.resolve import quantized_on_load
from pipeline.errors import ModelError
from pipeline.model.config import read_config
from pipeline.model.load import WeightReader, checkpoint_files
from pipeline.weights.formats import read_format
from pipeline.weights.fp4 import read_expert_blocks
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight
from pipeline.weights.round_to_nearest import METHODS
from pipeline.weights.tensor_reader import StoredLinear
from tests.model_folders import FAMILIES, Named, make_family
from tests.weights.packers import fp8, named
from tests.weights.test_refusals import FP8, PATH
from tests.weights.test_round_to_nearest import rounded_rows

E, N, K = 3, 6, 64
PREFIX = "model.layers.0.mlp.experts"
BLOCKS, SCALES = f"{PREFIX}.down_proj_blocks", f"{PREFIX}.down_proj_scales"


def stored_experts() -> Named:
    """Return blocks and scales with every byte and exponents over the whole range of float32."""
    rng = np.random.default_rng(5)
    blocks = rng.permutation(np.arange(E * N * K // 2) % 256).astype(np.uint8).reshape(E, N, K // 32, 16)
    scales = np.linspace(1, 249, E * N * K // 32).astype(np.uint8).reshape(E, N, K // 32)
    return Named({BLOCKS: torch.from_numpy(blocks), SCALES: torch.from_numpy(scales)})


def read(tensors: Named, shape_NK: tuple[int, int] = (N, K), num_experts: int = E) -> list[CodebookWeight]:
    return read_expert_blocks(StoredLinear(PREFIX, shape_NK, tensors), "down_proj", num_experts)


def test_experts_in_mxfp4_are_those_that_transformers_dequantizes() -> None:
    tensors = stored_experts()
    expected_EKN = convert_moe_packed_tensors(tensors[BLOCKS], tensors[SCALES], dtype=torch.float32)
    found = read(tensors)
    assert len(found) == E
    for weight, expected_KN in zip(found, expected_EKN):
        assert torch.equal(weight.dequantize(torch.float32), expected_KN.T)
    bias_EN = torch.arange(E * N).view(E, N)
    biased = read_expert_blocks(StoredLinear(PREFIX, (N, K), tensors), "down_proj", E, bias_EN)
    assert [weight.bias_N.tolist() for weight in biased if weight.bias_N is not None] == bias_EN.tolist()


def test_expert_blocks_that_do_not_fit_are_refused_by_name() -> None:
    tensors = stored_experts()
    nan = tensors[SCALES].clone()
    nan[1, 2, 0] = 255
    for name, wrong in ((BLOCKS, tensors[BLOCKS][:2]), (BLOCKS, tensors[BLOCKS].flatten(2)), (SCALES, nan),
                        (BLOCKS, tensors[BLOCKS].to(torch.int32)), (SCALES, tensors[SCALES][:, 1:])):  # fmt: skip
        with pytest.raises(ModelError, match=rf"^{name}: "):
            read(Named(tensors | {name: wrong}))
    with pytest.raises(ModelError, match=f"^{PREFIX}: 48 inputs are not a multiple of the group size 32"):
        read(tensors, (N, 48))
    with pytest.raises(ModelError, match=r"found \(3, 6, 2, 16\) torch.uint8, expected \(4, 6, 2, 16\)"):
        read(tensors, num_experts=4)


def test_the_other_linears_of_such_a_checkpoint_are_not_quantized() -> None:
    form = read_format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, PATH)
    weight_NK = torch.ones(4, 32, dtype=torch.bfloat16)
    plain = form.read_linear(StoredLinear("a.q_proj", (4, 32), Named({"a.q_proj.weight": weight_NK})))
    assert torch.equal(plain.dequantize(torch.bfloat16), weight_NK)


@pytest.mark.parametrize("linear", ["gate_proj", "down_proj"])
def test_fp8_blocks_of_an_expert(linear: str) -> None:
    """Linears of one expert are read like any other."""
    prefix, shape_NK = f"{PREFIX}.3.{linear}", (48, 80)
    tensors, dense = fp8((32, 32), "weight_scale_inv")(np.random.default_rng(0), shape_NK)
    weight = read_format(FP8, PATH).read_linear(StoredLinear(prefix, shape_NK, named(prefix, tensors)))
    assert isinstance(weight, Fp8Weight)
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(dense))


def test_experts_of_one_tensor_or_of_their_own_are_the_same(tmp_path: Path) -> None:
    """Gemma 4's checkpoint has them in one tensor, those that are quantized linear by linear have them apart."""
    folder = make_family(tmp_path, next(family for family in FAMILIES if family.name == "gemma4-moe"), seed=1)
    config = read_config(folder)
    packed = next(WeightReader(folder, config).layers()).routed
    tensors = {name: tensor for file in checkpoint_files(folder) for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if name.endswith((".gate_up_proj", "experts.down_proj"))]:
        prefix, _, linear = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if linear == "gate_up_proj" else [linear]
        for expert, weight_NK in enumerate(tensors.pop(name)):
            for part, part_NK in zip(parts, weight_NK.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{expert}.{part}.weight"] = part_NK.clone()
    for file in checkpoint_files(folder):
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    apart = next(WeightReader(folder, config).layers()).routed
    assert packed is not None
    assert apart is not None
    one, other = ((*each.experts.gate_up, *each.experts.down) for each in (packed, apart))
    for weight, its in zip(one, other, strict=True):
        assert torch.equal(weight.dequantize(torch.float32), its.dequantize(torch.float32))


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4-moe"])
def test_experts_of_one_tensor_are_quantized_on_load(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    folder = make_family(tmp_path, family, seed=1)
    config = read_config(folder)
    plain = next(WeightReader(folder, config).layers()).routed
    assert plain is not None
    for method in METHODS:
        routed = next(WeightReader(folder, quantized_on_load(config, method)).layers()).routed
        assert routed is not None
        quantized, dense = ((*each.experts.gate_up, *each.experts.down) for each in (routed, plain))
        for found, expected in zip(quantized, dense, strict=True):
            assert not isinstance(found, DenseWeight)
            rounded = rounded_rows(expected.dequantize(torch.float32).numpy(), method)
            assert torch.equal(found.dequantize(torch.float32), torch.from_numpy(rounded))
            if name == "gpt-oss":
                assert found.bias_N is not None
                assert expected.bias_N is not None
                assert torch.equal(found.bias_N, expected.bias_N)
