"""The section `prompt`: what is asked of each row, as a text or a chat."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.values import IDENTITY, Column, Moment, Section, Switch
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.prompts import PromptSpec


SOURCES = ("template", "column", "messages")


class ChatSection(Section):
    """How a prompt becomes a chat for a template.

    `date` goes to a template that reads the date; null: the local time of the output's first run.
    """

    system: str | None = Field(
        default=None,
        description="The system message, before the prompt.",
        examples=["Answer with one word."],
        json_schema_extra=IDENTITY,
    )
    template: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="A file with a chat template (Jinja) to use instead of the model's own. The model's when left out.",
        examples=["templates/llama3-tools.jinja"],
    )
    continue_final_message: Switch = Field(
        default=True,
        description="A chat that ends with the assistant's message is continued: the prompt ends with its text, and "
        "the completion is what follows. false: the turn is closed, and the assistant begins another one.",
        examples=[False],
        json_schema_extra=IDENTITY,
    )
    template_kwargs: dict[str, Any] = Field(
        default={},
        description="Further variables for the chat template.",
        examples=[{"enable_thinking": False}],
        json_schema_extra=IDENTITY,
    )
    date: Moment | None = Field(
        default=None,
        description="The date that a chat template receives, without a time zone. Left out, the local time of "
        "the output's first run.",
        examples=["2026-11-23", "2026-11-23 14:05"],
    )


class PromptSection(Section):
    """Where a row's prompt comes from: exactly one of `template`, `column` and `messages`. Where the lines of the input
    are requests, these say it, and a job file gives none (`requests.py`).

    `chat` None sends the text as it is; `messages` always goes through the chat template.
    """

    template: str | None = Field(
        default=None,
        min_length=1,
        description="Text with {column} for the columns of each row, {column.field} for a field of a struct or of JSON "
        "text, {column:.2f} for a number or date in a form, {`column`} for a name with other characters; {{ and }} "
        "stand for braces. Or give `column`, or `messages`.",
        examples=["Summarize: {text}", "{author.name} ({score:.1f}): {text}"],
        json_schema_extra=IDENTITY,
    )
    column: Column | None = Field(
        default=None,
        description="A column of text that is the prompt as it is.",
        examples=["text"],
        json_schema_extra=IDENTITY,
    )
    messages: Column | None = Field(
        default=None,
        description="A column of chats: lists of role and content, or their JSON.",
        examples=["turns"],
        json_schema_extra=IDENTITY,
    )
    chat: ChatSection | None = Field(
        default=None,
        description="Put the prompt through the model's chat template, as the user's turn. Left out, "
        "`template` and `column` are sent as plain text.",
        examples=[{"system": "Answer with one word."}, True],
        json_schema_extra=IDENTITY,
    )
    fill_null: dict[str, str] = Field(
        default={},
        description="Texts in place of nulls: by what the template names, or by the column. A null without one "
        "makes the row an error row.",
        examples=[{"title": "(untitled)", "author.name": "unknown"}],
        json_schema_extra=IDENTITY,
    )
    special_tokens: Literal["text", "template"] = Field(
        default="text",
        description="What texts of the model's control tokens are in a prompt that is sent as plain text: letters "
        "(text), or control tokens where the template itself writes them (template). In values they are letters.",
        examples=["template"],
        json_schema_extra=IDENTITY,
    )

    @field_validator("chat", mode="before", json_schema_input_type=ChatSection | bool | None)
    @classmethod
    def _chat_switch(cls, value: object) -> object:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @field_validator("template")
    @classmethod
    def _template_parses(cls, template: str | None) -> str | None:
        if template is not None:
            from pipeline.data.prompts import template_columns

            try:
                template_columns(template)
            except ConfigError as error:
                raise ValueError(error.problem("prompt.template")) from None
        return template

    @model_validator(mode="before")
    @classmethod
    def _messages_are_chat(cls, raw: object) -> object:
        if isinstance(raw, dict) and raw.get("messages") is not None and raw.get("chat") is None:
            return {**raw, "chat": {}}
        return raw

    @model_validator(mode="after")
    def _one_source(self) -> "PromptSection":
        given = [key for key in SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"expected exactly one of template, column, messages; got {found}")
        if self.special_tokens == "template" and (self.template is None or self.chat is not None):
            raise ValueError(
                "special_tokens: template is for a prompt.template that is sent as plain text; column and messages "
                "hold data, and with chat the chat template writes the control tokens"
            )
        if self.fill_null:
            try:
                self.spec()
            except ConfigError as error:
                raise ValueError(f"fill_null: {error.problem('prompt.fill_null')}") from None
        return self

    def spec(self) -> "PromptSpec":
        """How rows become prompts."""
        from pipeline.data.prompts import PromptSpec

        return PromptSpec(
            column=self.column,
            template=self.template,
            messages=self.messages,
            defaults=self.fill_null,
            in_pieces=self.special_tokens == "template",
        )
