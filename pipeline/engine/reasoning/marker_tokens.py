"""Markers in a checkpoint's vocabulary: each is one token, or both are looked for in the text (`text_reasoning.py`)."""

from typing import Literal

from pipeline.engine.reasoning.markers import KEY, KNOWN, MarkerTokens, ReasoningMarkers
from pipeline.errors import ConfigError
from pipeline.tokenization.tokenizer import Tokenizer


def find_markers(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Tokenizer) -> ReasoningMarkers:
    """`wanted`, or those that are among the tokenizer's added tokens. Raises ConfigError where none are, or where one
    of `wanted` is several tokens and the other a special one, which is no text."""
    if wanted == "auto":
        for start, end in KNOWN:
            if {start, end} <= tokenizer.added_tokens.keys():
                return ReasoningMarkers(start, end)
        known = ", ".join(start for start, _ in KNOWN)
        raise ConfigError(
            f"{KEY}: auto: the checkpoint's tokenizer has no token that begins reasoning (looked for {known}); "
            f"name the model's own, {KEY}: {{start: ..., end: ...}}, or leave the key out"
        )
    ids = {name: tokenizer.token_id(text) for name, text in vars(wanted).items()}
    if None in ids.values():
        if not wanted.start.strip():
            raise ConfigError(
                f"{KEY}.start = {wanted.start!r}: blanks of several tokens, which begin any text; expected a word"
            )
        for name, token_id in ids.items():
            if token_id is not None and not tokenizer.decode([token_id]):
                raise ConfigError(
                    f"{KEY}.{name} = {getattr(wanted, name)!r}: is a special token of the checkpoint's tokenizer, and "
                    "the other marker is several tokens; expected two that are one token each, or two that are text"
                )
    return wanted


def marker_tokens(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Tokenizer) -> MarkerTokens | ReasoningMarkers:
    """Their ids, or their texts where one is several tokens. Raises ConfigError as `find_markers`."""
    found = find_markers(wanted, tokenizer)
    start, end = tokenizer.token_id(found.start), tokenizer.token_id(found.end)
    return found if start is None or end is None else MarkerTokens(start, end)
