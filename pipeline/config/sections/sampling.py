"""Section `sampling`; its ranges are those of SamplingParams."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.sections.reasoning import Reasoning
from pipeline.config.sections.structured import StructuredOrColumn
from pipeline.config.values import IDENTITY, ConfigSection, FromColumn, PerRow, Switch, Texts, TokenIds
from pipeline.engine.sampling_params import (
    MAX_PATTERN_SIZE,
    MAX_SAMPLES,
    OFF_AT_MINUS_1,
    RepetitionDetectionParams,
    SamplingParams,
)
from pipeline.errors import ConfigError

DEFAULT_MAX_TOKENS = 256


class RepetitionSection(ConfigSection):
    """Fields of RepetitionDetectionParams."""

    max_pattern_size: int = Field(
        ge=1, le=MAX_PATTERN_SIZE, description="Maximum tokens of a repeated pattern.", examples=[64]
    )
    min_count: int = Field(ge=2, description="Repetitions in a row that end a completion.", examples=[10])
    min_pattern_size: int = Field(default=1, ge=1, description="Minimum tokens of a repeated pattern.", examples=[4])

    @model_validator(mode="after")
    def _min_under_max(self) -> "RepetitionSection":
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size {self.min_pattern_size} is more than max_pattern_size {self.max_pattern_size}"
            )
        return self

    def params(self) -> RepetitionDetectionParams:
        return RepetitionDetectionParams(**self.model_dump())


class SamplingSection(ConfigSection):
    """Fields of SamplingParams; all but `seed`, `repetition_detection` and `reasoning` may be `{column: name}`, for a
    value per row."""

    generation_config: Literal["none", "model"] = Field(
        default="none",
        description="Source of defaults: those below (none), or the model's generation_config.json for temperature, "
        "top_p, top_k, min_p and repetition_penalty.",
        examples=["model"],
    )
    max_tokens: PerRow[int] = Field(
        default=DEFAULT_MAX_TOKENS,
        description="Maximum tokens of a completion.",
        examples=[256, {"column": "budget"}],
        json_schema_extra={**IDENTITY, "minimum": 1},
    )
    min_tokens: PerRow[int] = Field(
        default=0,
        description="Minimum tokens before a completion may stop.",
        examples=[2],
        json_schema_extra={**IDENTITY, "minimum": 0},
    )
    n: PerRow[int] = Field(
        default=1,
        description="Completions per row. If it is not 1, the columns generated_text, finish_reason and logprobs are "
        "lists, or rows with output.samples_as: rows. More than one need a temperature above 0.",
        examples=[8, {"column": "num_samples"}],
        json_schema_extra={**IDENTITY, "minimum": 1, "maximum": MAX_SAMPLES},
    )
    temperature: PerRow[float] = Field(
        default=0.0,
        description="Sampling temperature; 0 is greedy decoding.",
        examples=[0.7],
        json_schema_extra={**IDENTITY, "minimum": 0},
    )
    top_k: PerRow[int] = Field(
        default=0,
        description="Sample from the k most likely tokens. 0 and -1 are off.",
        examples=[20],
        json_schema_extra={**IDENTITY, "minimum": -1},
    )
    top_p: PerRow[float] = Field(
        default=1.0,
        description="Sample from the most likely tokens whose probabilities add up to this. 1 is off.",
        examples=[0.95],
        json_schema_extra={**IDENTITY, "exclusiveMinimum": 0, "maximum": 1},
    )
    min_p: PerRow[float] = Field(
        default=0.0,
        description="Minimum probability of a token, relative to the most likely one. 0 is off.",
        examples=[0.05],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 1},
    )
    repetition_penalty: PerRow[float] = Field(
        default=1.0,
        description="Above 1: penalize tokens of the prompt and the completion. 1 is off.",
        examples=[1.1],
        json_schema_extra={**IDENTITY, "exclusiveMinimum": 0},
    )
    presence_penalty: PerRow[float] = Field(
        default=0.0,
        description="Subtracted from the logits of tokens in the completion. 0 is off.",
        examples=[0.5],
        json_schema_extra=IDENTITY,
    )
    frequency_penalty: PerRow[float] = Field(
        default=0.0,
        description="Subtracted from the logits of tokens in the completion, once per occurrence. 0 is off.",
        examples=[0.5],
        json_schema_extra=IDENTITY,
    )
    stop: PerRow[Texts] = Field(
        default=(),
        description="Texts before which a completion stops.",
        examples=[["\n"], "END"],
        json_schema_extra=IDENTITY,
    )
    stop_token_ids: PerRow[TokenIds] = Field(
        default=(),
        description="Token ids that stop a completion.",
        examples=[[151645]],
        json_schema_extra=IDENTITY,
    )
    ignore_eos: PerRow[Switch] = Field(
        default=False,
        description="Continue after the model's end-of-sequence token.",
        examples=[True],
        json_schema_extra=IDENTITY,
    )
    seed: int | None = Field(
        default=None,
        ge=-1,
        lt=2**63,
        description="Random seed, combined with the row's file and number. Default, also for -1: 0.",
        examples=[7],
        json_schema_extra=IDENTITY,
    )
    logprobs: PerRow[int | None] = Field(
        default=None,
        description="Add log-probabilities of the chosen token (0), and of the n most likely ones (n). Default: none.",
        examples=[5, {"column": "num_logprobs"}],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 100},
    )
    prompt_logprobs: PerRow[int | None] = Field(
        default=None,
        description="Add a column with log-probabilities of each prompt token (0), and of the n most likely tokens at "
        "its position (n). Such prompts share no prefix. Default: none.",
        examples=[0],
        json_schema_extra={**IDENTITY, "minimum": 0, "maximum": 100},
    )
    repetition_detection: RepetitionSection | None = Field(
        default=None,
        description="Stop completions that repeat themselves, with finish_reason length_loop. Default: off.",
        examples=[{"max_pattern_size": 64, "min_count": 10}],
        json_schema_extra=IDENTITY,
    )
    structured_outputs: StructuredOrColumn = Field(
        default=None,
        description="Constrain completions, with vLLM's names: json (a JSON Schema), json_file (its path), json_object "
        "(true), regex, choice (a list of texts) or grammar (Lark); json, regex, choice and grammar may be "
        "{column: name}. JSON has no whitespace between tokens unless whitespace_pattern allows it.",
        examples=[{"choice": ["yes", "no"]}, {"json_file": "schema.json"}, {"json": {"column": "schema"}}],
        json_schema_extra=IDENTITY,
    )
    reasoning: Reasoning = Field(
        default=None,
        description="Split completions of a reasoning model: the output gets the columns reasoning and "
        "num_reasoning_tokens, and generated_text and structured_outputs cover only the answer. auto uses the markers "
        "of the checkpoint's tokenizer, such as <think> and </think>; {start, end} names other tokens or texts. "
        "Default: off.",
        examples=["auto", {"start": "<think>", "end": "</think>"}],
        json_schema_extra=IDENTITY,
    )
    thinking_token_budget: PerRow[int | None] = Field(
        default=None,
        description="Maximum reasoning tokens; then the end marker is inserted and the answer follows. Needs "
        "reasoning; max_tokens counts both. Default, also for -1: no limit.",
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
        """Check each value alone with SamplingParams, so that all mistakes are reported at once."""
        apart = ("generation_config", "repetition_detection")
        if info.field_name not in apart and not isinstance(value, FromColumn):
            name = info.field_name
            given = {name: value}
            if name == "min_tokens":
                given["max_tokens"] = max(value, 16)
            if name == "thinking_token_budget":
                given["reasoning"] = "auto"  # checked below
            if name == "n":
                given["temperature"] = 1.0  # the job checks whether both agree
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
            raise ValueError(
                "min_tokens cannot be combined with structured_outputs, which decide where a completion ends"
            )
        if self.thinking_token_budget is not None and self.reasoning is None:
            raise ValueError("thinking_token_budget needs reasoning: set it to auto")
        return self
