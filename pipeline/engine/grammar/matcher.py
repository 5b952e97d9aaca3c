"""State of one row in its grammar."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

NOTHING_FITS = "its grammar allows no token of the vocabulary"


class RowMatcher:
    """Advances the grammar of one row by its generated tokens; it survives preemptions. `parser` is used to fill masks.

    can_force: whether forced tokens are appended at once, without a mask and a step for each.
    never_force: tokens that must still be sampled, because they may end the row.
    is_open: no token is known to be forced here; the mask then allows the tokens that `accepts` allows.
    """

    def __init__(self, parser: "LLMatcher", can_force: bool = False, never_force: frozenset[int] = frozenset()) -> None:
        self.parser, self._can_force, self._never_force = parser, can_force, never_force
        self.is_open = False
        self.look()

    def advance(self, token_id: int) -> bool:
        """Advance by a token that the mask allowed. Return whether the completion is complete: nothing can follow."""
        self.is_open = False
        self.parser.consume_token(token_id)
        return self.parser.is_stopped() and not self.parser.is_error()

    def look(self) -> bool:
        """Check for forced tokens. Return whether `advance_forced` should append them."""
        if self.parser.compute_ff_tokens():
            return self._can_force
        self.is_open = not self.parser.is_stopped()
        return False

    def advance_forced(self, max_tokens: int) -> tuple[list[int], bool]:
        """Advance by up to `max_tokens` forced tokens, the only ones that masks would allow. Return them, and whether
        the completion is complete."""
        forced: list[int] = []
        while len(forced) < max_tokens and self.look():
            token_ids = self.parser.compute_ff_tokens()
            sampled = [index for index, token in enumerate(token_ids) if token in self._never_force]
            token_ids = token_ids[: min([max_tokens - len(forced), *sampled])]
            if not token_ids:
                break
            self.parser.consume_tokens(token_ids)
            forced += token_ids
        return forced, bool(forced) and self.parser.is_stopped() and not self.parser.is_error()

    def accepts(self, token_id: int) -> bool:
        """Return whether the mask allows the token, much faster than filling it. Only for open matchers."""
        return self.parser.validate_tokens([token_id]) == 1

    @property
    def error(self) -> str | None:
        """Reason why no token can follow; None if none is known. Failures are found when a mask is filled."""
        if not self.parser.is_error():
            return None
        reason = self.parser.get_error().partition("\n")[0][:200]
        if reason.startswith("NoExtension"):
            return NOTHING_FITS
        return f"its grammar cannot be followed ({reason})"
