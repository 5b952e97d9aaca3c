"""The sections `cost`, `quality` and `targets`: what a job may cost, and what its figures are compared with."""

from typing import Annotated

from pydantic import Field, model_validator

from pipeline.config.values import Column, Duration, ModelPlace, Section

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class CostSection(Section):
    """Prices are US dollars; without `hourly_usd` a job is unpriced."""

    hourly_usd: _Positive | None = Field(
        default=None,
        description="What one actor's machine, or its share of one, costs for an hour, in US dollars. Unpriced "
        "when left out.",
        examples=[2.5],
    )
    budget_usd: _Positive | None = Field(
        default=None,
        description="What the job may cost over all its runs, in US dollars. A run ends itself in time to stay below, "
        "resumably, with exit code 75; with a higher budget the same command resumes. Needs hourly_usd.",
        examples=[40],
    )

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> "CostSection":
        if self.budget_usd is not None and self.hourly_usd is None:
            raise ValueError("budget_usd needs hourly_usd: a budget is counted in machine time at that price")
        return self


class QualitySection(Section):
    """Without `model` the reference is the job's own checkpoint in 16 bit, where the job computes it otherwise."""

    sample: _Share = Field(
        default=0.0,
        description="The share of rows that are compared with a reference model while the job runs. From 0 to 1; 0 is "
        "off.",
        examples=[0.001],
    )
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
    max_drop: _Share = Field(
        default=0.02,
        description="An alarm is raised when token agreement, or the share of right answers relative to the "
        "reference's, has certainly dropped by more. From 0 to 1.",
        examples=[0.05],
    )


class TargetsSection(Section):
    """Targets of a finished job, over all its runs. What is left out is not compared."""

    max_usd_per_1m_generated: _Positive | None = Field(
        default=None, description="US dollars for 1M generated tokens.", examples=[0.5]
    )
    min_generated_per_s: _Positive | None = Field(
        default=None, description="Generated tokens a second of machine time.", examples=[1000]
    )
    max_row_p95: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, description="Time in which 95 % of the rows end, their queue included.", examples=["2 min"]
    )
    min_batch_efficiency: _Share | None = Field(
        default=None, description="The share of machine time that is prefill and decode.", examples=[0.8]
    )
