"""Tokens that servers bill: those of answers, those without a count, and those that open requests may still cost.

A request reserves the most that it may cost before it is sent. Its answer's `usage` replaces the reservation. If no
usage arrives (a cut stream, a lost connection, a cancelled request), the server may bill it all the same: it counts at
its reservation, as unmetered.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.prices import Prices

BYTES_PER_TOKEN = 2  # fewer than of most texts, so that the estimate is rather too high
MESSAGE_TOKENS = 16  # of a chat template, for each message
IMAGE_TOKENS = 1500
MAX_TOKENS = 2**31 - 1  # a larger count is no count
NUM_LOGGED = 5
NANO_USD = 1e-9


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer, by the server's count."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def usage_of(answer: object, is_embedding: bool) -> Usage | None:
    """Return the usage in an answer; None if it is missing or no count."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    prompt = count_of(usage, "prompt_tokens")
    generated = 0 if is_embedding else count_of(usage, "completion_tokens")
    if prompt is None or generated is None:
        return None
    return Usage(prompt, min(count_of(usage, "prompt_tokens_details", "cached_tokens") or 0, prompt), generated)


def count_of(found: object, *names: str) -> int | None:
    """Return a number of tokens in a nested mapping; None if it is missing or no count."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MAX_TOKENS else None


@dataclass(frozen=True)
class Reservation:
    """The most tokens that a request is expected to cost. estimate: of the prompt, before it was scaled by what earlier
    answers showed; 0 if the prompt's tokens are known."""

    prompt_tokens: int
    generated_tokens: int
    estimate: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


class Bill:
    """Bill of one request: open until it is paid, lost or void, whichever comes first."""

    def __init__(self, meter: "Meter", reserved: Reservation) -> None:
        self._meter, self._reserved, self._is_open = meter, reserved, True
        self._parts: list[Bill] = []
        self._tokens = reserved.tokens
        meter._open(reserved, 1)

    @property
    def is_open(self) -> bool:
        return self._is_open or any(part.is_open for part in self._parts)

    @property
    def tokens(self) -> int:
        """Tokens of its answer; before it arrives, and if they are unknown, those reserved."""
        return self._tokens + sum(part.tokens for part in self._parts)

    def split(self, count: int) -> list["Bill"]:
        """Return the bills of the requests that are sent instead, each for an equal share of the generated tokens."""
        self.void()
        share = replace(self._reserved, generated_tokens=self._reserved.generated_tokens // count)
        self._parts = [Bill(self._meter, share) for _ in range(count)]
        return self._parts

    def pay(self, usage: Usage) -> None:
        """Count the tokens of its answer."""
        if self._close():
            self._tokens = usage.prompt_tokens + usage.generated_tokens
            self._meter._pay(usage, self._reserved)

    def lose(self, reason: str) -> None:
        """Count the reservation: the request may have been computed, and nothing shows its tokens."""
        if self._close():
            self._meter._lose(self._reserved, reason)

    def void(self) -> None:
        """Count nothing: the request was not sent, or was rejected."""
        if self._close():
            self._tokens = 0

    def _close(self) -> bool:
        was_open, self._is_open = self._is_open, False
        if was_open:
            self._meter._open(self._reserved, -1)
        return was_open


class Meter:
    """Tokens of all requests of one process, and what they cost. has_budget: nothing fits before the first grant."""

    def __init__(self, prices: Prices, has_budget: bool) -> None:
        self._prices = prices
        self._has_budget = has_budget
        self._granted_usd: float | None = None
        self._scale = 1.0  # highest ratio of a prompt's tokens to their estimate
        self.num_open = 0
        self.counts: dict[str, int] = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generated_tokens", "num_unmetered", "unmetered_prompt_tokens",
             "unmetered_generated_tokens", "open_prompt_tokens", "open_generated_tokens"), 0)  # fmt: skip

    def grant(self, usd: float) -> None:
        """Set the most that all requests may cost, answered and open ones together."""
        self._granted_usd = usd

    def reserve(self, body: Mapping[str, Any], max_tokens: int) -> Reservation:
        """Return the reservation of a request. max_tokens: bound of the generated tokens, if the body has none."""
        prompt, estimate = body.get("prompt"), 0
        if isinstance(prompt, list):
            num_prompt = len(prompt)
        else:
            estimate = _estimate(body)
            num_prompt = round(estimate * self._scale)
        if "input" in body:
            return Reservation(num_prompt, 0, estimate)
        bound = count_of(body.get("max_completion_tokens")) or count_of(body.get("max_tokens")) or max_tokens
        return Reservation(num_prompt, bound * (count_of(body.get("n")) or 1), estimate)

    def open(self, reserved: Reservation) -> Bill:
        """Reserve, whether it fits or not."""
        return Bill(self, reserved)

    def fits(self, reserved: Reservation) -> bool:
        """Return whether the request may be sent."""
        if not self._has_budget:
            return True
        # A sum of floats may differ from the grant's by rounding.
        if self._granted_usd is None:
            return False
        return self._prices.committed_usd(self.counts) + self.usd(reserved) <= self._granted_usd + NANO_USD

    def usd(self, reserved: Reservation) -> float:
        """Return what the request costs at most."""
        return self._prices.prompt_usd(reserved.prompt_tokens) + self._prices.generated_usd(reserved.generated_tokens)

    def _open(self, reserved: Reservation, sign: int) -> None:
        self.num_open += sign
        self.counts["open_prompt_tokens"] += sign * reserved.prompt_tokens
        self.counts["open_generated_tokens"] += sign * reserved.generated_tokens

    def _pay(self, usage: Usage, reserved: Reservation) -> None:
        self.counts["prompt_tokens"] += usage.prompt_tokens
        self.counts["cached_tokens"] += usage.cached_tokens
        self.counts["generated_tokens"] += usage.generated_tokens
        if reserved.estimate:
            self._scale = max(self._scale, usage.prompt_tokens / reserved.estimate)

    def _lose(self, reserved: Reservation, reason: str) -> None:
        self.counts["num_unmetered"] += 1
        self.counts["unmetered_prompt_tokens"] += reserved.prompt_tokens
        self.counts["unmetered_generated_tokens"] += reserved.generated_tokens
        if self.counts["num_unmetered"] <= NUM_LOGGED:
            last = "; later ones are not logged" if self.counts["num_unmetered"] == NUM_LOGGED else ""
            print(
                f"the tokens of a request are not known ({reason}): counted as {reserved.prompt_tokens:,} + "
                f"{reserved.generated_tokens:,}{last}",
                flush=True,
            )


def _estimate(body: Mapping[str, Any]) -> int:
    """Return an estimate of the prompt's tokens."""
    num_bytes, images, messages = 0, 0, body.get("messages") or ()
    for message in messages:
        more_bytes, more_images = _size({name: value for name, value in message.items() if name != "role"})
        num_bytes, images = num_bytes + more_bytes, images + more_images
    num_bytes += sum(len(body.get(name, "").encode(errors="replace")) for name in ("prompt", "input"))
    for name in "tools", "response_format":  # they become part of the prompt
        if body.get(name):
            num_bytes += len(json.dumps(body[name], ensure_ascii=False).encode(errors="replace"))
    return max(1, -(-num_bytes // BYTES_PER_TOKEN)) + MESSAGE_TOKENS * len(messages) + IMAGE_TOKENS * images


def _size(value: object) -> tuple[int, int]:
    """Return the UTF-8 bytes of the texts in a message, and the number of its images."""
    if isinstance(value, str):
        return len(value.encode(errors="replace")), 0
    if isinstance(value, Mapping):
        if "image_url" in value:
            return 0, 1
        value = [inner for name, inner in value.items() if name != "type"]
    if not isinstance(value, list):
        return 0, 0
    sizes = [_size(inner) for inner in value]
    return sum(size for size, _ in sizes), sum(images for _, images in sizes)
