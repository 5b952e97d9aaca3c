"""Where one row is in its grammar."""

from llguidance import LLMatcher


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
        """Why no mask can be made any more (the grammar passed a limit); None: it can."""
        return " ".join(self.parser.get_error().split())[:400] if self.parser.is_error() else None
