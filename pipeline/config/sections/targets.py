"""The section `targets`: what a job is expected to keep to, and who is told when it does not."""

from typing import Annotated

from pydantic import Field

from pipeline.config.sections.section import Section
from pipeline.config.values import Place

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class TargetsSection(Section):
    """Of a finished job, over all its runs. What is left out is not looked at."""

    max_usd_per_1m_prompt: _Positive | None = Field(
        default=None, description="US dollars for 1M prompt tokens that were computed.", examples=[0.05]
    )
    max_usd_per_1m_generated: _Positive | None = Field(
        default=None, description="US dollars for 1M generated tokens.", examples=[0.5]
    )
    min_generated_per_s: _Positive | None = Field(
        default=None, description="Generated tokens a second of machine time.", examples=[1000]
    )
    min_batch_efficiency: _Share | None = Field(
        default=None, description="The share of machine time that is prefill and decode.", examples=[0.8]
    )
    min_kv_used: _Share | None = Field(
        default=None, description="The share of the KV cache in use, on average.", examples=[0.3]
    )
    max_error_rate: _Share | None = Field(
        default=None, description="The share of error rows; run.max_error_rate stops a job.", examples=[0.001]
    )
    max_row_p50_s: _Positive | None = Field(
        default=None, description="Seconds in which half of the rows end, their queue included.", examples=[60]
    )
    max_row_p95_s: _Positive | None = Field(default=None, description="As above, 95 % of them.", examples=[120])
    max_row_p99_s: _Positive | None = Field(default=None, description="As above, 99 % of them.", examples=[180])
    max_first_token_p95_s: _Positive | None = Field(
        default=None, description="Seconds in which 95 % of the rows have their first token.", examples=[60]
    )
    exit_code: int = Field(
        default=0,
        ge=0,
        le=255,
        description="With which a finished run leaves that missed a target: for schedulers.",
        examples=[4],
    )
    notify: Place | None = Field(
        default=None,
        description="Who is told when a target is missed, quality drops, or a limit of cost.budget_usd or "
        "run.max_runtime is near or reached: an http(s) url that takes a POST of JSON, or a file to which a line of "
        "JSON is added.",
        examples=["https://hooks.example.com/jobs", "missed.jsonl"],
    )

    def limits(self) -> dict[str, float]:
        """Those that are set."""
        return self.model_dump(exclude={"exit_code", "notify"}, exclude_none=True)
