"""Configuration of a server as the engine, and the rows that are sent to it. Plain frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pipeline.engine.sampling_params import SamplingParams
from pipeline.prices import Prices
from pipeline.stores.redaction import MIN_SECRET

Route = Literal["chat", "completion", "embedding"]
PATHS: dict[Route, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}


@dataclass(frozen=True)
class DocumentFolder:
    """Folder of the PDFs whose pages are the images of all rows. url: the job's input, a path or url. base: the folder
    on its filesystem."""

    url: str = field(repr=False)
    base: str


@dataclass(frozen=True)
class ImageOptions:
    """Decoding of images: scaled down to max_pixels, and encoded in `format`, for JPEG with `quality`, by
    `processes` processes. dpi: resolution of pages. hosts, roots: names of hosts and prefixes of paths from which rows
    may read images. documents: None if rows are not pages of PDFs."""

    max_pixels: int = 1 << 20
    format: Literal["jpeg", "png"] = "jpeg"
    quality: int = 90
    dpi: int = 150
    processes: int = 2
    hosts: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    documents: DocumentFolder | None = None


@dataclass(frozen=True)
class EndpointConfig:
    """Servers to send requests to: `urls` that run already, or the one that the command `serve` starts.

    requested_model: name of the model in requests; None: the only one that the server lists. route: of all requests.
    max_concurrency: maximum open requests of one server. start_timeout_s: time until the first answer. stall_timeout_s:
    maximum time without a generated token. request_timeout_s: maximum time of an answer that does not arrive in pieces.
    max_retries: of a failed request. requests_per_minute, tokens_per_minute: limits of all servers together; None:
    unlimited. headers: added to each request. extra_body: fields that are added to each request; None removes a field.
    serve_secrets: values of variables in `serve`. allow_control_tokens: send texts in which the server would parse
    control tokens. params, dimensions: options of the first request, so that a server without them fails at once.
    expected_model, expected_version: those of the run that this one continues; None: a new output. accept_models: other
    names of the model that answers may have. has_budget: rows are sent only within the engine's grants, at `prices`.
    storage_options: of image roots, by url prefix.
    """

    urls: tuple[str, ...] = ()
    serve: tuple[str, ...] = field(default=(), repr=False)  # with secrets
    requested_model: str | None = None
    route: Route = "chat"
    api_key: str | None = field(default=None, repr=False)
    start_timeout_s: float = 1800.0
    stall_timeout_s: float = 300.0
    max_concurrency: int = 1024
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    allow_control_tokens: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_timeout_s: float = 1800.0
    max_retries: int = 4
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    serve_secrets: frozenset[str] = field(default=frozenset(), repr=False)
    dimensions: int = 0
    expected_model: str | None = None
    expected_version: str = ""
    accept_models: tuple[str, ...] = ()
    prices: Prices = field(default_factory=Prices)
    has_budget: bool = False
    images: ImageOptions = ImageOptions()
    storage_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> str:
        """Name of the model in messages."""
        return self.requested_model or "the server's model"

    @property
    def secrets(self) -> frozenset[str]:
        """Texts that no message shows."""
        found = {self.api_key or "", *self.headers.values(), *self.serve_secrets}
        return frozenset(text for text in found if len(text) >= MIN_SECRET)

    @property
    def has_tools(self) -> bool:
        """True if the model may call tools."""
        return bool(self.extra_body.get("tools"))


@dataclass(frozen=True)
class EndpointRequest:
    """One row to send. body: the request without the model's name, with the prompt as text. prompt_token_ids: the same
    prompt as tokens, for servers that accept them; empty if unknown. control_token: a control token that the server
    would parse in the text; empty if there is none. images: the files that the body's parts refer to, in their order:
    their content, or a path or url. is_follow_up: sent before waiting requests, while the server may still cache the
    prompt that it continues. expects_follow_up: such a request follows."""

    row_id: object
    body: Mapping[str, Any]
    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    control_token: str = ""
    images: tuple[bytes | str, ...] = field(default=(), repr=False)
    quality: None = None
    is_follow_up: bool = False
    expects_follow_up: bool = False


def base_url(url: str) -> tuple[str, str]:
    """Return a server's url with the path of its API, and its query. Without a path, /v1 is added; the path of a route
    is cut."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    for route in (*PATHS.values(), "/models"):
        path = path.removesuffix(route)
    path = path if parts.path.strip("/") else "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), f"?{parts.query}" if parts.query else ""
