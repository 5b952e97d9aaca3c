"""The section `sampling`: how tokens are chosen; its ranges are those of SamplingParams."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.sections.reasoning import Reasoning
from pipeline.config.sections.structured import StructuredOrColumn
from pipeline.config.values import IDENTITY, FromColumn, PerRow, Section, Switch, Texts, TokenIds
from pipeline.engine.params import (
    MAX_PATTERN_SIZE,
    MAX_SAMPLES,
    OFF_AT_MINUS_1,
    RepetitionDetectionParams,
    SamplingParams,
)
from pipeline.errors import ConfigError

DEFAULT_MAX_TOKENS = 256


class RepetitionSection(Section):
    """RepetitionDetectionParams' fields."""

    max_pattern_size: int = Field(
        ge=1, le=MAX_PATTERN_SIZE, description="The most tokens of what is repeated.", examples=[64]
    )
    min_count: int = Field(
        ge=2, description="A completion ends when the same tokens came so many times in a row.", examples=[10]
    )
    min_pattern_size: int = Field(default=1, ge=1, description="The fewest tokens of what is repeated.", examples=[4])

    @model_validator(mode="after")
    def _min_under_max(self) -> "RepetitionSection":
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size {self.min_pattern_size} is more than max_pattern_size {self.max_pattern_size}"
            )
        return self

    def params(self) -> RepetitionDetectionParams:
        return RepetitionDetectionParams(**self.model_dump())


class SamplingSection(Section):
    """SamplingParams' fields; all but `seed`, `repetition_detection` and `reasoning` may be `{column: name}`, each
    row's own value."""

    generation_config: Literal["none", "model"] = Field(
        default="none",
        description="Where options that are left out come from: the defaults below (none), or the model's "
        "generation_config.json where it has them (temperature, top_p, top_k, min_p, repetition_penalty).",
        examples=["model"],
    )
    max_tokens: PerRow[int] = Field(
        default=DEFAULT_MAX_TOKENS,
        description="The most tokens of a completion.",
        examples=[256, {"column": "budget"}],
        json_schema_extra={**IDENTITY, "minimum": 1},
    )
    min_tokens: PerRow[int] = Field(
        default=0,
        description="Nothing stops a completion before so many tokens.",
        examples=[2],
        json_schema_extra={**IDENTITY, "minimum": 0},
    )
    n: PerRow[int] = Field(
        default=1,
        description="Completions of each row, which differ by their random numbers. Where it is not 1, generated_text, "
        "finish_reason and logprobs of the output are lists, unless output.samples makes rows of them. A row of "
        "several needs a temperature above 0.",
        examples=[8, {"column": "num_samples"}],
        json_schema_extra={**IDENTITY, "minimum": 1, "maximum": MAX_SAMPLES},
    )
    temperature: PerRow[float] = Field(
        default=0.0,
        description="0 takes the likeliest token each time; more makes sampling more even.",
        examples=[0.7],
        json_schema_extra={**IDENTITY, "minimum": 0},
    )
    top_k: PerRow[int] = Field(
        default=0,
        description="Sample among the k likeliest tokens. 0 and -1 are off.",
        examples=[20],
        json_schema_extra={**IDENTITY, "minimum": -1},
    )
    top_p: PerRow[float] = Field(
        default=1.0,
        description="Sample among the likeliest tokens that together have this probability. 1 is off.",
        examples=[0.95],
        json_schema_extra={**IDENTITY, "exclusiveMinimum": 0, "maximum": 1},
    )
    min_p: PerRow[float] = Field(
        default=0.0,
        description="Leave out tokens below this share of the likeliest one's probability. 0 is off.",
        examples=[0.05],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 1},
    )
    repetition_penalty: PerRow[float] = Field(
        default=1.0,
        description="Above 1, tokens of the prompt and the completion become less likely again. 1 is off.",
        examples=[1.1],
        json_schema_extra={**IDENTITY, "exclusiveMinimum": 0},
    )
    presence_penalty: PerRow[float] = Field(
        default=0.0,
        description="Taken from the logits of tokens that the completion has. 0 is off.",
        examples=[0.5],
        json_schema_extra=IDENTITY,
    )
    frequency_penalty: PerRow[float] = Field(
        default=0.0,
        description="Taken from the logits of the completion's tokens, for each time they are there. 0 is off.",
        examples=[0.5],
        json_schema_extra=IDENTITY,
    )
    stop: PerRow[Texts] = Field(
        default=(),
        description="Texts that end a completion, just before them.",
        examples=[["\n"], "END"],
        json_schema_extra=IDENTITY,
    )
    stop_token_ids: PerRow[TokenIds] = Field(
        default=(),
        description="Token ids that end a completion.",
        examples=[[151645]],
        json_schema_extra=IDENTITY,
    )
    ignore_eos: PerRow[Switch] = Field(
        default=False,
        description="Go on after the model's end-of-sequence token.",
        examples=[True],
        json_schema_extra=IDENTITY,
    )
    seed: int | None = Field(
        default=None,
        ge=-1,
        lt=2**63,
        description="Together with the row's file and number it fixes the row's random numbers. 0 when left out or -1.",
        examples=[7],
        json_schema_extra=IDENTITY,
    )
    logprobs: PerRow[int | None] = Field(
        default=None,
        description="Log-probabilities: 0 of the chosen token, n also of the n likeliest. None when left out.",
        examples=[5, {"column": "num_logprobs"}],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 100},
    )
    prompt_logprobs: PerRow[int | None] = Field(
        default=None,
        description="A column with the log-probabilities of the prompt's tokens: 0 of each token, n also of the n "
        "likeliest ones in its place. Such prompts are computed whole, none is shared. None when left out.",
        examples=[0],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 100},
    )
    repetition_detection: RepetitionSection | None = Field(
        default=None,
        description="End completions that repeat themselves, with finish_reason length_loop. Off when left out.",
        examples=[{"max_pattern_size": 64, "min_count": 10}],
        json_schema_extra=IDENTITY,
    )
    structured_outputs: StructuredOrColumn = Field(
        default=None,
        description="Holds each completion to a form, in vLLM's names: json (a JSON Schema), json_file (the path of "
        "one), json_object (true), regex, choice (a list of texts) or grammar (Lark); json, regex, choice and grammar "
        "may be {column: name}. JSON has no blanks between its tokens unless whitespace_pattern allows some.",
        examples=[{"choice": ["yes", "no"]}, {"json_file": "schema.json"}, {"json": {"column": "schema"}}],
        json_schema_extra=IDENTITY,
    )
    reasoning: Reasoning = Field(
        default=None,
        description="Divides completions of a model that reasons: the output gets the columns reasoning and "
        "num_reasoning_tokens, and generated_text holds the answer alone, as structured_outputs do. auto takes the "
        "markers that the checkpoint's tokenizer has, such as <think> and </think>; {start, end} names others: tokens, "
        "or texts. Off when left out.",
        examples=["auto", {"start": "<think>", "end": "</think>"}],
        json_schema_extra=IDENTITY,
    )
    thinking_token_budget: PerRow[int | None] = Field(
        default=None,
        description="The most tokens of reasoning: after them the end marker is taken, and the answer follows. Needs "
        "reasoning; max_tokens counts both. No limit of their own when left out or -1.",
        examples=[2048, {"column": "budget"}],
        json_schema_extra={**IDENTITY, "minimum": -1},
    )

    @field_validator(*OFF_AT_MINUS_1, mode="before")
    @classmethod
    def _off_as_in_vllm(cls, value: Any, info: Any) -> Any:
        return OFF_AT_MINUS_1[info.field_name] if type(value) is int and value == -1 else value

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any, info: Any) -> Any:
        """Each value alone against SamplingParams' own checks, so that all mistakes are seen at once."""
        apart = ("generation_config", "repetition_detection")
        if info.field_name not in apart and not isinstance(value, FromColumn):
            name = info.field_name
            given = {name: value}
            if name == "min_tokens":
                given["max_tokens"] = max(value, 16)
            if name == "thinking_token_budget":
                given["reasoning"] = "auto"  # whether it is there is seen below
            if name == "n":
                given["temperature"] = 1.0  # whether both go together is seen by the job
            try:
                SamplingParams(**given)
            except ConfigError as error:
                raise ValueError(f"{error.problem(f'sampling.{name} = {value!r}')}; got {value!r}") from None
        return value

    @model_validator(mode="after")
    def _min_under_max(self) -> "SamplingSection":
        low, high = self.min_tokens, self.max_tokens
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise ValueError(f"min_tokens {low} is more than max_tokens {high}")
        if self.structured_outputs is not None and low != 0:
            raise ValueError("min_tokens does not go with structured_outputs, which say where a completion ends")
        if self.thinking_token_budget is not None and self.reasoning is None:
            raise ValueError("thinking_token_budget needs reasoning, which says where it ends: set that to auto")
        return self
