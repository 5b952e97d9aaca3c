"""Checks across all request lines of an input: one endpoint, one model, and unique ids.

Planning keeps an 8-byte hash of each line's id. If two are equal, their files are read again, so that only true
duplicates are refused, with both lines named.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.data.requests import openai_batch
from pipeline.data.requests.request_row import (
    CUSTOM_ID,
    FORMAT,
    BatchRequest,
    Endpoint,
    NoRequest,
    Refused,
    shortened,
)
from pipeline.errors import InputError

# Example line for messages.
EXPECTED_LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True)
class Requests:
    """Common properties of an input's requests. model: the name in the lines, or None."""

    endpoint: Endpoint
    model: str | None = None
    ignored: tuple[str, ...] = ()  # fields of some lines that have no effect
    samples: bool = False  # some lines request several completions
    dimensions: int | None = None  # of embeddings, if requested by all lines
    prompt_logprobs: bool = False  # some lines request log-probabilities of the prompt
    first_line: str = field(default="", compare=False)  # file and line of the first request, for messages

    @property
    def url(self) -> str:
        """Url of the endpoint, as in the lines."""
        return _url(self.endpoint)

    def row(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a line's object to a row of `request_schema`."""
        try:
            return openai_batch.request(line, self.endpoint).row(self.endpoint)
        except Refused as why:
            name = line.get(CUSTOM_ID)
            return BatchRequest(name if isinstance(name, str) else None, refused=str(why)).row(self.endpoint)


@dataclass
class FileNotes:
    """Properties of one file's lines, each with the number of the first such line."""

    name: str  # for messages
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))  # of each custom_id
    endpoints: dict[Endpoint, int] = field(default_factory=dict)
    unknown_url: tuple[int, object] | None = None
    models: dict[str, int] = field(default_factory=dict)
    dimensions: dict[int | None, int] = field(default_factory=dict)  # of embedding requests
    ignored: set[str] = field(default_factory=set)
    samples: bool = False
    prompt_logprobs: bool = False

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Record a line. Raises InputError if it makes the whole input invalid."""
        try:
            found = openai_batch.heading(line)
        except NoRequest as why:
            raise InputError(f"{self.name}:{number}: {why} (input.format: {FORMAT})") from None
        self.hashes.append(_hash(found.custom_id))
        if found.endpoint is not None:
            self.endpoints.setdefault(found.endpoint, number)
        elif self.unknown_url is None:
            self.unknown_url = number, line.get("url")
        if found.model is not None and len(self.models) < 2:
            self.models.setdefault(found.model, number)
        if found.endpoint == "embedding" and len(self.dimensions) < 2:
            self.dimensions.setdefault(found.dimensions, number)
        self.ignored.update(found.ignored)
        self.samples = self.samples or found.samples
        self.prompt_logprobs = self.prompt_logprobs or found.prompt_logprobs


def requests_of(notes: list[FileNotes], lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]) -> Requests:
    """Return the common properties of all files. lines_of: reads (number, line) of the file with an index.

    Raises InputError with two lines that disagree or have the same custom_id.
    """
    urls = [(_url(e), f"{n.name}:{i}") for n in notes for e, i in n.endpoints.items()]
    models = [(model, f"{n.name}:{i}") for n in notes for model, i in n.models.items()]
    dimensions = [(number, f"{n.name}:{i}") for n in notes for number, i in n.dimensions.items()]
    for key, found in (("url", urls), ("body.model", models), ("body.dimensions", dimensions)):
        _refuse_several(key, found)
    if not urls:
        unknown = next((n for n in notes if n.unknown_url is not None), None)
        line, url = (unknown and unknown.unknown_url) or (0, None)
        found = f"the url of {(unknown or notes[0]).name}:{line} is {shortened(url)}; " if url is not None else ""
        raise InputError(
            f"{notes[0].name}: contains no request of OpenAI's Batch API; {found}expected lines such as {EXPECTED_LINE}"
        )
    _refuse_duplicates(notes, lines_of)
    ignored = {name for each in notes for name in each.ignored}
    return Requests(
        openai_batch.ENDPOINTS[urls[0][0]],
        model=models[0][0] if models else None,
        ignored=tuple(sorted(ignored)),
        samples=any(each.samples for each in notes),
        dimensions=dimensions[0][0] if dimensions else None,
        prompt_logprobs=any(each.prompt_logprobs for each in notes),
        first_line=urls[0][1],
    )


def _url(endpoint: Endpoint) -> str:
    return next(url for url, known in openai_batch.ENDPOINTS.items() if known == endpoint)


def _refuse_several(key: str, found: Sequence[tuple[object, str]]) -> None:
    """Raise InputError if the values differ. found: (value, file and line)."""
    for value, position in found:
        if value != found[0][0]:
            a, b = ("missing" if each is None else shortened(each) for each in (value, found[0][0]))
            raise InputError(
                f"{position}: {key} is {a}, but {b} in {found[0][1]}; all lines of a job must agree: use a separate "
                "file and job for each value"
            )


def _refuse_duplicates(
    notes: list[FileNotes], lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]
) -> None:
    hashes = [np.frombuffer(each.hashes, np.uint64) if each.hashes else np.empty(0, np.uint64) for each in notes]
    ordered = np.sort(np.concatenate(hashes))
    duplicates = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(duplicates):
        return
    seen: dict[str, str] = {}
    wanted = set(duplicates.tolist())
    for index, each in enumerate(notes):
        if not np.isin(hashes[index], duplicates).any():
            continue
        for number, line in lines_of(index):
            custom_id = openai_batch.heading(line).custom_id
            if _hash(custom_id) not in wanted:
                continue
            first_line = f"{each.name}:{number}"
            if custom_id in seen:
                raise InputError(
                    f"{first_line}: {CUSTOM_ID} {shortened(custom_id)} is also used by {seen[custom_id]}; each line "
                    "needs a unique one, which identifies its response"
                )
            seen[custom_id] = first_line


def _hash(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little")
