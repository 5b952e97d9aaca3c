"""The section `prompt`: what is asked of each row, as a text or a chat."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.sections.section import Section
from pipeline.config.values import Bytes, Column, Moment, Switch
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.prompts import PromptSpec


class ChatSection(Section):
    """How a prompt becomes a chat for a template.

    `date` is what a template that asks for the date is told; null: the local time of the output's first run.
    """

    system: str | None = Field(
        default=None,
        description="The system message, before the prompt.",
        examples=["Answer with one word."],
    )
    template: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="A file with a chat template (Jinja) that is taken instead of the model's own. The model's when "
        "left out.",
        examples=["templates/llama3-tools.jinja"],
    )
    add_generation_prompt: Switch = Field(
        default=True,
        description="End the chat where the assistant's turn begins.",
        examples=[False],
    )
    continue_final_message: Switch = Field(
        default=True,
        description="A chat that ends with the assistant's message is continued: the prompt ends with its text, and "
        "the completion is what follows. false: the turn is closed, and the assistant begins another one.",
        examples=[False],
    )
    template_kwargs: dict[str, Any] = Field(
        default={},
        description="What the chat template knows besides.",
        examples=[{"enable_thinking": False}],
    )
    date: Moment | None = Field(
        default=None,
        description="The date that a chat template is told, without a time zone. Left out, the local time of "
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
    )
    column: Column | None = Field(
        default=None,
        description="A column of text that is the prompt as it is.",
        examples=["text"],
    )
    messages: Column | None = Field(
        default=None,
        description="A column of chats: lists of role and content, or their JSON.",
        examples=["turns"],
    )
    chat: ChatSection | None = Field(
        default=None,
        description="Put the prompt through the model's chat template, as the user's turn. Left out, "
        "`template` and `column` are sent as plain text.",
        examples=[{"system": "Answer with one word."}, True],
    )
    defaults: dict[str, str] = Field(
        default={},
        description="Texts that stand for nulls: by what the template names, or by the column. A null without one "
        "makes the row an error row.",
        examples=[{"title": "(untitled)", "author.name": "unknown"}],
    )
    special_tokens: Literal["text", "template"] = Field(
        default="text",
        description="What texts of the model's control tokens are in a prompt that is sent as plain text: letters "
        "(text), or control tokens where the template itself writes them (template). In values they are letters.",
        examples=["template"],
    )
    max_bytes: Bytes = Field(
        default=8 * 2**20,
        description="Prompts of more bytes (UTF-8) become error rows before they are tokenized. 8 MiB when left out.",
        examples=["64 KiB"],
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
        given = [key for key in ("template", "column", "messages") if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"expected exactly one of template, column, messages; got {found}")
        if self.special_tokens == "template" and (self.template is None or self.chat is not None):
            raise ValueError(
                "special_tokens: template is for a prompt.template that is sent as plain text; column and messages "
                "hold data, and with chat the chat template writes the control tokens"
            )
        if self.defaults:
            try:
                self.spec()
            except ConfigError as error:
                raise ValueError(f"defaults: {error.problem('prompt.defaults')}") from None
        return self

    def spec(self) -> "PromptSpec":
        """How rows become prompts."""
        from pipeline.data.prompts import PromptSpec

        in_pieces = self.special_tokens == "template"
        return PromptSpec(self.column, self.template, self.messages, self.max_bytes, self.defaults, in_pieces=in_pieces)
