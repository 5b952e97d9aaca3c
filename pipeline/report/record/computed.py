"""Tokens that engines computed, of prompts and generated ones: what work is counted in."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    """Tokens that an engine computed: of prompts (what shared KV blocks served is not computed), and generated."""

    prompt: int = 0
    generated: int = 0

    @classmethod
    def by(cls, stats: Mapping[str, int]) -> "Computed":
        """By an engine, from its EngineStats. Work done again after a preemption is not in it."""
        prompt = stats.get("prompt_tokens", 0) - stats.get("cached_tokens", 0)
        return cls(max(0, prompt), stats.get("generated_tokens", 0))

    @property
    def all(self) -> int:
        return self.prompt + self.generated

    def __add__(self, other: "Computed") -> "Computed":
        return Computed(self.prompt + other.prompt, self.generated + other.generated)

    def less(self, other: "Computed") -> "Computed":
        """Without `other`, never below nothing: counters that are told at different moments may cross."""
        return Computed(max(0, self.prompt - other.prompt), max(0, self.generated - other.generated))
