"""Section `server`."""

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pipeline.config.environment import filled
from pipeline.config.values import HIDDEN, IDENTITY, NUMERICS, ConfigSection, Duration, Switch, Text, Texts
from pipeline.endpoint.spec import EndpointConfig

_SECRET_FLAG = re.compile(r"-(key|token|secret|password)$", re.I)
_SECRET_VALUE = re.compile(r"^(sk-|hf_|Bearer )")


class ServerSection(ConfigSection):
    """A server with OpenAI's API as the engine: one that runs already (`base_url`), or one that the run starts
    (`serve`)."""

    base_url: Texts | None = Field(
        default=None,
        description="Url of a running server, such as http://host:8000/v1, or a list of urls, which share the rows.",
        examples=["http://localhost:8000/v1"],
    )
    serve: Annotated[Texts, Field(min_length=1)] | None = Field(
        default=None,
        description="Command that starts a server for each engine of the run, as a list. --host and --port are added, "
        "or filled in for {host} and {port}; {model} is the key model.",
        examples=[["vllm", "serve", "{model}", "--max-model-len", "8192"]],
        json_schema_extra=NUMERICS,
    )
    model: Text | None = Field(
        default=None,
        description="Name of the model in requests. Default: the server's only one.",
        examples=["Qwen/Qwen3-4B"],
        json_schema_extra=IDENTITY,
    )
    accept_models: Texts = Field(
        default=(),
        description="Other names of the model that answers may have, next to that of the first answer. Any other name "
        "ends the run, since one output must not mix two models.",
        examples=[["large-chat-2026-05-01", "large-chat-2026-08-01"]],
    )
    api_key: Text | None = Field(
        default=None,
        repr=False,
        description="Key for the server, as an environment variable: ${NAME}. Never logged.",
        examples=["${OPENAI_API_KEY}"],
        json_schema_extra=HIDDEN,
    )
    headers: dict[Text, Text] = Field(
        default={},
        repr=False,
        description="Headers of each request, such as `api-key` of Azure. Keys in them as environment variables: "
        "${NAME}. Never logged.",
        examples=[{"api-key": "${AZURE_KEY}"}],
        json_schema_extra=HIDDEN,
    )
    start_timeout: Annotated[Duration, Field(gt=0)] = Field(
        default=1800.0,
        description="Maximum time until a server generates its first token.",
        examples=["10 min"],
        json_schema_extra={"default": "30 min"},
    )
    request_timeout: Annotated[Duration, Field(gt=0)] = Field(
        default=1800.0,
        description="Maximum time until an answer is complete. If it is streamed: until its first piece, and then "
        "run.stall_timeout for each piece.",
        examples=["10 min"],
        json_schema_extra={"default": "30 min"},
    )
    max_retries: int = Field(
        default=4,
        ge=0,
        le=100,
        description="Maximum number of times that a failed request is sent again. Requests that a server refuses for "
        "load are not counted.",
        examples=[8],
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Maximum rate of requests to all urls together. Default: unlimited.",
        examples=[500],
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Maximum rate of tokens of prompts and answers, of all urls together. Default: unlimited.",
        examples=[200_000],
    )
    extra_body: dict[str, Any] = Field(
        default={},
        description="Fields to add to each request, as the server knows them; null removes a field.",
        examples=[{"chat_template_kwargs": {"enable_thinking": False}}],
        json_schema_extra=IDENTITY,
    )
    allow_control_tokens: Switch = Field(
        default=False,
        description="Send rows whose text holds control tokens of model.path's tokenizer; a server parses them. By "
        "default they are error rows.",
        examples=[True],
        json_schema_extra=IDENTITY,
    )

    @field_validator("base_url")
    @classmethod
    def _of_http(cls, urls: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for url in urls or ():
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("expected http://HOST:PORT/v1 or https://HOST/v1")
            if "@" in parts.netloc:
                raise ValueError("a url cannot contain a user or a password; use api_key or headers")
        return urls

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: str | None) -> str | None:
        """Drop white space around the key: files and Kubernetes secrets end with a line feed."""
        key = key and key.strip()
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("expected printable ASCII characters without spaces; is it another file's content?")
        return key

    @field_validator("headers")
    @classmethod
    def _fit_http(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"{name!r} is not a valid header name")
            if not (text.strip().isascii() and text.strip().isprintable()):
                raise ValueError(f"{name}: expected printable ASCII characters")
        return {name: text.strip() for name, text in headers.items()}

    @field_validator("serve")
    @classmethod
    def _has_no_secret(cls, serve: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Refuse keys: the command is recorded in the output."""
        for before, part in pairwise(("", *(serve or ()))):
            flag, _, value = part.partition("=") if part.startswith("-") else (before, "", part)
            is_secret = _SECRET_FLAG.search(flag) if flag.startswith("-") and value else None
            if (is_secret or _SECRET_VALUE.search(value)) and "${" not in value:
                shown = f"the value of {flag}" if flag.startswith("-") else f"the word after {before!r}"
                raise ValueError(
                    f"{shown} looks like a secret, and the command is recorded in the output. Write it as "
                    "an environment variable, such as ${API_KEY}, which is filled in when the server starts"
                )
        return serve

    @model_validator(mode="after")
    def _one_source(self) -> "ServerSection":
        if (self.base_url is None) == (self.serve is None):
            raise ValueError("expected one of base_url and serve")
        if self.serve is not None and (self.requests_per_minute or self.tokens_per_minute):
            raise ValueError(
                "requests_per_minute and tokens_per_minute need base_url; a server of the run has no limits"
            )
        return self

    def config(self, environ: Mapping[str, str] = os.environ, **options: Any) -> EndpointConfig:
        """Return the engine's config. environ: values for `${NAME}` in `serve`, which is recorded without them.
        options: other fields of `EndpointConfig`."""
        serve, values = filled(self.serve or (), environ)
        return EndpointConfig(
            urls=self.base_url or (),
            serve=serve,
            headers=self.headers,
            request_timeout_s=self.request_timeout,
            max_retries=self.max_retries,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            serve_secrets=values,
            requested_model=self.model,
            api_key=self.api_key,
            start_timeout_s=self.start_timeout,
            extra_body=self.extra_body,
            allow_control_tokens=self.allow_control_tokens,
            accept_models=self.accept_models,
            **options,
        )
