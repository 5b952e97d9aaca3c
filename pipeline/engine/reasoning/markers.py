"""The markers around a model's reasoning, as texts and in a checkpoint's vocabulary: each is one token, or both are
looked for in the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pipeline.errors import ConfigError

KEY = "sampling.reasoning"
# Those of checkpoints that are around, in the order in which `auto` looks for them among a tokenizer's added tokens.
KNOWN = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM, Nemotron, MiniMax
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
)


@dataclass(frozen=True)
class ReasoningMarkers:
    """Raises ConfigError where they are no two texts."""

    start: str
    end: str

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{KEY}.{name} = {value!r:.60}: expected a text such as {KNOWN[0][name == 'end']}")
        if self.start == self.end:
            raise ConfigError(f"{KEY}: start and end are both {self.start!r}; expected two texts")

    @classmethod
    def of(cls, given: "Mapping[str, Any] | ReasoningMarkers | str") -> "ReasoningMarkers | Literal['auto']":
        """From what is written. Raises ConfigError, whose message begins with the key."""
        if isinstance(given, ReasoningMarkers):
            return given
        if given == "auto":
            return "auto"
        if not isinstance(given, Mapping) or set(given) != {"start", "end"}:
            raise ConfigError(f"{KEY} = {given!r:.60}: expected auto, or {{start: <think>, end: </think>}}")
        return cls(given["start"], given["end"])


@dataclass(frozen=True)
class MarkerTokens:
    """The ids of both markers in one vocabulary."""

    start_id: int
    end_id: int


class Vocabulary(Protocol):
    """A `Tokenizer`, which takes transformers to import."""

    @property
    def added_tokens(self) -> Mapping[str, int]: ...
    def token_id(self, text: str) -> int | None: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


def find_markers(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Vocabulary) -> ReasoningMarkers:
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


def marker_tokens(wanted: ReasoningMarkers | Literal["auto"], tokenizer: Vocabulary) -> MarkerTokens | ReasoningMarkers:
    """Their ids, or their texts where one is several tokens. Raises ConfigError as `find_markers`."""
    found = find_markers(wanted, tokenizer)
    start, end = tokenizer.token_id(found.start), tokenizer.token_id(found.end)
    return found if start is None or end is None else MarkerTokens(start, end)
