"""Random LoRA adapters in PEFT's layout, and transformers models with an adapter merged into their weights."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

LINEARS = (torch.nn.Linear, Conv1D)


def write_adapter(folder: Path, model: Any, seed: int, *, targets: str, strength: float = 0.3, **options: Any) -> Path:
    """Write an adapter of a transformers model: of the linears whose name ends with a match of `targets`.

    options: of adapter_config.json. strength: deviation of B; at 0.3 an adapter changes the tokens.
    """
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": targets} | options
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in _targets(model, targets):
        rank, (inputs, outputs) = _value(config, "r", "rank_pattern", name), _shape(module)
        a_RK = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a_RK
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * strength
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: Any, adapter: Path) -> Any:
    """Add an adapter's W + scale * B A to the weights of a transformers model, in place."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        a_RK = tensors.pop(f"base_model.model.{name}.lora_A.weight", None)
        if a_RK is None:
            continue
        b_NR = tensors.pop(f"base_model.model.{name}.lora_B.weight")
        scale = _value(config, "lora_alpha", "alpha_pattern", name)
        scale /= len(a_RK) ** 0.5 if config.get("use_rslora") else len(a_RK)
        delta_NK = scale * b_NR.float() @ a_RK.float()
        with torch.no_grad():
            module.weight += delta_NK.T if isinstance(module, Conv1D) else delta_NK
    assert not tensors
    return model


def _targets(model: Any, targets: str) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, LINEARS)]
    return [(name, module) for name, module in found if re.fullmatch(rf".*\.(?:{targets})", name)]


def _shape(module: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs."""
    return tuple(module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape))


def _value(config: dict[str, Any], key: str, pattern: str, name: str) -> Any:
    of_name = (value for end, value in config.get(pattern, {}).items() if re.fullmatch(rf"(.*\.)?({end})", name))
    return next(of_name, config[key])
