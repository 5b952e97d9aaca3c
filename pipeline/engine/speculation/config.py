"""Options of speculative decoding."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pipeline.engine.option_checks import check_options, is_int
from pipeline.errors import ConfigError

SpeculationMethod = Literal["auto", "off", "lookup", "draft_model"]
MAX_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding. It changes the speed of generation, not the tokens; with a draft model, sampled
    tokens keep their distribution.

    method: "lookup" drafts the tokens that followed the same last tokens earlier, in the row's own text and in finished
    outputs; "draft_model" drafts with the smaller model `model`, which must have the same tokens; "auto" is lookup,
    never a draft model; "off".
    num_speculative_tokens: maximum drafts of a sequence in a step. forced: draft in every step, for measurements;
    otherwise drafts are computed only where they save time.
    """

    method: SpeculationMethod = "auto"
    model: str | None = None
    num_speculative_tokens: int = 6
    forced: bool = False

    @classmethod
    def from_value(cls, value: object) -> "SpeculationConfig":
        """Return the config for a method alone, False ("off"), or a mapping of these fields. Raises ConfigError."""
        if isinstance(value, SpeculationConfig):
            return value
        if value is False:
            value = "off"
        given: Any = {"method": value} if isinstance(value, str) else value
        names = cls.__dataclass_fields__
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ConfigError(
                f"speculation = {value!r:.80}: expected {', '.join(get_args(SpeculationMethod))}, or a mapping with "
                f"keys among {', '.join(names)}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        methods, count = get_args(SpeculationMethod), self.num_speculative_tokens
        checks = [
            ("method", self.method in methods, f"one of {', '.join(methods)}"),
            ("model", isinstance(self.model, str | None), "a folder or a Hugging Face id, or none"),
            (
                "num_speculative_tokens",
                is_int(count) and 1 <= count <= MAX_SPECULATIVE_TOKENS,
                f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}",
            ),
            ("forced", isinstance(self.forced, bool), "true or false"),
        ]
        check_options("speculation", self, checks)
        if wrong := model_contradiction(self.method, self.model):
            raise ConfigError(f"speculation.model: {wrong}")


def model_contradiction(method: str, model: str | None) -> str | None:
    """Return why the method contradicts this draft model (or None), if it does."""
    if method == "draft_model" and model is None:
        return "required by method draft_model: the checkpoint of a smaller model with the same tokens"
    if method != "draft_model" and model is not None:
        return f"only for method draft_model, but the method is {method}; set method: draft_model, or remove the key"
    return None
