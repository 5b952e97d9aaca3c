"""Labels that may follow a prompt, as token ids that can be told apart."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from pipeline.errors import ConfigError


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def end_token_id(self) -> int | None: ...

    def continuation(self, ids: Sequence[int], text: str) -> list[int]: ...


def encode_labels(tokenizer: Encodes, prompt_token_ids: Sequence[int], labels: Sequence[str]) -> list[tuple[int, ...]]:
    """The token ids of each label as it follows the prompt.

    Where one label is the beginning of another ("no", "not sure" may be), the end of the text belongs to each: else the
    shorter one, which happens whenever the longer does, would always be the likelier. Raises ConfigError for labels
    without a token, for one that is there twice, and for two with the same tokens.
    """
    ids = [tuple(tokenizer.continuation(prompt_token_ids, label)) for label in labels]
    if not ids:
        raise ConfigError("labels: expected at least one")
    first: dict[tuple[int, ...], str] = {}
    for label, tokens in zip(labels, ids):
        if not tokens:
            raise ConfigError(f"labels: {label!r} has no tokens")
        if tokens in first:
            same = first[tokens]
            why = f"{label!r} is there twice" if label == same else f"{same!r} and {label!r} have the same tokens"
            raise ConfigError(f"labels: {why}")
        first[tokens] = label
    if any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(sorted(ids))):
        if tokenizer.end_token_id is None:
            raise ConfigError("labels: one is the beginning of another, and the tokenizer has no end of text")
        return [(*tokens, tokenizer.end_token_id) for tokens in ids]
    return ids
