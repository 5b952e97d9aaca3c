"""Configuration of a server as the engine, and the rows that are sent to it. Plain frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from pipeline.engine.params import SamplingParams

Route = Literal["chat", "completion", "embedding"]
PATHS: dict[Route, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}


@dataclass(frozen=True)
class EndpointConfig:
    """Servers to send requests to: `urls` that run already, or the one that the command `serve` starts.

    requested_model: name of the model in requests; None: the only one that the server lists. route: of all requests.
    port: of a started server; None: a free one. max_concurrency: maximum open requests of one server. start_timeout_s:
    time until the first answer. stall_timeout_s: maximum time without a generated token. extra_body: fields that are
    added to each request; None removes a field. allow_control_tokens: send texts in which the server would parse
    control tokens. logprobs, dimensions: options of the first request, so that a server without them fails at once.
    expected_model, expected_version: those of the run that this one continues; None: a new output. accept_models: other
    names of the model that answers may have. prices: of 1M tokens in USD, by `input`, `cached_input` and `output`;
    empty: unknown. has_budget: rows are sent only within the engine's grants, at these prices.
    """

    urls: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    requested_model: str | None = None
    route: Route = "chat"
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    start_timeout_s: float = 1800.0
    stall_timeout_s: float = 300.0
    max_concurrency: int = 1024
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    allow_control_tokens: bool = False
    logprobs: int | None = None
    dimensions: int = 0
    expected_model: str | None = None
    expected_version: str = ""
    accept_models: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    has_budget: bool = False

    @property
    def model(self) -> str:
        """Name of the model in messages."""
        return self.requested_model or "the server's model"

    @property
    def has_tools(self) -> bool:
        """True if the model may call tools."""
        return bool(self.extra_body.get("tools"))


@dataclass(frozen=True)
class EndpointRequest:
    """One row to send. body: the request without the model's name, with the prompt as text. prompt_token_ids: the same
    prompt as tokens, for servers that accept them; empty if unknown. control_token: a control token that the server
    would parse in the text; empty if there is none."""

    row_id: object
    body: Mapping[str, Any]
    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    control_token: str = ""
    quality: None = None


def base_url(url: str) -> str:
    """Return a server's url with the path of its API: without a path, /v1 is added."""
    plain = url.rstrip("/")
    return plain if urlsplit(plain).path else f"{plain}/v1"
