"""Text of a growing sequence, and detection of stop strings.

Only sequences with stop strings are decoded as they grow; `Tokenizer.decode` decodes the others once at the end. A push
decodes a short window of the last tokens, not the whole text, so its cost does not grow with the sequence.

The visible text of n tokens is their decoded text without trailing U+FFFD. A tokenizer shows the bytes of an unfinished
character as U+FFFD, and they may still become a character; text that is not visible yet cannot end a sequence. Visible
text stays visible even if a decoder retracts it (byte fallback hides the whole run of bytes that contains an unfinished
character).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_SLIDE = 8  # tokens in the window before it moves; the cost of moving is shared by this many pushes
_GIVE_UP = 32  # tokens of a window without a clean end: the bytes are invalid, since no character is that long


class IncrementalDetokenizer(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class StreamDetokenizer:
    """Turns pushed tokens into visible text, never half a character.

    The window is `token_ids[start:]`; `num_seen` characters of its text have been returned. It always begins with
    returned text, because some decoders treat the start of a text specially (they drop a leading blank), and new text
    must not be at that start.
    """

    def __init__(self, decoder: IncrementalDetokenizer) -> None:
        self._decoder = decoder
        self.token_ids: list[int] = []
        self._start = 0
        self._clean = 0  # after this many tokens all text was visible, as of the previous push
        self._num_seen = 0

    def push(self, token_id: int) -> str:
        """Append a token; return the text that became visible, often empty."""
        self.token_ids.append(token_id)
        text = self._decoder.decode(self.token_ids[self._start :])
        visible = text.rstrip("\ufffd")
        new = visible[self._num_seen :]
        self._num_seen = max(self._num_seen, len(visible))
        if len(visible) == len(text):
            if len(self.token_ids) - self._start >= _SLIDE:
                self._slide(max(self._clean, self._start + 1))
            self._clean = len(self.token_ids)
        elif len(self.token_ids) - self._start >= _GIVE_UP:
            self._slide(len(self.token_ids) - _GIVE_UP // 2)
        return new

    def _slide(self, start: int) -> None:
        """Move the window. Its visible text is counted in its own decoding, so its first token may be cut short.

        A window without visible text (special tokens, a single blank) gives the next token no context, so it is not
        moved yet.
        """
        num_seen = len(self._decoder.decode(self.token_ids[start:]).rstrip("\ufffd"))
        if num_seen or len(self.token_ids) - self._start >= _GIVE_UP:
            self._start = start
            self._num_seen = num_seen


@dataclass(frozen=True)
class StopMatch:
    """The sequence ended with `stop`; `text` is everything before it."""

    text: str
    stop: str


class StopChecker:
    """Finds the first token after which the visible text of one sequence contains a stop string.

    If one token completes several stop strings, the one that starts first ends the text, and of those the longest. With
    `min_tokens`, only stop strings count that end in text from token number `min_tokens` or later; those entirely in
    earlier text are ignored for good.
    """

    def __init__(self, decoder: IncrementalDetokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        assert stop
        assert all(stop)
        self._decoder = decoder
        self._stream = StreamDetokenizer(decoder)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._overlap = max(map(len, self._stop)) - 1
        self._tail = ""  # last visible characters, up to the length of an unfinished stop string
        self._num_shown = 0

    def push(self, token_id: int) -> StopMatch | None:
        """Append a token; return the match that ends the sequence here, if any."""
        new = self._stream.push(token_id)
        if not new:
            return None
        near = self._tail + new
        before, self._num_shown = self._num_shown, self._num_shown + len(new)
        checked = len(self._stream.token_ids) >= self._min_tokens
        match = None
        if checked and any(near.find(stop, max(0, len(self._tail) - len(stop) + 1)) >= 0 for stop in self._stop):
            match = self._cut(before)
        self._tail = near[-self._overlap :] if self._overlap else ""
        return match

    def _cut(self, num_before: int) -> StopMatch | None:
        """Return the match that ends after the first `num_before` characters, searched in the whole decoded text."""
        text = self._decoder.decode(self._stream.token_ids)
        found = [
            (at, -len(stop), stop)
            for stop in self._stop
            if (at := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        # A decoder may rewrite visible text (invalid bytes after valid ones); then the match may be missing.
        return StopMatch(text[: min(found)[0]], min(found)[2]) if found else None
