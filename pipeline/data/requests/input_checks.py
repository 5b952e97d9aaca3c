"""Agreement of all lines of an input of requests: one endpoint, one model, and an id of its own for each.

Of a line a hash of 8 bytes is kept. Where two are equal, their files are read again, so that what is refused is a
duplicate with both lines named, never a collision.
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
    Endpoint,
    NoRequest,
    Refused,
    Request,
    shortened,
)
from pipeline.errors import InputError

# A line as messages show it.
EXPECTED_LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True)
class Requests:
    """What an input of requests is, as planning found it. `model`: the name in the lines; None where none has one."""

    endpoint: Endpoint
    model: str | None = None
    ignored: tuple[str, ...] = ()  # fields that some lines have and that change nothing here
    samples: bool = False  # whether some lines ask for several completions
    dimensions: int | None = None  # of embeddings, where all lines say so
    prompt_logprobs: bool = False  # whether some lines ask for those
    place: str = field(default="", compare=False)  # file and line of the first request, for messages

    @property
    def url(self) -> str:
        """Return the endpoint as lines name it."""
        return _url(self.endpoint)

    def row(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A line's object as a row of `request_schema`."""
        try:
            return openai_batch.request(line, self.endpoint).row(self.endpoint)
        except Refused as why:
            name = line.get(CUSTOM_ID)
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

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Raises InputError where the whole input is to be refused for this line."""
        try:
            found = openai_batch.heading(line)
        except NoRequest as why:
            raise InputError(f"{self.name}:{number}: {why} (input.format: {FORMAT})") from None
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


def requests_of(notes: list[FileNotes], lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]) -> Requests:
    """What the files, in their order, are together. `lines_of`: the lines of a file by its index, with their numbers.

    Raises InputError where lines disagree, naming two of them, or where two have one custom_id.
    """
    urls = [(_url(e), f"{n.name}:{i}") for n in notes for e, i in n.endpoints.items()]
    models = [(model, f"{n.name}:{i}") for n in notes for model, i in n.models.items()]
    dimensions = [(number, f"{n.name}:{i}") for n in notes for number, i in n.dimensions.items()]
    for key, found in (("url", urls), ("body.model", models), ("body.dimensions", dimensions)):
        _refuse_several(key, found)
    if not urls:
        raise InputError(
            f"{notes[0].name}: no line is a request of OpenAI's Batch API; expected lines such as {EXPECTED_LINE}"
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
        place=urls[0][1],
    )


def _url(endpoint: Endpoint) -> str:
    return next(url for url, of in openai_batch.ENDPOINTS.items() if of == endpoint)


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
    notes: list[FileNotes], lines_of: Callable[[int], Iterator[tuple[int, Mapping[str, Any]]]]
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
            custom_id = openai_batch.heading(line).custom_id
            if _hash(custom_id) not in wanted:
                continue
            place = f"{each.name}:{number}"
            if custom_id in seen:
                raise InputError(
                    f"{place}: {CUSTOM_ID} {shortened(custom_id)} is that of {seen[custom_id]} too; give "
                    "each line one of its own, by which its answer is found"
                )
            seen[custom_id] = place


def _hash(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little")
