"""Sections `cost` and `quality`."""

from typing import Annotated

from pydantic import Field, model_validator

from pipeline.config.values import Column, ConfigSection, ModelPath
from pipeline.prices import Prices

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TokenPricesSection(ConfigSection):
    """Prices of a hosted server, in US dollars for a million tokens."""

    input: _Price = Field(description="Price of 1M prompt tokens.", examples=[0.15])
    cached_input: _Price | None = Field(
        default=None, description="Price of 1M prompt tokens from the server's cache. Default: input.", examples=[0.07]
    )
    output: _Price = Field(description="Price of 1M generated tokens.", examples=[0.6])


class CostSection(ConfigSection):
    """Prices in US dollars; without any a job is unpriced."""

    hourly_usd: _Positive | None = Field(
        default=None,
        description="Price per hour of one engine's machine, or of its share of one, in US dollars. Default: unpriced.",
        examples=[2.5],
    )
    budget_usd: _Positive | None = Field(
        default=None,
        description="Maximum cost of the job over all its runs, in US dollars. A run ends in time to stay below it, "
        "resumably, with exit code 75; with a higher budget the same command resumes. Needs a price.",
        examples=[40],
    )
    usd_per_million: TokenPricesSection | None = Field(
        default=None,
        description="With server: prices of tokens, in addition to hourly_usd.",
        examples=[{"input": 0.15, "output": 0.6}],
    )

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> "CostSection":
        if self.budget_usd is not None and self.hourly_usd is None and self.usd_per_million is None:
            raise ValueError("budget_usd needs a price: hourly_usd (--hourly-price) or usd_per_million (--token-price)")
        return self

    @property
    def prices(self) -> Prices:
        tokens = self.usd_per_million
        return Prices(self.hourly_usd, {} if tokens is None else tokens.model_dump(exclude_none=True))


class QualitySection(ConfigSection):
    """Comparison of some rows with a reference model. Without `model` it is the job's own checkpoint in 16 bit."""

    sample: _Share = Field(
        default=0.0,
        description="Fraction of rows to compare with a reference model while the job runs, from 0 (off) to 1.",
        examples=[0.001],
    )
    model: ModelPath | None = Field(
        default=None,
        description="Reference model: a checkpoint with the same tokens, in 16 bit. Default: the job's own as stored, "
        "which requires model.quantization, engine.kv_cache_dtype, state_dtype or activation_dtype.",
        examples=["Qwen/Qwen3-4B"],
    )
    column: Column | None = Field(
        default=None,
        description="Column with the right answers, to compare with the completions of both models. The reference then "
        "generates completions too.",
        examples=["answer"],
    )
    max_drop: _Share = Field(
        default=0.02,
        description="Raise an alarm when token agreement, or the share of right answers relative to the reference's, "
        "dropped by more than this with statistical certainty. From 0 to 1.",
        examples=[0.05],
    )
