"""The section `speculation`: speculative decoding, which changes how fast tokens come and not which."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.values import ModelPlace, Section, false_is_off
from pipeline.engine.params import MAX_SPECULATIVE_TOKENS, SpeculationConfig, SpeculationMethod, model_contradiction

BareMethod = Literal["auto", "off", "lookup", False]  # those that need no other key


class SpeculationSection(Section):
    """Which method proposes tokens for the model to check."""

    method: Annotated[SpeculationMethod, false_is_off(SpeculationMethod)] = Field(
        default="auto",
        description="lookup drafts what followed the last tokens before, in a row's own text and in finished "
        "outputs; draft_model by a smaller model; auto is lookup; off. Drafts are computed where that is faster.",
        examples=["off", "draft_model"],
    )
    model: ModelPlace | None = Field(
        default=None,
        description="With method draft_model: the smaller model, with the same tokens.",
        examples=["models/Qwen3-0.6B"],
    )
    num_speculative_tokens: int = Field(
        default=SpeculationConfig.num_speculative_tokens,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="The most tokens drafted for a row in one step.",
        examples=[12],
    )

    @model_validator(mode="after")
    def _model_of_method(self) -> "SpeculationSection":
        if wrong := model_contradiction(self.method, self.model):
            raise ValueError(f"model: {wrong}")
        return self

    def engine_config(self, model_path: str | None) -> SpeculationConfig:
        """Return the engine's form. model_path: the folder in which the draft model was found, once it is known."""
        return SpeculationConfig(self.method, model_path or self.model, self.num_speculative_tokens)
