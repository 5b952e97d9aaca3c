"""Section `task`: what a job computes for each row.

`config/contradictions.py` lists the other keys that have no effect with a type; `job/actor/tasks.py` computes rows.
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from pipeline.config.values import IDENTITY, AutoOrSwitch, ConfigSection, FromColumn, PerRow, Text, Texts
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.row_texts import RowTexts

TaskType = Literal["generate", "choice", "score", "embed", "classify"]
BareTask = Literal["generate", "score", "embed", "classify"]  # types that need no other key
KEYS_OF: dict[TaskType, tuple[str, ...]] = {
    "generate": (),
    "choice": ("labels",),
    "score": ("completion", "token_logprobs"),
    "embed": ("pooling", "normalize", "dimensions"),
    "classify": ("activation",),
}


def _keys_for_editors(schema: dict[str, Any]) -> None:
    """Add the keys of each type to the section's schema."""
    schema["allOf"] = [
        {"if": {"required": [key]}, "then": {"properties": {"type": {"const": name}}, "required": ["type"]}}
        for name, keys in KEYS_OF.items()
        for key in keys
    ]
    is_choice = {"properties": {"type": {"const": "choice"}}, "required": ["type"]}
    schema["allOf"].append({"if": is_choice, "then": {"required": ["labels"]}})


class TaskSection(ConfigSection):
    """Task of a job. A bare word is a type with default keys: `task: embed`."""

    model_config = ConfigDict(json_schema_extra=_keys_for_editors)

    type: TaskType = Field(
        default="generate",
        description="generate: a completion. choice: the most likely of some labels after the prompt. score: the "
        "log-probability of a text. embed: a vector. classify: the classes of a classification head.",
        examples=["choice"],
        json_schema_extra=IDENTITY,
    )
    labels: PerRow[Texts] = Field(
        default=(),
        description="choice: the labels, or a column with a list per row.",
        examples=[["billing", "bug", "question"], {"column": "options"}],
        json_schema_extra=IDENTITY,
    )
    completion: PerRow[Text | None] = Field(
        default=None,
        description="score: the text after the prompt to score: a template with {column}, like prompt.template, or "
        "{column: name}. Default: the prompt itself, from its second token on.",
        examples=["{answer}", {"column": "answer"}],
        json_schema_extra=IDENTITY,
    )
    token_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="score: add a column with the log-probability of each scored token (0), and of the n most likely "
        "tokens at its position (n). Default: none.",
        examples=[0],
        json_schema_extra=IDENTITY,
    )
    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        default="auto",
        description="embed: pool the last hidden states by the last token, the first token (cls) or the mean. auto: "
        "from the checkpoint's sentence-transformers files, else last.",
        examples=["mean"],
        json_schema_extra=IDENTITY,
    )
    normalize: AutoOrSwitch = Field(
        default="auto",
        description="embed: scale vectors to length 1. auto: from the same files, else true.",
        examples=[False],
        json_schema_extra=IDENTITY,
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        description="embed: keep only the first n numbers, for Matryoshka models. Default: all.",
        examples=[256],
        json_schema_extra=IDENTITY,
    )
    activation: Literal["auto", "softmax", "sigmoid", "none"] = Field(
        default="auto",
        description="classify: turn logits into probabilities. auto, as in transformers' text-classification pipeline: "
        "softmax for several labels; sigmoid for one label or if problem_type in config.json is "
        "multi_label_classification; none if it is regression.",
        examples=["sigmoid"],
        json_schema_extra=IDENTITY,
    )

    @field_validator("labels")
    @classmethod
    def _are_distinct(cls, labels: tuple[str, ...] | FromColumn) -> tuple[str, ...] | FromColumn:
        if not isinstance(labels, FromColumn):
            if "" in labels:
                raise ValueError("an empty label: expected texts")
            if len(labels) < 2:
                raise ValueError(f"expected at least two labels; got {len(labels)}")
            if repeated := next((label for label in labels if labels.count(label) > 1), None):
                raise ValueError(f"{repeated!r} is listed twice")
        return labels

    @field_validator("completion")
    @classmethod
    def _template_parses(cls, completion: str | FromColumn | None) -> str | FromColumn | None:
        if isinstance(completion, str):
            from pipeline.data.prompts import template_columns

            try:
                template_columns(completion)
            except ConfigError as error:
                raise ValueError(error.problem("prompt.template")) from None
        return completion

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of this type with their values, as JSON."""
        return self.model_dump(mode="json", include=set(KEYS_OF[self.type]))

    def row_texts(self) -> "RowTexts | None":
        """Return the texts that each row brings besides its prompt; None if the task needs none."""
        from pipeline.data.prompts import PromptSpec
        from pipeline.data.row_texts import RowTexts

        if isinstance(self.labels, FromColumn):
            return RowTexts("task.labels", labels=self.labels.column)
        if self.completion is None:
            return None
        if isinstance(self.completion, FromColumn):
            return RowTexts("task.completion", PromptSpec(column=self.completion.column))
        return RowTexts("task.completion", PromptSpec(template=self.completion))
