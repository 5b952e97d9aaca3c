"""Token ids of labels that may follow a prompt, such that no label is a prefix of another."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.tokenization.tokenizer import Tokenizer


def encode_labels(
    tokenizer: "Tokenizer", prompt_token_ids: Sequence[int], labels: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the token ids of each label as it follows the prompt.

    If one label is a prefix of another ("no", "not sure"), the end of text is appended to each: otherwise the shorter
    one would always be likelier. Raises ConfigError for labels without tokens, duplicates, and labels with the same
    tokens.
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
            reason = f"{label!r} occurs twice" if label == same else f"{same!r} and {label!r} have the same tokens"
            raise ConfigError(f"labels: {reason}")
        first[tokens] = label
    if any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(sorted(ids))):
        if tokenizer.end_token_id is None:
            raise ConfigError("labels: one is a prefix of another, and the tokenizer has no end-of-text token")
        return [(*tokens, tokenizer.end_token_id) for tokens in ids]
    return ids
