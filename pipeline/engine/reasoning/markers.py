"""Markers around a model's reasoning, as texts and as tokens of a checkpoint's vocabulary: each marker is one token,
both are headers of the harmony format, or both are searched in the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pipeline.errors import ConfigError

KEY = "sampling.reasoning"
# Markers of known models, in the order in which `auto` searches them among a tokenizer's added tokens.
KNOWN = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM, Nemotron, MiniMax
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|channel>", "<channel|>"),  # Gemma 4, whose reasoning begins with a line "thought"
)


@dataclass(frozen=True)
class ReasoningMarkers:
    """Texts of both markers. Raises ConfigError unless they are two different texts."""

    start: str
    end: str

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{KEY}.{name} = {value!r:.60}: expected a text such as {KNOWN[0][name == 'end']}")
        if self.start == self.end:
            raise ConfigError(f"{KEY}: start and end are both {self.start!r}; expected two different texts")

    @classmethod
    def from_config(cls, given: "Mapping[str, Any] | ReasoningMarkers | str") -> "ReasoningMarkers | Literal['auto']":
        """Build from a setting. Raises ConfigError, whose message begins with the key."""
        if isinstance(given, ReasoningMarkers):
            return given
        if given == "auto":
            return "auto"
        if not isinstance(given, Mapping) or set(given) != {"start", "end"}:
            raise ConfigError(f"{KEY} = {given!r:.60}: expected auto, or {{start: <think>, end: </think>}}")
        return cls(given["start"], given["end"])


CHANNELS = ReasoningMarkers("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""Markers of the harmony format (gpt-oss), see `ChannelTokens`."""
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")


@dataclass(frozen=True)
class MarkerTokens:
    """Token ids of both markers in one vocabulary."""

    start_id: int
    end_id: int


@dataclass(frozen=True)
class ChannelTokens(MarkerTokens):
    """Token ids of the harmony format, whose completions consist of messages with a header and a channel:

        <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

    start_id is `<|channel|>`. end_id is `<|message|>`, which ends reasoning if its header has the channel `final`.
    """

    message_start_id: int
    message_end_id: int
    assistant_ids: tuple[int, ...]
    final_ids: tuple[int, ...]

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset((self.start_id, self.end_id, self.message_start_id, self.message_end_id))

    @classmethod
    def from_vocabulary(cls, tokenizer: "Vocabulary") -> "ChannelTokens":
        start, channel, message, end = (tokenizer.added_tokens[text] for text in _HARMONY[:4])
        assistant, final = tokenizer.continuation([start], "assistant"), tokenizer.continuation([channel], "final")
        return cls(channel, message, start, end, tuple(assistant), tuple(final))


class Vocabulary(Protocol):
    """A `Tokenizer`, whose import needs transformers."""

    @property
    def added_tokens(self) -> Mapping[str, int]: ...
    def token_id(self, text: str) -> int | None: ...
    def continuation(self, ids: Sequence[int], text: str, /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


def find_markers(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Vocabulary) -> ReasoningMarkers:
    """Return `wanted`, or for auto the known markers among the tokenizer's added tokens. Raises ConfigError if there
    are none, or if one of `wanted` is several tokens and the other a special token, which does not appear in the text.
    """
    if wanted == "auto":
        for start, end in KNOWN:
            if {start, end} <= tokenizer.added_tokens.keys():
                return ReasoningMarkers(start, end)
        if tokenizer.added_tokens.keys() >= set(_HARMONY):
            return CHANNELS
        known = ", ".join(start for start, _ in (*KNOWN, _HARMONY[1:3]))
        raise ConfigError(
            f"{KEY}: auto: the checkpoint's tokenizer has no known start-of-reasoning token ({known}); "
            f"set the model's own markers, {KEY}: {{start: ..., end: ...}}, or remove the key"
        )
    ids = {name: tokenizer.token_id(text) for name, text in vars(wanted).items()}
    if None in ids.values():
        if not wanted.start.strip():
            raise ConfigError(
                f"{KEY}.start = {wanted.start!r}: whitespace of several tokens, which may begin any text; expected a "
                "word"
            )
        for name, token_id in ids.items():
            if token_id is not None and not tokenizer.decode([token_id]):
                raise ConfigError(
                    f"{KEY}.{name} = {getattr(wanted, name)!r}: is a special token of the checkpoint's tokenizer, but "
                    "the other marker is several tokens; expected two single tokens, or two that appear in the text"
                )
    return wanted


def marker_tokens(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Vocabulary) -> MarkerTokens | ReasoningMarkers:
    """Return the ids of the markers, or their texts if one is several tokens that are not those of the harmony format.
    Raises ConfigError as `find_markers`."""
    found = find_markers(wanted, tokenizer)
    if found == CHANNELS and tokenizer.added_tokens.keys() >= set(_HARMONY):
        return ChannelTokens.from_vocabulary(tokenizer)
    start, end = tokenizer.token_id(found.start), tokenizer.token_id(found.end)
    return found if start is None or end is None else MarkerTokens(start, end)
