"""A checkpoint's own sampling values, from its generation_config.json: which there are, and a job that takes them.

They are taken only with `sampling.generation_config: model`, and never over a value that the job gives. Which were
taken is in the job's identity, as its other sampling values are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.checkpoints.file_checks import read_json
from pipeline.config import JobConfig
from pipeline.config.sections.sampling import SamplingSection
from pipeline.errors import ModelError

FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # those that vLLM takes, but max_tokens


def values_of(folder: Path) -> dict[str, Any]:
    """The model's sampling values, by their names here. One that says `do_sample: false` is greedy, whatever else it
    has. Raises ModelError."""
    if not (folder / FILE).is_file():
        return {}
    found = read_json(folder / FILE)
    values = {name: found[name] for name in _NAMES if found.get(name) is not None}
    if found.get("do_sample") is False:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"} | {"temperature": 0}
    return values


def taken(config: JobConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that the job takes: all that it does not give itself, where it asks for them."""
    given = config.sampling.model_fields_set
    return {k: v for k, v in values.items() if config.sampling.generation_config == "model" and k not in given}


def with_model_defaults(config: JobConfig, folder: Path, say: Callable[[str], None] | None = None) -> JobConfig:
    """`config` with the model's values where it asks for them; `say` is told which. Raises ModelError."""
    values = taken(config, values_of(folder)) if config.sampling.generation_config == "model" else {}
    if config.sampling.generation_config == "model" and say is not None:
        say(f"sampling by the model's {FILE}: {shown(values) or 'it has nothing to take'}")
    if not values:
        return config
    try:
        given = {name: getattr(config.sampling, name) for name in config.sampling.model_fields_set}
        sampling = SamplingSection.model_validate(given | values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ModelError(
            f"{folder / FILE}: {problem['loc'][0]}: {problem['msg']} (sampling.generation_config: model)"
        ) from None
    return config.model_copy(update={"sampling": sampling})


def shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
