"""Markers in a checkpoint's vocabulary: each is one token, so that it can be told apart from the text around it."""

from typing import Literal

from pipeline.engine.reasoning.markers import KEY, KNOWN, MarkerTokens, ReasoningMarkers
from pipeline.errors import ConfigError
from pipeline.tokenization.tokenizer import Tokenizer


def find_markers(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Tokenizer) -> ReasoningMarkers:
    """`wanted`, or those that are among the tokenizer's added tokens. Raises ConfigError where none are, or where one
    is not a single token: it could not be told apart from the text around it."""
    if wanted == "auto":
        for start, end in KNOWN:
            if {start, end} <= tokenizer.added_tokens.keys():
                return ReasoningMarkers(start, end)
        known = ", ".join(start for start, _ in KNOWN)
        raise ConfigError(
            f"{KEY}: auto: the checkpoint's tokenizer has no token that begins reasoning (looked for {known}); "
            f"name the model's own, {KEY}: {{start: ..., end: ...}}, or leave the key out"
        )
    for name, text in vars(wanted).items():
        if tokenizer.token_id(text) is None:
            raise ConfigError(
                f"{KEY}.{name} = {text!r}: is not one token of the checkpoint's tokenizer; expected a marker that is"
            )
    return wanted


def marker_tokens(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Tokenizer) -> MarkerTokens:
    """Raises ConfigError as `find_markers`."""
    found = find_markers(wanted, tokenizer)
    start, end = tokenizer.token_id(found.start), tokenizer.token_id(found.end)
    assert start is not None
    assert end is not None
    return MarkerTokens(start, end)
