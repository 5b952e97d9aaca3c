"""Section `prompt`: the text or chat of each row."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.jobfile import Document, of_each_prompt, read_named
from pipeline.config.values import IDENTITY, Column, Columns, ConfigSection, Moment, Switch
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.prompts import PromptSpec


SOURCES = ("template", "column", "messages")
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEMPLATE_FORMS = [
    _TEXT,
    {"type": "object", "properties": {"file": _TEXT}, "required": ["file"], "additionalProperties": False},
    {"type": "null"},
]


def with_template_file(document: Document, folder: Path) -> Document:
    """Return `document` with `template: {file: PATH}` replaced by the text of that file, so that the job's identity
    contains it. A relative path starts at `folder`; the last line break is dropped. Raises JobFileError."""
    for at, given in of_each_prompt(document, ("prompt", "template")):
        if isinstance(given, dict) and isinstance(path := given.get("file"), str):
            hint = f"Relative paths start at the job file's folder, {folder.absolute()}."
            text = read_named(document, (*at, "file"), path, folder, hint)
            document = document.replaced(at, text.replace("\r\n", "\n").removesuffix("\n"))
    return document


class ChatSection(ConfigSection):
    """Options of the chat template."""

    system: str | None = Field(
        default=None,
        description="System message before the prompt.",
        examples=["Answer with one word."],
        json_schema_extra=IDENTITY,
    )
    chat_template: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File with a chat template (Jinja). Default: the model's template.",
        examples=["templates/llama3-tools.jinja"],
    )
    continue_final_message: Switch = Field(
        default=True,
        description="Continue a chat that ends with a message of the assistant: the prompt ends with its text. false: "
        "close that turn and start another one of the assistant.",
        examples=[False],
        json_schema_extra=IDENTITY,
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        serialization_alias="template_kwargs",
        description="More variables for the chat template.",
        examples=[{"enable_thinking": False}],
        json_schema_extra=IDENTITY,
    )
    date: Moment | None = Field(
        default=None,
        description="Date passed to the chat template, without a time zone. Default: local time of the output's first "
        "run.",
        examples=["2026-11-23", "2026-11-23 14:05"],
    )


class PromptSection(ConfigSection):
    """Source of a row's prompt: exactly one of `template`, `column` and `messages`, except for requests, which bring
    their own (`requests.py`).

    With `chat` None text is sent as it is; `messages` always go through the chat template.
    """

    template: str | None = Field(
        default=None,
        min_length=1,
        description="Text with {column} for columns, {column.field} for fields of a struct or of JSON text, "
        "{column:.2f} for formatted numbers or dates, {`column`} for names with other characters, and {{ and }} for "
        "braces; or {file: prompt.txt}, a file with that text, in the job file's folder. Alternatives: `column`, "
        "`messages`.",
        examples=["Summarize: {text}", "{author.name} ({score:.1f}): {text}", {"file": "prompt.txt"}],
        json_schema_extra={**IDENTITY, "anyOf": _TEMPLATE_FORMS},
    )
    column: Column | None = Field(
        default=None,
        description="Column of text to use as the prompt.",
        examples=["text"],
        json_schema_extra=IDENTITY,
    )
    messages: Column | None = Field(
        default=None,
        description="Column of chats: lists of role and content, or their JSON.",
        examples=["turns"],
        json_schema_extra=IDENTITY,
    )
    images: Columns = Field(
        default=(),
        description="Columns of images, for a server: bytes, Hugging Face's structs of bytes and path, urls, paths, or "
        "lists of these. They are sent in the user's turn, before the text, or at {column} in the template.",
        examples=[["photo"]],
        json_schema_extra=IDENTITY,
    )
    chat: ChatSection | None = Field(
        default=None,
        description="Send the prompt through the model's chat template, as the user's turn. Default: plain text.",
        examples=[{"system": "Answer with one word."}, True],
        json_schema_extra=IDENTITY,
    )
    continues_chat: Switch = Field(
        default=False,
        description="Only in steps: send the text as the user's next turn of the row's chat, after the first prompt, "
        "its answer, and earlier steps that continue the chat.",
        examples=[True],
        json_schema_extra=IDENTITY,
    )
    fill_null: dict[str, str] = Field(
        default={},
        description="Texts that replace nulls, by the name in the template or by the column. Other nulls make the row "
        "an error row.",
        examples=[{"title": "(untitled)", "author.name": "unknown"}],
        json_schema_extra=IDENTITY,
    )
    special_tokens: Literal["text", "template"] = Field(
        default="text",
        description="How to read the text of control tokens in a plain-text prompt: as letters (text), or as control "
        "tokens if the template itself contains them (template). In column values they are always letters.",
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
            from pipeline.data.prompt_template import parse

            try:
                parse(template)
            except ConfigError as error:
                raise ValueError(error.problem("prompt.template")) from None
        return template

    @model_validator(mode="before")
    @classmethod
    def _messages_are_chat(cls, raw: object) -> object:
        if isinstance(raw, dict) and (raw.get("messages") or raw.get("images")) and raw.get("chat") is None:
            return {**raw, "chat": {}}
        return raw

    @model_validator(mode="after")
    def _one_source(self) -> "PromptSection":
        given = [key for key in SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"expected exactly one of template, column, messages; got {found}")
        if self.messages is not None and self.images:
            raise ValueError("images: needs template or column; the chats of messages have their own images")
        if self.special_tokens == "template" and (self.template is None or self.chat is not None):
            raise ValueError(
                "special_tokens: template needs a prompt.template that is sent as plain text; column and messages hold "
                "data, and with chat the chat template writes the control tokens"
            )
        try:
            self.spec()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("prompt.")) from None
        return self

    def spec(self) -> "PromptSpec":
        """Return how rows become prompts."""
        from pipeline.data.prompts import PromptSpec

        return PromptSpec(
            column=self.column,
            template=self.template,
            messages=self.messages,
            defaults=self.fill_null,
            in_pieces=self.special_tokens == "template",
            images=self.images,
            is_turn=self.continues_chat,
        )
