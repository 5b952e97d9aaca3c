"""Rounding on load: each method against its own definition written out, bounds of the error, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engine.startup.resolve import quantized_on_load
from pipeline.errors import ConfigError, ModelError
from pipeline.model.config import read_config
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight
from pipeline.weights.round_to_nearest import METHODS, NF4, RoundToNearest
from pipeline.weights.tensor_reader import StoredLinear
from tests.kernels.activations.test_fp8 import nearest
from tests.model_folders import Named, write_tokenizer
from tests.weights.packers import write_pair


def rounded_rows(weight: np.ndarray, method: str) -> np.ndarray:
    """Round a weight (N, K) with `method`, a group at a time."""
    out = np.empty_like(weight)
    n, k = weight.shape
    size = {"fp8": k, "int8": k, "int4-rtn": next(g for g in (128, 64, 32, k) if k % g == 0)}.get(
        method, next(g for g in (64, 32, k) if k % g == 0)
    )
    for row in range(n):
        for start in range(0, k, size):
            values = weight[row, start : start + size]
            if method == "int8":
                scale = np.float32(np.abs(values).max()) / np.float32(127)
                scale = scale if scale else np.float32(1)
                made = np.rint(values / scale) * scale
            elif method == "fp8":
                scale = np.maximum(np.abs(values).max(), np.float32(2.0**-80)) / np.float32(448)
                made = nearest(values / scale) * scale
            elif method == "int4-rtn":
                low, high = min(values.min(), np.float32(0)), max(values.max(), np.float32(0))
                scale = np.float32(high - low) / np.float32(15)
                scale = scale if scale else np.float32(1)
                zero = np.rint(-low / scale)
                made = (np.clip(np.rint(values / scale) + zero, 0, 15) - zero) * scale
            else:
                scale = np.abs(values).max()
                scale = scale if scale else np.float32(1)
                table = np.array(NF4, dtype=np.float32)
                made = table[np.abs(values[:, None] / scale - table).argmin(1)] * scale
            out[row, start : start + size] = made
    return out


def rounded(plain: Path, folder: Path, method: str) -> Path:
    """Write a dense checkpoint with the weights of `plain` rounded by `method`."""
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = torch.from_numpy(rounded_rows(tensor.numpy(), method))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((plain / "config.json").read_text())
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inputs", [256, 192, 96, 40])
def test_each_weight_goes_to_the_nearest_value(method: str, inputs: int) -> None:
    torch.manual_seed(inputs)
    weight_NK = torch.randn(12, inputs) * 0.1
    weight_NK[3] = 0
    weight_NK[4] = weight_NK[4].abs()
    weight_NK[5, : inputs // 2] = 0
    made = RoundToNearest(method).read_linear(
        StoredLinear("a.q_proj", (12, inputs), Named({"a.q_proj.weight": weight_NK}))
    )
    assert isinstance(made, {"fp8": Fp8Weight, "nf4": CodebookWeight}.get(method, GroupIntWeight))
    assert torch.equal(made.dequantize(torch.float32), torch.from_numpy(rounded_rows(weight_NK.numpy(), method)))
    assert torch.equal(made.dequantize(torch.float32)[3], torch.zeros(inputs))
    error = (made.dequantize(torch.float32) - weight_NK).abs() / weight_NK.abs().amax(1, keepdim=True).clamp_min(1e-9)
    assert float(error.max()) < {"fp8": 1 / 16, "int8": 0.5 / 127 + 1e-6, "int4-rtn": 1.01 / 15, "nf4": 0.16}[method]


def test_the_output_embedding_stays_and_what_is_no_number_is_refused() -> None:
    weight_NK = torch.randn(8, 64)
    plain = RoundToNearest("int8").read_linear(StoredLinear("lm_head", (8, 64), Named({"lm_head.weight": weight_NK})))
    assert isinstance(plain, DenseWeight)
    assert plain.weight_NK is weight_NK
    weight_NK[1, 1] = float("inf")
    with pytest.raises(ModelError, match=r"a\.weight: contains infinities"):
        RoundToNearest("nf4").read_linear(StoredLinear("a", (8, 64), Named({"a.weight": weight_NK})))


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    quantized, plain = write_pair(
        tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, lambda stem: None
    )
    with pytest.raises(ConfigError, match=r"model\.quantization = 'int8': .*already \(GPTQ int4, groups of 32\)"):
        quantized_on_load(read_config(quantized), "int8")
    with pytest.raises(ConfigError, match="expected none, fp8, int8, int4-rtn, nf4"):
        quantized_on_load(read_config(plain), "int3")
    config = read_config(plain)
    assert quantized_on_load(config, "none") is config
    assert str(quantized_on_load(config, "nf4").quantization) == "nf4 made on load, groups of 64"
    assert json.loads((plain / "config.json").read_text()).get("quantization_config") is None
