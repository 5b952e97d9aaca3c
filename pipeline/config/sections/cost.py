"""The section `cost`: what a machine costs, and what the job may cost."""

from typing import Annotated

from pydantic import Field, model_validator

from pipeline.config.sections.section import Section


class CostSection(Section):
    """`hourly_usd` is what one actor's machine (or its share of one) costs for an hour; null: unpriced."""

    hourly_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="What one actor's machine, or its share of one, costs for an hour, in US dollars. Unpriced "
        "when left out.",
        examples=[2.5],
    )
    budget_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="What the job may cost over all its runs, in US dollars. A run ends itself in time to stay below, "
        "resumably, with exit code 75; with a higher budget the same command goes on. Needs hourly_usd.",
        examples=[40],
    )

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> "CostSection":
        if self.budget_usd is not None and self.hourly_usd is None:
            raise ValueError("expected hourly_usd beside budget_usd: a budget is counted in machine time at that price")
        return self
