"""Where one row is in its grammar."""

from llguidance import LLMatcher

NOTHING_FITS = "its grammar allows no token of the vocabulary"


class RowMatcher:
    """Follows the generated tokens of one row, through preemptions too. `parser` is for who fills masks."""

    def __init__(self, parser: LLMatcher) -> None:
        self.parser = parser

    def take(self, token_id: int) -> bool:
        """Go on by a token that the mask allowed. Whether the completion is whole, and nothing can follow."""
        self.parser.consume_token(token_id)
        return self.parser.is_stopped() and not self.parser.is_error()

    @property
    def error(self) -> str | None:
        """Why no token can follow; None: one can, as far as was looked. Found when a mask is filled."""
        if not self.parser.is_error():
            return None
        reason = self.parser.get_error().partition("\n")[0][:200]
        if reason.startswith("NoExtension"):
            return NOTHING_FITS
        return f"its grammar cannot be followed ({reason})"
