"""The formats of requests, and what all lines of an input must agree on: one endpoint, one model, and an id of its own
for each.

Of a line a hash of 8 bytes is kept. Where two are equal, their files are read again, so that what is refused is a
duplicate with both lines named, never a collision.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.data.requests import anthropic_batch, bedrock_batch, openai_batch
from pipeline.data.requests.request_row import (
    CUSTOM_ID,
    Endpoint,
    Heading,
    NoRequest,
    Refused,
    Request,
    RequestFormat,
    shortened,
)
from pipeline.errors import InputError


@dataclass(frozen=True)
class _Reader:
    heading: Callable[[Mapping[str, Any]], Heading]
    request: Callable[[Mapping[str, Any], Endpoint], Request]
    endpoints: Mapping[str, Endpoint]  # by what lines call them
    fields: tuple[str, ...]  # of a line
    line: str  # as messages show it
    id_key: str = CUSTOM_ID  # where a line has its id
    endpoint_key: str = "url"  # what tells the endpoint
    model_key: str = "body.model"


READERS: Mapping[RequestFormat, _Reader] = {
    "openai-batch": _Reader(
        openai_batch.heading,
        openai_batch.request,
        openai_batch.ENDPOINTS,
        openai_batch.OF_LINE,
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}',
    ),
    "anthropic-batch": _Reader(
        anthropic_batch.heading,
        anthropic_batch.request,
        anthropic_batch.ENDPOINTS,
        anthropic_batch.OF_LINE,
        '{"custom_id": "1", "params": {"max_tokens": 256, "messages": [...]}}',
        endpoint_key="params",
        model_key="params.model",
    ),
    "bedrock-batch": _Reader(
        bedrock_batch.heading,
        bedrock_batch.request,
        bedrock_batch.ENDPOINTS,
        bedrock_batch.OF_LINE,
        '{"recordId": "1", "modelInput": {"messages": [...]}}',
        id_key="recordId",
        endpoint_key="modelInput",
    ),
}


@dataclass(frozen=True)
class Requests:
    """What an input of requests is, as planning found it. `model`: the name in the lines; None where none has one."""

    format: RequestFormat
    endpoint: Endpoint
    model: str | None = None
    ignored: tuple[str, ...] = ()  # fields that some lines have and that change nothing here
    samples: bool = False  # whether some lines ask for several completions
    dimensions: int | None = None  # of embeddings, where all lines say so
    prompt_logprobs: bool = False  # whether some lines ask for those
    place: str = field(default="", compare=False)  # file and line of the first request, for messages

    @property
    def asks_for(self) -> str:
        """What the format calls its endpoint."""
        return _name(self.endpoint, self.format)

    @property
    def endpoint_key(self) -> str:
        return READERS[self.format].endpoint_key

    def row(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A line's object as a row of `request_schema`."""
        reader = READERS[self.format]
        try:
            return reader.request(line, self.endpoint).row(self.endpoint)
        except Refused as why:
            name = line.get(reader.id_key)
            return Request(name if isinstance(name, str) else None, refused=str(why)).row(self.endpoint)


@dataclass
class FileNotes:
    """What was seen in one file. Where several lines say the same, the first one's number is kept."""

    name: str  # for messages
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))  # of each custom_id
    endpoints: dict[Endpoint, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    dimensions: dict[int | None, int] = field(default_factory=dict)  # of requests for embeddings
    ignored: set[str] = field(default_factory=set)
    samples: bool = False
    prompt_logprobs: bool = False

    def add(self, line: Mapping[str, Any], number: int, format: RequestFormat) -> None:
        """Raises InputError where the whole input is to be refused for this line."""
        try:
            found = READERS[format].heading(line)
        except NoRequest as why:
            raise InputError(f"{self.name}:{number}: {why} (input.format: {format})") from None
        self.hashes.append(_hash(found.custom_id))
        if found.endpoint is not None:
            self.endpoints.setdefault(found.endpoint, number)
        if found.model is not None and len(self.models) < 2:
            self.models.setdefault(found.model, number)
        if found.endpoint == "embedding" and len(self.dimensions) < 2:
            self.dimensions.setdefault(found.dimensions, number)
        self.ignored.update(found.ignored)
        self.samples = self.samples or found.samples
        self.prompt_logprobs = self.prompt_logprobs or found.prompt_logprobs


def requests_of(
    notes: list[FileNotes], format: RequestFormat, lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]
) -> Requests:
    """What the files, in their order, are together. `lines_of`: the lines of a file by its index, with their numbers.

    Raises InputError where lines disagree, naming two of them, or where two have one custom_id.
    """
    urls = [(_name(e, format), f"{n.name}:{i}") for n in notes for e, i in n.endpoints.items()]
    models = [(model, f"{n.name}:{i}") for n in notes for model, i in n.models.items()]
    dimensions = [(number, f"{n.name}:{i}") for n in notes for number, i in n.dimensions.items()]
    reader = READERS[format]
    for key, found in ((reader.endpoint_key, urls), (reader.model_key, models), ("body.dimensions", dimensions)):
        _refuse_several(key, found)
    if not urls:
        raise InputError(f"{notes[0].name}: no line is a request of {format}; expected lines such as {reader.line}")
    _refuse_duplicates(notes, format, lines_of)
    ignored = {name for each in notes for name in each.ignored}
    return Requests(
        format,
        reader.endpoints[urls[0][0]],
        models[0][0] if models else None,
        tuple(sorted(ignored)),
        any(each.samples for each in notes),
        dimensions[0][0] if dimensions else None,
        any(each.prompt_logprobs for each in notes),
        urls[0][1],
    )


def _name(endpoint: Endpoint, format: RequestFormat) -> str:
    return next(name for name, of in READERS[format].endpoints.items() if of == endpoint)


def _refuse_several(key: str, found: Sequence[tuple[object, str]]) -> None:
    """found: values with their places."""
    for value, where in found:
        if value != found[0][0]:
            a, b = ("nothing" if each is None else shortened(each) for each in (value, found[0][0]))
            raise InputError(
                f"{where}: {key} {a}, {found[0][1]} has {b}; a job has one: put the lines of each into a file and a "
                "job of their own"
            )


def _refuse_duplicates(
    notes: list[FileNotes], format: RequestFormat, lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]
) -> None:
    hashes = [np.frombuffer(each.hashes, np.uint64) if each.hashes else np.empty(0, np.uint64) for each in notes]
    ordered = np.sort(np.concatenate(hashes))
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(twice):
        return
    seen: dict[str, str] = {}
    wanted = set(twice.tolist())
    for index, each in enumerate(notes):
        if not np.isin(hashes[index], twice).any():
            continue
        for number, line in lines_of(index):
            custom_id = READERS[format].heading(line).custom_id
            if _hash(custom_id) not in wanted:
                continue
            place = f"{each.name}:{number}"
            if custom_id in seen:
                raise InputError(
                    f"{place}: {READERS[format].id_key} {shortened(custom_id)} is that of {seen[custom_id]} too; give "
                    "each line one of its own, by which its answer is found"
                )
            seen[custom_id] = place


def _hash(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little")
