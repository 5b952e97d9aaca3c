"""Tracks one row's reasoning in the harmony format (gpt-oss), whose completions are messages on channels. No torch.

A prompt ends in the header of an unfinished message, `<|start|>assistant`. Everything before the text of the first
message on the channel `final` is reasoning: messages on other channels, and all headers. A message without a channel is
an answer too. A completion without any of the format's tokens is an answer as a whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.reasoning.markers import ChannelTokens
from pipeline.engine.reasoning.tracking import Decode, RowReasoning, Thinking, without_end

_HEADER_TOKENS = 3  # of the first message after the prompt: <|channel|>analysis<|message|>


@dataclass
class _MessageText:
    """Text of a message: its range among the tokens of the row's messages."""

    is_answer: bool
    start: int
    stop: int


@dataclass(frozen=True)
class ChannelReasoning(RowReasoning):
    """Reasoning of one row. is_open: the prompt is in this format and no answer has begun in it. begun: the prompt's
    tokens of the message in which it ends."""

    markers: ChannelTokens
    begun: tuple[int, ...] = ()

    @classmethod
    def after(
        cls, prompt_ids: np.ndarray, markers: ChannelTokens, budget: int | None, has_grammar: bool
    ) -> "ChannelReasoning":
        """Build for a row with this prompt."""
        starts = np.flatnonzero(prompt_ids == markers.message_start_id)
        begun = tuple(prompt_ids[starts[-1] :].tolist()) if len(starts) else ()
        row = cls(markers, bool(len(starts)), budget, has_grammar, () if markers.message_end_id in begun else begun)
        return replace(row, is_open=row.is_open and not row._has_answer([]))

    def thinking(self, generated: np.ndarray) -> Thinking:
        """Return the row's state after these generated tokens."""
        if not self.is_open or (self.budget is None and not self.has_grammar):
            return Thinking.NO
        return Thinking.NO if self._has_answer(generated.tolist()) else Thinking.YES

    def thinking_deadline(self, num_prompt: int) -> int | None:
        """Return the number of known tokens at which the row's budget is used up; None without a budget. The first
        header is not counted; with a budget of 0 there is none."""
        if not self.budget:
            return None if self.budget is None else num_prompt
        return num_prompt + self.budget + (0 if self.markers.start_id in self.begun else _HEADER_TOKENS)

    def closing_id(self, generated: np.ndarray) -> int:
        """Return the next of the tokens that end the message and begin the answer."""
        markers, (_, header) = self.markers, self._messages(generated.tolist())
        if header is None:
            return markers.message_end_id
        if markers.start_id in header:
            return _next_of(markers.final_ids, _after_last(header, markers.start_id), markers.end_id)
        if markers.message_start_id in header:
            return _next_of(markers.assistant_ids, _after_last(header, markers.message_start_id), markers.start_id)
        return markers.message_start_id

    def split(self, token_ids: Sequence[int], text: str, decode: Decode) -> tuple[str | None, str, int]:
        """Split the text; see `TextReasoning.split`. The texts of several messages are joined by line feeds."""
        messages, _ = self._messages(token_ids)
        is_plain = not messages and self.markers.control_ids.isdisjoint(token_ids)
        if is_plain or (self.begun and not self.is_open):
            return None, text, 0
        ids, num_cut = [*self.begun, *token_ids], len(decode(token_ids)) - len(text)

        def shown(message: _MessageText) -> str:
            """Return its text without the end that a stop string cut."""
            piece, num_after = decode(ids[message.start : message.stop]), len(decode(ids[message.stop :]))
            return without_end(piece, max(num_cut - num_after, 0))

        thoughts = [message for message in messages if not message.is_answer]
        answers = [message for message in messages if message.is_answer]
        if answers:
            thoughts = [message for message in thoughts if message.start < answers[0].start]
        thought = "\n".join(map(shown, thoughts))
        num_tokens = sum(message.stop - message.start for message in thoughts)
        return thought, shown(answers[0]) if answers else "", num_tokens

    def _has_answer(self, generated: Iterable[int]) -> bool:
        return any(message.is_answer for message in self._messages(generated)[0])

    def _messages(self, generated: Iterable[int]) -> tuple[list[_MessageText], list[int] | None]:
        """Return the texts of the messages in `begun` and these tokens, and the header in which they end; None if they
        end in a text."""
        markers, messages, ids = self.markers, list[_MessageText](), [*self.begun, *generated]
        header: list[int] | None = []
        for index, token in enumerate(ids):
            begins_header = token in (markers.message_start_id, markers.message_end_id)
            if header is None and (begins_header or token == markers.start_id):
                messages[-1].stop, header = index, [token]
            elif begins_header:
                header = [token]
            elif header is not None and token == markers.end_id:
                channel = _after_last(header, markers.start_id)
                is_answer = markers.start_id not in header or _begins_with(channel, markers.final_ids)
                messages.append(_MessageText(is_answer, index + 1, len(ids)))
                header = None
            elif header is not None:
                header.append(token)
        return messages, header


def _after_last(ids: list[int], token: int) -> tuple[int, ...]:
    return tuple(ids[len(ids) - ids[::-1].index(token) :]) if token in ids else ()


def _begins_with(ids: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return ids[: len(beginning)] == beginning


def _next_of(ids: tuple[int, ...], known: tuple[int, ...], following: int) -> int:
    """Return the token after `known`, which is the beginning of `ids`; `following` if it is not, or all of them."""
    return ids[len(known)] if len(known) < len(ids) and _begins_with(ids, known) else following
