"""Declared prices: the only place where machine time and tokens become US dollars."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MICROSECONDS_PER_HOUR = 3_600_000_000


@dataclass(frozen=True)
class Prices:
    """Prices that a job declares, in US dollars. One that is not declared counts as 0.

    hourly_usd: of an hour of one engine's machine. usd_per_million: of a server's tokens, by `input`, `cached_input`
    (default: `input`) and `output`; empty if tokens have no price.
    """

    hourly_usd: float | None = None
    usd_per_million: Mapping[str, float] = field(default_factory=dict)

    @property
    def are_declared(self) -> bool:
        return self.hourly_usd is not None or bool(self.usd_per_million)

    def machine_usd(self, us: float) -> float:
        """Return the price of `us` microseconds of one engine's machine."""
        return (self.hourly_usd or 0.0) * us / MICROSECONDS_PER_HOUR

    def prompt_usd(self, tokens: float, cached: float = 0) -> float:
        """Return the price of prompt tokens, `cached` of which came from the server's cache."""
        price = self.usd_per_million.get("input", 0.0)
        return ((tokens - cached) * price + cached * self.usd_per_million.get("cached_input", price)) / 1e6

    def generated_usd(self, tokens: float) -> float:
        """Return the price of generated tokens."""
        return tokens * self.usd_per_million.get("output", 0.0) / 1e6

    def token_usd(self, stats: Mapping[str, int]) -> tuple[float, float]:
        """Return the price of the prompt tokens and of the generated tokens in an engine's counters."""
        prompt = self.prompt_usd(stats.get("prompt_tokens", 0), stats.get("cached_tokens", 0))
        return prompt, self.generated_usd(stats.get("generated_tokens", 0))

    def unmetered_usd(self, stats: Mapping[str, int]) -> float:
        """Return the most that requests of unknown usage cost, in addition to `token_usd`."""
        return self._bound_usd(stats, "unmetered")

    def committed_usd(self, stats: Mapping[str, int]) -> float:
        """Return the price of all tokens, with unmetered and open requests at their bounds."""
        return sum(self.token_usd(stats)) + self.unmetered_usd(stats) + self._bound_usd(stats, "open")

    def _bound_usd(self, stats: Mapping[str, int], kind: str) -> float:
        """Return the price of requests at their prompts and maximum outputs."""
        prompt, generated = (stats.get(f"{kind}_{name}_tokens", 0) for name in ("prompt", "generated"))
        return self.prompt_usd(prompt) + self.generated_usd(generated)
