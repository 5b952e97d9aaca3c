"""Where one row is in its grammar."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

NOTHING_FITS = "its grammar allows no token of the vocabulary"


class RowMatcher:
    """Follows the generated tokens of one row, through preemptions too. `parser` is for who fills masks.

    can_force: whether tokens that the grammar forces are taken at once, without a mask and a step for each.
    never_force: those that have to be sampled all the same, because they may end the row.
    is_open: no token is forced here, as far as was looked; the mask allows what `accepts` does then.
    """

    def __init__(self, parser: "LLMatcher", can_force: bool = False, never_force: frozenset[int] = frozenset()) -> None:
        self.parser, self._can_force, self._never_force = parser, can_force, never_force
        self.is_open = False
        self.look()

    def take(self, token_id: int) -> bool:
        """Go on by a token that the mask allowed. Whether the completion is whole, and nothing can follow."""
        self.is_open = False
        self.parser.consume_token(token_id)
        return self.parser.is_stopped() and not self.parser.is_error()

    def look(self) -> bool:
        """Look whether the next tokens are forced, and return whether `take_forced` is to take them."""
        if self.parser.compute_ff_tokens():
            return self._can_force
        self.is_open = not self.parser.is_stopped()
        return False

    def take_forced(self, most: int) -> tuple[list[int], bool]:
        """Go on by the tokens that must come next, `most` of them at most, and return them, and whether the completion
        is whole. One mask after the other would allow just these."""
        taken: list[int] = []
        while len(taken) < most and self.look():
            token_ids = self.parser.compute_ff_tokens()
            sampled = [place for place, token in enumerate(token_ids) if token in self._never_force]
            token_ids = token_ids[: min([most - len(taken), *sampled])]
            if not token_ids:
                break
            self.parser.consume_tokens(token_ids)
            taken += token_ids
        return taken, bool(taken) and self.parser.is_stopped() and not self.parser.is_error()

    def accepts(self, token_id: int) -> bool:
        """Whether the mask of an open place allows the token, in a small part of the time of filling it."""
        return self.parser.validate_tokens([token_id]) == 1

    @property
    def error(self) -> str | None:
        """Why no token can follow; None: one can, as far as was looked. Found when a mask is filled."""
        if not self.parser.is_error():
            return None
        reason = self.parser.get_error().partition("\n")[0][:200]
        if reason.startswith("NoExtension"):
            return NOTHING_FITS
        return f"its grammar cannot be followed ({reason})"
