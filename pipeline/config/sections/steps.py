"""Section `steps`: further prompts of each row, which use the answers of earlier ones."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.config.sections.model import AdapterName
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.sections.task import BareTask, TaskSection
from pipeline.config.values import IDENTITY, ConditionText, ConfigSection, or_word

DRAFT = "draft"  # name of the latest text in prompts of steps
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class RepeatSection(ConfigSection):
    """Steps that a row passes again."""

    from_step: str = Field(
        alias="from",
        description="Name of the first step to repeat: an earlier one, or this one.",
        examples=["check"],
        json_schema_extra=IDENTITY,
    )
    until: ConditionText = Field(
        description="Condition over the same columns as `when`, and this step's. Rows that meet it proceed to the next "
        "step.",
        examples=["check.label = ' yes'"],
        json_schema_extra=IDENTITY,
    )
    at_most: int = Field(
        ge=1, le=100, description="Maximum number of repetitions of a row.", examples=[2], json_schema_extra=IDENTITY
    )


class VoteSection(ConfigSection):
    """Several samples of a step, whose most frequent text counts."""

    n: int = Field(ge=2, le=64, description="Maximum samples of a row.", examples=[8], json_schema_extra=IDENTITY)
    stop_at: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of n that settles the vote: sampling stops once a text has it, or none can reach it.",
        examples=[0.75],
        json_schema_extra=IDENTITY,
    )


class StepSection(ConfigSection):
    """One step: a prompt of each row after the first prompt, and what is computed for it."""

    name: str = Field(
        description="Name of the step, of its column in the output, and of its results in later prompts: "
        "{check.label}.",
        examples=["check"],
        json_schema_extra={**IDENTITY, "pattern": f"^{_NAME.pattern}$"},
    )
    when: ConditionText | None = Field(
        default=None,
        description="Condition over the input's columns, draft and earlier steps. Rows that do not meet it skip the "
        "step: its column is null, or has the values of the last time. Default: no row skips it.",
        examples=["check.label = ' no'", "draft != '' and check.label_probability < 0.9"],
        json_schema_extra=IDENTITY,
    )
    prompt: PromptSection = Field(
        description="As the job's prompt. Templates may also name {draft}, the latest text, and results of earlier "
        "steps: {check.label}, {critique.generated_text}. If the job's prompt is a chat, so is this, with the job's "
        "chat options unless it has its own.",
        examples=[{"template": "{text}\n---\nGerman: {draft}\nFaithful?"}],
    )
    task: Annotated[TaskSection, or_word("type", TaskSection, BareTask)] = Field(
        default=TaskSection(),
        description="generate, choice or score, as the job's task.",
        examples=[{"type": "choice", "labels": [" yes", " no"]}],
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="As the job's sampling, with its own defaults. n, seed, generation_config, logprobs and "
        "prompt_logprobs belong to the job alone, and no value may be {column: name}.",
        examples=[{"max_tokens": 64}],
    )
    adapter: AdapterName | None = Field(
        default=None,
        description="Adapter of the step, a name from model.adapters. Default: the base model.",
        examples=["judge"],
        json_schema_extra=IDENTITY,
    )
    replaces: Literal["draft"] | None = Field(
        default=None,
        description="draft: the step's text becomes the draft, which later prompts and the job's result columns use.",
        examples=["draft"],
        json_schema_extra=IDENTITY,
    )

    vote: VoteSection | None = Field(
        default=None,
        description="Sample the step's text several times; the most frequent one counts, and the column has the number "
        "of its votes. Texts are compared without surrounding whitespace. Needs sampling.temperature above 0.",
        examples=[{"n": 8, "stop_at": 0.75}],
        json_schema_extra=IDENTITY,
    )
    repeat: RepeatSection | None = Field(
        default=None,
        description="After this step, also if it was skipped, pass the steps from `from` to this one again.",
        examples=[{"from": "check", "until": "check.label = ' yes'", "at_most": 2}],
        json_schema_extra=IDENTITY,
    )

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"expected letters, digits and _, after a letter; got {name!r}")
        return name

    def to_identity(self) -> dict[str, Any]:
        """Return all keys that are not at their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, by_alias=True)
