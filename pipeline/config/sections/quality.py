"""The section `quality`: what rows of a sample are compared with. `run.quality_sample` says how many they are."""

from typing import Annotated

from pydantic import Field

from pipeline.config.sections.section import Section
from pipeline.config.values import Column, ModelPlace


class QualitySection(Section):
    """Without `model` the reference is the job's own checkpoint in 16 bit, where the job computes it otherwise."""

    model: ModelPlace | None = Field(
        default=None,
        description="The reference model: a checkpoint with the same tokens, in 16 bit. When left out the job's own as "
        "it is stored, which takes model.quantization, engine.kv_cache_dtype or engine.activation_dtype to compare.",
        examples=["Qwen/Qwen3-4B"],
    )
    column: Column | None = Field(
        default=None,
        description="A column with the right answers; both models' completions are compared with them. The reference "
        "then generates a completion of its own.",
        examples=["answer"],
    )
    max_drop: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.02,
        description="An alarm is raised when token agreement, or the share of right answers beside the reference's, "
        "has certainly dropped by more. From 0 to 1.",
        examples=[0.05],
    )
