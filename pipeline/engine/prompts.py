"""Requests from texts, for the calls of `Engine` that return results in order. `row_id` is the index of a text."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.tasks import Choice, Score, Task
from pipeline.engine.token_ids import given_ids
from pipeline.errors import ConfigError
from pipeline.tokenization.labels import encode_labels
from pipeline.tokenization.tokenizer import Tokenizer

Text = str | list[int]
"""A text, or the ids of its tokens."""


def encode_all(tokenizer: Tokenizer, texts: Text | Iterable[Text]) -> list[list[int]]:
    """Return the token ids of one text or of several. Raises ConfigError for other types."""
    is_iterable = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | bytearray)
    texts_or_ids: list[Any] = list(texts) if is_iterable else [texts]
    if is_iterable and texts_or_ids and isinstance(texts_or_ids[0], Integral):  # the ids of one text
        texts_or_ids = [texts_or_ids]
    return [tokenizer.encode(text) if isinstance(text, str) else given_ids(text) for text in texts_or_ids]


def completion_requests(
    tokenizer: Tokenizer,
    prompts: Text | Iterable[Text],
    params: SamplingParams | Iterable[SamplingParams] | None,
    adapter: str | Sequence[str | None] | None,
) -> list[Request]:
    """Build the requests of `Engine.generate`."""
    ids = encode_all(tokenizer, prompts)
    if isinstance(params, Iterable) and not isinstance(params, Mapping):
        each: list[Any] = list(params)
    else:
        each = [params or SamplingParams()] * len(ids)
    if len(each) != len(ids):
        raise ConfigError(f"{len(ids)} prompts with {len(each)} sampling params: expected one for all or one for each")
    for own in each:
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"params: expected SamplingParams, one for all or one for each, found {own!r:.80}")
    names = [adapter] * len(ids) if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != len(ids):
        raise ConfigError(f"{len(ids)} prompts with {len(names)} adapters: expected one for all or one for each")
    return [Request(row, prompt, own, adapter=name) for row, (prompt, own, name) in enumerate(zip(ids, each, names))]


def score_requests(
    tokenizer: Tokenizer, prompts: Text | Iterable[Text], completions: Sequence[str] | None, top: int | None
) -> list[Request]:
    """Build the requests of `Engine.score`."""
    ids = encode_all(tokenizer, prompts)
    if completions is None:
        return task_requests(ids, [Score(1, top)] * len(ids))
    _check_list("completions", completions)
    if len(completions) != len(ids):
        raise ConfigError(f"{len(ids)} prompts with {len(completions)} completions: expected one for each")
    texts = [own + tokenizer.continuation(own, text) for own, text in zip(ids, completions)]
    return task_requests(texts, [Score(max(len(own), 1), top) for own in ids])


def choice_requests(tokenizer: Tokenizer, prompts: Text | Iterable[Text], labels: Sequence[str]) -> list[Request]:
    """Build the requests of `Engine.choose`."""
    _check_list("labels", labels)
    ids = encode_all(tokenizer, prompts)
    return task_requests(ids, [Choice(tuple(encode_labels(tokenizer, own, labels))) for own in ids])


def task_requests(ids: Sequence[list[int]], tasks: Sequence[Task]) -> list[Request]:
    """Build a request for each text and its task."""
    params = SamplingParams()
    return [Request(row, own, params, task=task) for row, (own, task) in enumerate(zip(ids, tasks))]


def _check_list(name: str, texts: object) -> None:
    """Raise ConfigError for a single text, which would be read as a list of its characters."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ConfigError(f"{name} = {texts!r:.80}: expected a list of texts")
