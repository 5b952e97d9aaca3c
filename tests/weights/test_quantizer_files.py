"""Checkpoints whose quantization options are in the quantizer's own file, as older AutoAWQ and AutoGPTQ wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints.digest import model_digest
from pipeline.errors import ModelError
from pipeline.model.config import read_config
from pipeline.quantize.recipe import check_plain
from tests.model.test_load import edit_config, load
from tests.weights.packers import CONFIG, Pack, awq_gemm, awq_gemv, gptq, nvfp4, pack_quantized, write_pair

AUTO_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
AUTO_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
             "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}  # fmt: skip
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
PACKED = {"format": "pack-quantized", "config_groups": {"all": GROUP}}
WRITTEN: dict[str, tuple[str, dict[str, Any], Pack]] = {
    "AWQ int4, groups of 64": ("quant_config.json", AUTO_AWQ, awq_gemm(64, True)),
    "AWQ int4, groups of 32": (
        "quantize_config.json", AUTO_AWQ | {"q_group_size": 32, "version": "GEMV"}, awq_gemv(32)),
    "GPTQ int4, groups of 32": ("quantize_config.json", AUTO_GPTQ, gptq(4, 32, True, False, 1)),
    "GPTQ int8, groups of 32, inputs ordered by activation": (
        "quantize_config.json",
        AUTO_GPTQ | {"bits": 8, "desc_act": True, "sym": False, "quant_method": "gptq", "checkpoint_format": "gptq"},
        gptq(8, 32, False, True, 1)),
    "Model Optimizer nvfp4, groups of 16": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}},
        nvfp4("weight", "weight_scale_2", divides=False)),
}  # fmt: skip


def with_own_file(tmp_path: Path, name: str, options: dict[str, Any], pack: Pack) -> tuple[Path, Path]:
    folder, dense = write_pair(tmp_path, options, lambda stem: pack)
    edit_config(folder, quantization_config=None)
    (folder / name).write_text(json.dumps(options))
    return folder, dense


@pytest.mark.parametrize("shown", WRITTEN)
def test_the_file_of_an_old_quantizer_is_read(tmp_path: Path, shown: str) -> None:
    name, options, pack = WRITTEN[shown]
    folder, dense = with_own_file(tmp_path, name, options, pack)
    assert str(read_config(folder).quantization) == shown
    x = torch.eye(CONFIG["intermediate_size"])
    ours, expected = (load(each).layers[0].down(x) for each in (folder, dense))
    torch.testing.assert_close(ours, expected)
    with pytest.raises(ModelError, match=rf"already quantized \(\w+ in {name}\)"):
        check_plain(folder)


def test_the_file_counts_as_part_of_the_model_only_where_it_is_read(tmp_path: Path) -> None:
    name, options, pack = WRITTEN["GPTQ int4, groups of 32"]
    folder, _ = with_own_file(tmp_path, name, options, pack)
    assert name in model_digest(folder)
    edit_config(folder, quantization_config=options | {"quant_method": "gptq", "desc_act": True})
    assert name not in model_digest(folder)
    assert "ordered by activation" in str(read_config(folder).quantization)  # config.json counts


def test_what_no_file_describes_is_refused_with_what_to_add(tmp_path: Path) -> None:
    folder, _ = with_own_file(tmp_path, *WRITTEN["GPTQ int4, groups of 32"])
    (folder / "quant_config.json").write_text(json.dumps(AUTO_AWQ))
    with pytest.raises(ModelError, match=r"quantize_config\.json and quant_config\.json both describe the weights"):
        read_config(folder)
    (folder / "quant_config.json").unlink()
    (folder / "quantize_config.json").write_text(json.dumps(AUTO_GPTQ | {"bits": 3}))
    with pytest.raises(ModelError, match=r"quantize_config\.json: quantization_config\.bits = 3"):
        read_config(folder)
    (folder / "quantize_config.json").unlink()
    with pytest.raises(ModelError, match=r"q_proj\.weight is missing.*q_proj\.qweight.*quantize_config\.json"):
        load(folder)


def test_the_older_key_of_compressed_tensors_is_read(tmp_path: Path) -> None:
    pack = pack_quantized(4, 32, True)
    folder, _ = write_pair(tmp_path, PACKED, lambda stem: pack)
    edit_config(folder, quantization_config=None, compression_config=PACKED | {"quant_method": "compressed-tensors"})
    assert str(read_config(folder).quantization) == "compressed-tensors int4, groups of 32"
    load(folder)
