"""The markers around a model's reasoning, as texts, and as tokens of a vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
