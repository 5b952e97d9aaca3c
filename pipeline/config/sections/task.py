"""The section `task`: what a job computes for each row, a completion or something that is read off its prompt.

Owns the keys and which type each belongs to. Which other keys have no effect with a type is in
`config/contradictions.py`; what becomes of a row, in `job/actor/tasks/`.
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from pipeline.config.values import IDENTITY, AutoOrSwitch, FromColumn, PerRow, Section, Text, Texts
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.row_texts import RowTexts

TaskType = Literal["generate", "choice", "score", "embed", "classify"]
BareTask = Literal["generate", "score", "embed", "classify"]  # those that need no other key
KEYS_OF: dict[TaskType, tuple[str, ...]] = {
    "generate": (),
    "choice": ("labels",),
    "score": ("completion", "token_logprobs"),
    "embed": ("pooling", "normalize", "dimensions"),
    "classify": ("activation",),
}


def _keys_for_editors(schema: dict[str, Any]) -> None:
    """Add to the section's schema which keys each type takes."""
    schema["allOf"] = [
        {"if": {"required": [key]}, "then": {"properties": {"type": {"const": name}}, "required": ["type"]}}
        for name, keys in KEYS_OF.items()
        for key in keys
    ]
    is_choice = {"properties": {"type": {"const": "choice"}}, "required": ["type"]}
    schema["allOf"].append({"if": is_choice, "then": {"required": ["labels"]}})


class TaskSection(Section):
    """A bare word is a type with the defaults of its keys: `task: embed`."""

    model_config = ConfigDict(json_schema_extra=_keys_for_editors)

    type: TaskType = Field(
        default="generate",
        description="A completion (generate), which of some labels follows the prompt (choice), how likely a text is "
        "(score), a vector (embed), or the classes of a classification head (classify).",
        examples=["choice"],
        json_schema_extra=IDENTITY,
    )
    labels: PerRow[Texts] = Field(
        default=(),
        description="choice: the texts of which one follows the prompt, or a column with each row's own list.",
        examples=[["billing", "bug", "question"], {"column": "options"}],
        json_schema_extra=IDENTITY,
    )
    completion: PerRow[Text | None] = Field(
        default=None,
        description="score: the text after the prompt whose probability is computed: a template with {column}, like "
        "prompt.template, or {column: name}. The prompt itself, from its second token on, when left out.",
        examples=["{answer}", {"column": "answer"}],
        json_schema_extra=IDENTITY,
    )
    token_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="score: adds a column with the log-probability of each scored token: 0 of the token, n also of "
        "the n likeliest ones at its position. None when left out.",
        examples=[0],
        json_schema_extra=IDENTITY,
    )
    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        default="auto",
        description="embed: whose last hidden states are the vector: the last token's, the first one's (cls) or the "
        "mean over all. auto: as the checkpoint's sentence-transformers files say, without them last.",
        examples=["mean"],
        json_schema_extra=IDENTITY,
    )
    normalize: AutoOrSwitch = Field(
        default="auto",
        description="embed: scale vectors to length 1. auto: as these files say, without them true.",
        examples=[False],
        json_schema_extra=IDENTITY,
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        description="embed: keep only the first `n` numbers, for models trained for it (Matryoshka). All when left "
        "out.",
        examples=[256],
        json_schema_extra=IDENTITY,
    )
    activation: Literal["auto", "softmax", "sigmoid", "none"] = Field(
        default="auto",
        description="classify: makes probabilities of the head's logits. auto: as transformers' text-classification "
        "pipeline: softmax over several labels, sigmoid for one or where problem_type of config.json is "
        "multi_label_classification, none where it is regression.",
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
        """The type's own keys with their values, as JSON."""
        return self.model_dump(mode="json", include=set(KEYS_OF[self.type]))

    def row_texts(self) -> "RowTexts | None":
        """The texts that each row brings next to its prompt, where the task needs some."""
        from pipeline.data.prompts import PromptSpec
        from pipeline.data.row_texts import RowTexts

        if isinstance(self.labels, FromColumn):
            return RowTexts("task.labels", labels=self.labels.column)
        if self.completion is None:
            return None
        if isinstance(self.completion, FromColumn):
            return RowTexts("task.completion", PromptSpec(column=self.completion.column))
        return RowTexts("task.completion", PromptSpec(template=self.completion))
