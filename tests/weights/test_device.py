"""Quantized weights are unpacked on their device: stored tensors go to the device, and nothing comes back.

There is no GPU here. The CPU represents the device and `meta` the host: a tensor that a reader creates without a device
is on `meta`, and cannot be combined with the checkpoint's tensors.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pipeline.engine.startup.resolve import quantized_on_load
from pipeline.model.config import read_config
from pipeline.model.load import Checkpoint, WeightReader
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight
from tests.weights.packers import write_pair
from tests.weights.test_model_folders import WHOLE

LINEARS = "qkv", "o", "gate_up", "down"
META = torch.device("meta")


class NothingLeaves(TorchFunctionMode):
    """Assert that no whole tensor is copied to the host; single numbers and short lists may be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("cpu", "numpy", "__array__"), f"{name} takes a weight off its device"
        assert name != "tolist" or args[0].numel() <= 2
        return func(*args, **(kwargs or {}))


def tensors_of(weight: DenseWeight | GroupIntWeight | CodebookWeight | Fp8Weight) -> list[torch.Tensor]:
    return [value for value in vars(weight).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", [*WHOLE, "int8", "int4-rtn", "nf4"])
def test_weights_are_unpacked_where_they_are_stored(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WHOLE:
        quantization, pack, _ = WHOLE[name]
        folder, _ = write_pair(tmp_path, quantization, lambda stem: pack)
        config = read_config(folder)
    else:
        _, folder = write_pair(tmp_path, {"quant_method": "none"}, lambda stem: None)
        config = quantized_on_load(read_config(folder), name)
    expected = list(WeightReader(folder, config).layers())
    reader = WeightReader(folder, config)
    stored = {key: reader.checkpoint.read(key) for key in reader.checkpoint.home}
    monkeypatch.setattr(reader.checkpoint, "read", stored.__getitem__)
    with META, NothingLeaves():
        found = list(reader.layers())
        dense = [getattr(layer, linear).dequantize(torch.float32) for layer in found for linear in LINEARS]
    assert {tensor.device.type for tensor in dense} == {"cpu"}
    for one, other in zip(found, expected):
        for linear in LINEARS:
            ours, theirs = tensors_of(getattr(one, linear)), tensors_of(getattr(other, linear))
            assert len(ours) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_a_checkpoint_hands_its_tensors_out_on_the_device(tmp_path: Path) -> None:
    quantization, pack, _ = WHOLE["awq gemm"]
    packed, _ = write_pair(tmp_path, quantization, lambda stem: pack)
    checkpoint = Checkpoint(packed, device=META)
    tensors = {name: checkpoint.read(name) for name in checkpoint.home}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert any(tensor.dtype == torch.int32 for tensor in tensors.values()), "words, as they are stored"
    reader = WeightReader(packed, read_config(packed), META)
    assert reader.embedding().weight_NK.device == reader.checkpoint.device == META
