"""LoRA adapters against transformers with merged weights, and the refusal of what is not supported."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import ModelError
from pipeline.model.config import read_config
from pipeline.model.lora import read_adapter
from tests.adapters import merge, write_adapter
from tests.model_folders import FAMILIES, load_reference, make_family
from tests.parity.harness import LOGIT_TOLERANCE, float32_engine, reference_logits
from tests.prompt_steps import prompt_step

ALL = ".*_proj|c_attn|c_fc"
TESTED = {
    "llama3": {"targets": "q_proj|v_proj"},
    "llama-linear-bias-tied": {"targets": ALL, "use_rslora": True},
    "qwen3": {"targets": ALL, "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 7}},
    "gemma3": {"targets": "k_proj|gate_proj|down_proj", "alpha_pattern": {"gate_proj": 3.0}},
    "gemma4": {"targets": "q_proj|k_proj|o_proj"},
    "gemma4-moe": {"targets": "k_proj|mlp.*_proj"},
    "gpt2": {"targets": "c_attn|c_fc|c_proj", "fan_in_fan_out": True},
    "phi3": {"targets": "qkv_proj|gate_up_proj"},
    "phi3-long-partial": {"targets": ALL},
    "glm4": {"targets": "q_proj|k_proj"},
    "smollm3": {"targets": "q_proj|k_proj"},
    "olmo2": {"targets": "k_proj|o_proj"},
    "granite": {"targets": ALL},
    "starcoder2": {"targets": "c_fc|v_proj"},
}


def logits_of(engine: Any, token_ids: list[int], adapters: list[int]) -> list[torch.Tensor]:
    """Return the logits at every position of the same text in one step, with each of the adapters (-1: none)."""
    step = replace(prompt_step(engine.table.pages, token_ids, len(adapters)), adapter_S=np.array(adapters))
    return list(engine.runner.execute(step).float().split(len(token_ids)))


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_equal_those_of_merged_weights(name: str, kernels: str, tmp_path: Path) -> None:
    """Three adapters and the base model in one step; the rows of the first are not consecutive."""
    family = next(family for family in FAMILIES if family.name == name)
    folder = make_family(tmp_path / "model", family, seed=3)
    base = load_reference(folder)
    paths = [write_adapter(tmp_path / f"a{i}", base, seed=i, **TESTED[name]) for i in range(3)]
    prompt = np.random.default_rng(1).integers(0, 255, 21).tolist()
    rows = [0, -1, 2, 0, 1]
    expected = {-1: reference_logits(base, prompt)}
    expected |= {i: reference_logits(merge(load_reference(folder), path), prompt) for i, path in enumerate(paths)}
    assert (expected[0] - expected[-1]).abs().max() > 100 * LOGIT_TOLERANCE
    adapters = {str(i): str(path) for i, path in enumerate(paths)}
    with float32_engine(folder, kernels=kernels, adapters=adapters) as engine:
        for row, ours in zip(rows, logits_of(engine, prompt, rows), strict=True):
            torch.testing.assert_close(ours, expected[row], atol=LOGIT_TOLERANCE, rtol=LOGIT_TOLERANCE)
        (alone,) = logits_of(engine, prompt, [1])
        torch.testing.assert_close(alone, expected[1], atol=LOGIT_TOLERANCE, rtol=LOGIT_TOLERANCE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter of its queries and values."""
    top = tmp_path_factory.mktemp("refused")
    folder = make_family(top / "model", next(family for family in FAMILIES if family.name == "llama3"), seed=3)
    adapter = write_adapter(top / "adapter", load_reference(folder), seed=0, targets="q_proj|v_proj")
    return folder, adapter


def config_with(**options: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | options))

    return change


def tensors_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return changed


def as_pickle(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED = {
    "peft_type = 'IA3': expected LORA": config_with(peft_type="IA3"),
    "peft_type = None: expected LORA": config_with(peft_type=None),
    "use_dora = True: expected false": config_with(use_dora=True),
    "bias = 'all': expected none": config_with(bias="all"),
    "lora_bias = True: expected false": config_with(lora_bias=True),
    r"modules_to_save = \['lm_head'\]: expected null": config_with(modules_to_save=["lm_head"]),
    r"target_parameters = \['experts": config_with(target_parameters=["experts.gate_up_proj"]),
    "init_lora_weights = 'pissa_niter_4': expected true": config_with(init_lora_weights="pissa_niter_4"),
    "r = 0: expected an integer from 1": config_with(r=0),
    "lora_alpha = -1: expected a positive number": config_with(lora_alpha=-1),
    "rank_pattern.*invalid pattern": config_with(rank_pattern={"(": 4}),
    r"lora_A.weight is \(4, \d+\) torch.float32, expected \(8, ": config_with(r=8),
    "tensors of layers.0.self_attn.k_proj are missing": config_with(target_modules=["k_proj", "q_proj", "v_proj"]),
    r"lora_B.weight is \(3, 4\) torch.float32, expected \(": tensors_with(
        lambda tensors: tensors.update({f"{Q}.lora_B.weight": torch.ones(3, 4)})
    ),
    "lora_A.weight is missing": tensors_with(lambda tensors: tensors.pop(f"{Q}.lora_A.weight")),
    "lora_magnitude_vector: DoRA": tensors_with(
        lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(3)})
    ),
    "lora_embedding_A: adapters of embeddings": tensors_with(
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3)})
    ),
    "lm_head.lora_A.weight: adapters of the output": tensors_with(
        lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 3)})
    ),
    "experts.*: adapters of experts": tensors_with(
        lambda tensors: tensors.update({"base_model.model.layers.0.mlp.experts.0.up.lora_A.weight": torch.ones(4, 3)})
    ),
    "layers.7.* belongs to no linear": tensors_with(
        lambda tensors: tensors.update({Q.replace(".0.", ".7.") + ".lora_A.weight": torch.ones(4, 3)})
    ),
    "2 tensors are not part of this architecture": tensors_with(
        lambda tensors: tensors.update(
            {
                f"{Q.replace('model.model.', 'model.')}.lora_{ab}.weight": tensors[f"{Q}.lora_{ab}.weight"] + 1
                for ab in "AB"
            }
        )
    ),
    "has no tensors": tensors_with(dict.clear),
    "has no adapter_model.safetensors": as_pickle,
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_adapters_are_refused_by_name(message: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder, adapter = folders
    changed = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    REFUSED[message](changed)
    with pytest.raises(ModelError, match=message):
        read_adapter(changed, read_config(folder))


def test_an_adapter_of_another_model_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_family(tmp_path / "other", next(family for family in FAMILIES if family.name == "qwen3"), seed=4)
    with pytest.raises(ModelError, match=r"expected \(|belongs to no linear"):
        read_adapter(folders[1], read_config(other))


def test_options_without_effect_are_accepted(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The options that PEFT writes for every adapter."""
    folder, adapter = folders
    changed = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config_with(
        use_dora=False, modules_to_save=None, init_lora_weights=True, target_parameters=None, layer_replication=None,
        target_modules=["v_proj", "q_proj"], rank_pattern={}, alpha_pattern={}, trainable_token_indices=None,
        lora_bias=False, megatron_config=None, auto_mapping=None, revision=None, use_rslora=None,
    )(changed)  # fmt: skip
    layers = read_adapter(changed, read_config(folder))
    assert all(set(updates) == {"qkv"} for updates in layers)
    config_with(layers_to_transform=[0], target_modules=["k_proj"])(changed)
    assert len(read_adapter(changed, read_config(folder))) == len(layers)
