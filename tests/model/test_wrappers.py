"""Checkpoints with an image encoder: the text model has the logits of transformers, and the image parts are ignored."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from pipeline.errors import ModelError
from tests.model_folders import DELTA, MINISTRAL_ROPE, QWEN_MOE, VOCAB, small_config, write_tokenizer
from tests.parity.harness import LOGIT_TOLERANCE, float32_engine, our_logits, reference_logits

TEXT = small_config(32, 48, 3, 4, 2, head_dim=16, initializer_range=0.2)
ENCODER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip
GEMMA3_TEXT = TEXT | {"sliding_window": 19, "query_pre_attn_scalar": 24,
                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
GEMMA4_TEXT = GEMMA3_TEXT | {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                             "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
                             "pad_token_id": 0}  # fmt: skip
AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
         "subsampling_conv_channels": [4, 4]}  # fmt: skip
QWEN_ENCODER = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
                "patch_size": 8, "num_position_embeddings": 16}  # fmt: skip
Config = Gemma3Config | Gemma4Config | Mistral3Config | Qwen3_5Config | Qwen3_5MoeConfig


def gemma3() -> Config:
    return Gemma3Config(
        text_config=GEMMA3_TEXT, vision_config=ENCODER, mm_tokens_per_image=1, image_token_index=VOCAB - 1
    )


def gemma4() -> Config:
    vision = {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 64} | ENCODER
    tokens = {f"{kind}_token_id": VOCAB - 1 + number for number, kind in enumerate(("image", "video", "audio"))}
    return Gemma4Config(text_config=GEMMA4_TEXT, vision_config=vision, audio_config=AUDIO, **tokens)


def mistral3(text_type: str, is_tied: bool, **text: Any) -> Config:
    encoder = {"model_type": "pixtral", "head_dim": 8} | ENCODER
    text = TEXT | {"model_type": text_type} | text
    return Mistral3Config(
        text_config=text, vision_config=encoder, image_token_index=VOCAB - 1, tie_word_embeddings=is_tied
    )


def qwen3_5(kind: type[Qwen3_5Config] | type[Qwen3_5MoeConfig], **text: Any) -> Config:
    types = ["linear_attention", "full_attention", "linear_attention"]
    tokens = {f"{name}_token_id": VOCAB - 1 for name in ("image", "video", "vision_start", "vision_end")}
    return kind(text_config=TEXT | DELTA | {"layer_types": types} | text, vision_config=QWEN_ENCODER, **tokens)


CONFIGS: dict[str, Callable[[], Config]] = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "qwen3_5": lambda: qwen3_5(Qwen3_5Config),
    "qwen3_5_moe": lambda: qwen3_5(Qwen3_5MoeConfig, **QWEN_MOE, shared_expert_intermediate_size=64),
    "mistral3": lambda: mistral3("ministral3", False, rope_parameters=MINISTRAL_ROPE),
    "mistral3, tied": lambda: mistral3("ministral3", True, rope_parameters=MINISTRAL_ROPE),
    "mistral3 of mistral": lambda: mistral3("mistral", False, sliding_window=21),
}
SAVED = "language_model.model."


def under_model(name: str) -> str:
    """Return a saved name in the layout whose modules, but for the head, are all under `model.`, as Gemma 4 saves."""
    if name.startswith(("model.", "lm_head.")):
        return name
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    return f"model.language_model.{name.removeprefix(SAVED)}" if name.startswith(SAVED) else f"model.{name}"


LAYOUTS: dict[str, Callable[[str], str]] = {"as saved": str, "under model.": under_model}


def renamed(folder: Path, out: Path, change: Callable[[str], str]) -> Path:
    """Copy a checkpoint with the tensors' names changed."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


@pytest.fixture(scope="module", params=CONFIGS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("wrapped")
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param](), dtype=torch.float32)
    model.set_attn_implementation("eager")
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_text(written: tuple[Path, Any], layout: str, tmp_path: Path) -> None:
    saved, model = written
    folder = renamed(saved, tmp_path / "m", LAYOUTS[layout])
    tokens = np.random.default_rng(7).integers(0, VOCAB - 1, 90).tolist()
    with float32_engine(folder) as engine:
        difference = (our_logits(engine, tokens) - reference_logits(model, tokens)).abs().max()
    assert float(difference) < LOGIT_TOLERANCE


def test_a_head_that_drafts_is_ignored(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_5"]()
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    float32_engine(tmp_path).close()


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "speech_tower.proj.weight"])
def test_a_tensor_that_is_no_image_part_is_an_error(written: tuple[Path, Any], name: str, tmp_path: Path) -> None:
    is_renamed = (
        "multi_modal_projector.norm.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.visual.merger.norm.weight",
    )
    folder = renamed(written[0], tmp_path / "m", lambda stored: name if stored in is_renamed else stored)
    with pytest.raises(ModelError, match=rf"1 tensors are not part of this architecture: {re.escape(name)}"):
        float32_engine(folder)
