"""The values of a checkpoint's config.json by their common names."""

from pathlib import Path
from typing import Any

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.quantizer_files import CONFIG
from pipeline.model.families import FAMILIES
from pipeline.weights.config_fields import Fields

_EXPERT_KEYS = "num_experts", "n_routed_experts", "num_local_experts"  # names of the same, in families and versions

WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "ministral3", "qwen3_5": "qwen3_5_text",
            "qwen3_5_moe": "qwen3_5_moe_text"}  # fmt: skip
"""Models with an image encoder, by model_type, and the family of their text model if its values name none."""


def model_values(folder: Path) -> dict[str, Any]:
    """Return the values of `folder`/config.json by their common names, with the family's defaults for missing keys; of
    a model with an image encoder, those of its text model. Raises ModelError.

    A missing key takes the value of the family's config class in transformers; a null stays null.
    """
    values = read_json(folder / CONFIG)
    if str(values.get("model_type")) in WRAPPERS:
        values = _text_values(values, folder / CONFIG)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        return values
    experts = [values[key] for key in _EXPERT_KEYS if key in values]
    values = {**family.defaults} | values | ({"num_experts": experts[-1]} if experts else {})
    return values | {common: values[own] for common, own in family.keys.items() if own in values}


def _text_values(values: dict[str, Any], path: Path) -> dict[str, Any]:
    inner = Fields(values, path).section("text_config").values
    outer = ("architectures", "quantization_config", "compression_config", "dtype", "torch_dtype")
    kept = {key: values[key] for key in outer if key in values}
    ties = {key: values[key] for key in ("tie_word_embeddings",) if key in values}  # decides also in transformers
    return {"model_type": WRAPPERS[values["model_type"]]} | kept | inner | ties
