"""Section `speculation`: speculative decoding, which changes the speed and not the tokens."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.values import ConfigSection, ModelPath, false_is_off
from pipeline.engine.speculation.config import (
    MAX_SPECULATIVE_TOKENS,
    SpeculationConfig,
    SpeculationMethod,
    model_contradiction,
)

BareMethod = Literal["auto", "off", "lookup", False]  # methods that need no other key


class SpeculationSection(ConfigSection):
    """Method that proposes draft tokens."""

    method: Annotated[SpeculationMethod, false_is_off(SpeculationMethod)] = Field(
        default="auto",
        description="lookup: drafts are the tokens that followed the same text earlier, in the row or in finished "
        "outputs. draft_model: a smaller model drafts. auto is lookup. Drafts are used only while they are faster.",
        examples=["off", "draft_model"],
    )
    model: ModelPath | None = Field(
        default=None,
        description="With method draft_model: the draft model, with the same tokens.",
        examples=["models/Qwen3-0.6B"],
    )
    num_speculative_tokens: int = Field(
        default=SpeculationConfig.num_speculative_tokens,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="Maximum draft tokens of a row in one step.",
        examples=[12],
    )

    @model_validator(mode="after")
    def _model_of_method(self) -> "SpeculationSection":
        if wrong := model_contradiction(self.method, self.model):
            raise ValueError(f"model: {wrong}")
        return self

    def engine_config(self, model_path: str | None) -> SpeculationConfig:
        """Return the engine's config. model_path: local folder of the draft model, once it is known."""
        return SpeculationConfig(self.method, model_path or self.model, self.num_speculative_tokens)
