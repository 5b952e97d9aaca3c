"""What a job asks of each row in place of a completion: the key `task`, and a section for each kind.

Owns the keys. Which other keys say nothing beside a task is in `config/contradictions.py`; what becomes of a row, in
`job/actor/tasks.py`.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from pipeline.config.sections.section import Section
from pipeline.config.values import AutoOrSwitch, FromColumn, StringsOrColumn, TextOrColumn
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.row_texts import RowTexts

TaskName = Literal["generate", "choice", "score", "embed", "classify"]
SECTIONS = ("choice", "score", "embed", "classify")  # each is called as its task


class ChoiceSection(Section):
    """The labels are texts that may follow the prompt."""

    labels: StringsOrColumn = Field(
        default=(),
        description="Of task choice: the texts of which one follows the prompt, or a column with each row's own list.",
        examples=[["billing", "bug", "question"], {"column": "options"}],
    )

    @field_validator("labels")
    @classmethod
    def _can_be_told_apart(cls, labels: tuple[str, ...] | FromColumn) -> tuple[str, ...] | FromColumn:
        if not isinstance(labels, FromColumn):
            if "" in labels:
                raise ValueError("an empty label: expected texts")
            if len(labels) < 2:
                raise ValueError(f"expected at least two labels; got {len(labels)}")
            if repeated := next((label for label in labels if labels.count(label) > 1), None):
                raise ValueError(f"{repeated!r} is there twice")
        return labels


class ScoreSection(Section):
    """Without `completion` the prompt's own text is scored."""

    completion: TextOrColumn = Field(
        default=None,
        description="Of task score: the text after the prompt whose probability is told: a template with {column}, "
        "as of prompt.template, or {column: name}. The prompt itself, from its second token on, when left out.",
        examples=["{answer}", {"column": "answer"}],
    )
    token_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="A column with the log-probability of each scored token: 0 of the token, n also of the n likeliest "
        "ones in its place. None when left out.",
        examples=[0],
    )

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


class EmbedSection(Section):
    """`auto` is what sentence-transformers' files in the checkpoint say (`modules.json`)."""

    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        default="auto",
        description="Of task embed: whose last hidden states are the vector: the last token's, the first one's (cls) "
        "or the mean over all. auto: as the checkpoint's sentence-transformers files say, without them last.",
        examples=["mean"],
    )
    normalize: AutoOrSwitch = Field(
        default="auto",
        description="Scale vectors to length 1. auto: as these files say, without them true.",
        examples=[False],
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        description="Only the first so many numbers, for models that were trained so (Matryoshka). All when left out.",
        examples=[256],
    )


class ClassifySection(Section):
    """Of checkpoints with a sequence classification head."""

    activation: Literal["auto", "softmax", "sigmoid", "none"] = Field(
        default="auto",
        description="Of task classify: what makes probabilities of the head's logits. auto: as transformers' "
        "text-classification pipeline: softmax over several labels, sigmoid for one or where problem_type of "
        "config.json is multi_label_classification, none where it is regression.",
        examples=["sigmoid"],
    )


def row_texts(task: TaskName, choice: ChoiceSection, score: ScoreSection, max_bytes: int) -> "RowTexts | None":
    """The texts that each row brings beside its prompt, where the task asks for some. max_bytes: of a completion."""
    from pipeline.data.prompts import PromptSpec
    from pipeline.data.row_texts import RowTexts

    labels, completion = choice.labels, score.completion
    if task == "choice" and isinstance(labels, FromColumn):
        return RowTexts("choice.labels", labels=labels.column)
    if task != "score" or completion is None:
        return None
    if isinstance(completion, FromColumn):
        return RowTexts("score.completion", PromptSpec(column=completion.column, max_bytes=max_bytes))
    return RowTexts("score.completion", PromptSpec(template=completion, max_bytes=max_bytes))
