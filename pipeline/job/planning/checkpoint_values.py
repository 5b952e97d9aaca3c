"""Values that a job takes from its checkpoint, and settings that the checkpoint rules out. Does not import torch.

Sampling values of generation_config.json are used only with `sampling.generation_config: model`, and never override a
value of the job. Used values are part of the job's identity, like its other values.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.quantizer_files import quantization_options
from pipeline.config import JobConfig
from pipeline.config.sections.sampling import SamplingSection
from pipeline.engine.reasoning.markers import ReasoningMarkers
from pipeline.errors import ConfigError, ModelError
from pipeline.model.config_values import model_values
from pipeline.stores.redaction import shown_url

SAMPLING_FILE = "generation_config.json"
MODEL_FILES = ("config.json", "tokenizer.json")  # files of every checkpoint, in addition to its weights
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # as in vLLM, without max_tokens


def exceeded_limits(config: JobConfig, model: Path) -> Iterator[ConfigError]:
    """Yield an error for each key that the checkpoint in the folder `model` does not support. Raises ModelError if its
    config.json cannot be read."""
    length, method = config.engine.max_model_len, config.model.quantization
    if length is None and method == "none":
        return
    values, shown = model_values(model), shown_url(config.model.path)
    longest = values.get("max_position_embeddings")
    if length is not None and isinstance(longest, int) and length > longest:
        key = "engine.max_model_len"
        problem_text = f"{length} exceeds the {longest:,} positions of {shown}"
        yield ConfigError(f"{key}: {problem_text}", key=key)
    if method != "none" and quantization_options(model, values) is not None:
        key = "model.quantization"
        problem_text = f"{shown} is quantized already; remove the key, or use the 16-bit checkpoint"
        yield ConfigError(f"{key}: {method}, but {problem_text}", key=key)


def stored_sampling(model: Path) -> dict[str, Any]:
    """Return the model's sampling values, by their names in the job file. With `do_sample: false` the model is greedy,
    regardless of its other values. Raises ModelError."""
    if not (model / SAMPLING_FILE).is_file():
        return {}
    found = read_json(model / SAMPLING_FILE)
    values = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
    if found.get("do_sample") is False:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"} | {"temperature": 0}
    return values


def with_stored_sampling(sampling: SamplingSection, values: dict[str, Any], model: Path) -> SamplingSection:
    """Return `sampling` with `values` of the model's file filled in. Raises ModelError if one is out of range."""
    given = {name: getattr(sampling, name) for name in sampling.model_fields_set}
    try:
        return SamplingSection.model_validate(given | values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        file = model / SAMPLING_FILE
        raise ModelError(f"{file}: {problem['loc'][0]}: {problem['msg']} (sampling.generation_config: model)") from None


def reasoning_markers(sampling: SamplingSection, model: Path) -> ReasoningMarkers:
    """Return the marker texts of `sampling.reasoning`, so that they become part of the job's identity. Raises
    ConfigError if the tokenizer lacks them or other options require single-token markers, ModelError without a
    tokenizer."""
    from pipeline.engine.reasoning.markers import find_markers, marker_tokens
    from pipeline.engine.reasoning.tracking import text_unsupported_reason
    from pipeline.tokenization.tokenizer import Tokenizer

    assert sampling.reasoning is not None
    tokenizer = Tokenizer.from_folder(str(model))
    found = find_markers(sampling.reasoning, tokenizer)
    has_budget, has_grammar = sampling.thinking_token_budget is not None, sampling.structured_outputs is not None
    if marker_tokens(found, tokenizer) == found and (
        problem_text := text_unsupported_reason(found, has_budget, has_grammar)
    ):
        raise ConfigError(problem_text)
    return found


def check_adapter(adapter: Path, model: Path) -> None:
    """Raise ModelError if the adapter in a folder has unsupported options, or does not fit the checkpoint `model`."""
    from pipeline.model.config import read_config
    from pipeline.model.lora import read_adapter

    read_adapter(adapter, read_config(model))


def shown_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
