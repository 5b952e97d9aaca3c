"""What becomes of sequences when they get tokens: appended, looked at for an end, made into completions.

Owns stop conditions, the text that a completion has, and what happens where logits are no numbers. A step with drafts
gives several tokens to a sequence; they are taken one after the other, each as that of a plain step.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipeline.engine.params import Completion, FinishReason
from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.verify import Verified
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import runs
from pipeline.errors import RowError
from pipeline.tokenization.tokenizer import Tokenizer

Append = Callable[[np.ndarray, np.ndarray], None]  # of slots and their next tokens


class _End(NamedTuple):
    """Of one sequence; `text` is given where a stop string has cut it."""

    slot: int
    reason: FinishReason
    text: str | None = None


class Completing:
    """Of one engine. A sequence that ends hands its completion to its call. `clean` zeroes KV blocks whose content
    cannot be trusted."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, vocab_size: int, clean: Callable[[list[int]], None]
    ) -> None:
        self._scheduler, self._table, self._tokenizer, self._clean = scheduler, scheduler.table, tokenizer, clean
        self._is_eos = np.isin(np.arange(vocab_size), sorted(tokenizer.eos_token_ids))

    def take_verified(self, slot_S: np.ndarray, verified: Verified, now_us: int) -> int:
        """Take accepted drafts and the token behind them, as `take` does: all at once where a sequence goes on behind
        them, else round by round. The blocks of the other drafts are the caller's to release. How many ended."""
        scheduler, goes_on_S = self._scheduler, self._goes_on(slot_S, verified)
        going = np.flatnonzero(goes_on_S)
        if len(going):
            self._take_all(slot_S[going], verified, going, now_us)
        if len(going) == len(slot_S):
            return 0
        num_ended = 0
        left_S = np.where(goes_on_S, -1, verified.num_accepted_S)
        for number in range(verified.num_rounds):
            taking = np.flatnonzero(left_S >= number)
            if num_ended:  # nothing follows the end of a sequence
                taking = taking[np.isin(slot_S[taking], scheduler.running)]
            if not len(taking):
                break
            append = scheduler.accept if number else scheduler.append
            num_ended += self.take(slot_S[taking], verified.tokens(taking, number), now_us, append)
        return num_ended

    def _goes_on(self, slot_S: np.ndarray, verified: Verified) -> np.ndarray:
        """Which sequences none of their tokens can end, and nobody wants to know more of these than what they are."""
        table, output, count_S = self._table, verified.output, verified.num_accepted_S + 1
        if output.logprobs:
            return np.zeros(len(slot_S), dtype=bool)
        goes_on_S = (table.num_known[slot_S] + count_S < table.limit[slot_S]) & ~table.has_stops[slot_S]
        ends_R = self._is_eos[output.token_ids] | ~output.finite
        if ends_R.any():
            before_R1 = np.append(0, np.cumsum(ends_R))
            goes_on_S &= before_R1[verified.first_S + count_S] == before_R1[verified.first_S]
        return goes_on_S

    def _take_all(self, slot_G: np.ndarray, verified: Verified, going: np.ndarray, now_us: int) -> None:
        """Give each of these sequences, which go on, all of its tokens at once."""
        count_G = verified.num_accepted_S[going] + 1
        for slot in slot_G[self._table.num_known[slot_G] == self._table.num_prompt[slot_G]].tolist():
            self._table.at(slot).first_token_us = now_us
        row_N = runs(verified.first_S[going], count_G)
        self._scheduler.accept_all(slot_G, count_G, verified.output.token_ids[row_N])
        self._scheduler.stats.generated_tokens += len(row_N)

    def take(self, slot_R: np.ndarray, output: SamplerOutput, now_us: int, append: Append | None = None) -> int:
        """Give each of these sequences its next token, and say how many end with it."""
        slot_F, token_F = slot_R, output.token_ids
        if not output.finite.all():
            slot_F, token_F = slot_R[output.finite], token_F[output.finite]
            for slot in slot_R[~output.finite].tolist():
                self._non_finite(slot)
        (append or self._scheduler.append)(slot_F, token_F)
        known_F = self._table.num_known[slot_F]
        self._note_first_tokens(slot_F, known_F, now_us)
        for row, logprobs in output.logprobs.items():
            kept = self._table.at(int(slot_R[row])).logprobs
            assert kept is not None
            kept.append(logprobs)
        self._scheduler.stats.generated_tokens += len(slot_F)
        return len(slot_R) - len(slot_F) + self._finish_ended(slot_F, token_F, known_F, now_us)

    def _note_first_tokens(self, slot_R: np.ndarray, known_R: np.ndarray, now_us: int) -> None:
        """A sequence knows one token more than its prompt once in its life: preempted, it keeps what it generated."""
        for slot in slot_R[known_R == self._table.num_prompt[slot_R] + 1].tolist():
            self._table.at(slot).first_token_us = now_us

    def _finish_ended(self, slot_R: np.ndarray, token_R: np.ndarray, known_R: np.ndarray, now_us: int) -> int:
        table = self._table
        length_R = known_R >= table.limit[slot_R]
        stop_R = self._is_eos[token_R]
        if stop_R.any():
            stop_R &= table.stops_at_eos[slot_R] & (known_R >= table.min_known[slot_R])
        ends: list[_End] = []
        for r in np.flatnonzero(stop_R | length_R | table.has_stops[slot_R]).tolist():
            slot, text = int(slot_R[r]), None
            stopped = bool(stop_R[r])
            if table.has_stops[slot] and not stopped:
                stopped, text = self._check_stops(slot, int(token_R[r]), bool(known_R[r] >= table.min_known[slot]))
            if stopped:
                ends.append(_End(slot, "stop", text))
            elif length_R[r]:
                ends.append(_End(slot, "length"))
        if ends:
            for sequence, end in zip(self._scheduler.finish([end.slot for end in ends]), ends):
                sequence.call.end(self._completion(sequence, end, now_us))
        return len(ends)

    def _check_stops(self, slot: int, token: int, may_stop: bool) -> tuple[bool, str | None]:
        """Whether a stop token id or stop string ends the sequence here, and the text it ends with if a string does."""
        sequence = self._table.at(slot)
        if may_stop and token in sequence.request.params.stop_token_ids:
            return True, None
        match = sequence.stop_checker.push(token) if sequence.stop_checker is not None else None
        return match is not None, match.text if match is not None else None

    def _completion(self, sequence: Sequence, end: "_End", now_us: int) -> Completion:
        token_ids = sequence.token_ids[sequence.num_prompt :].tolist()
        text = end.text
        if text is None:
            # Without a stop string, what stopped it is its last token: EOS or a stop token id, which is no text.
            text = self._tokenizer.decode(token_ids[:-1] if end.reason == "stop" else token_ids)
        return Completion(
            row_id=sequence.request.row_id,
            token_ids=token_ids,
            text=text,
            finish_reason=end.reason,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=max(sequence.num_cached, 0),
            logprobs=sequence.logprobs,
            queued_us=sequence.queued_us,
            first_token_us=sequence.first_token_us,
            last_token_us=now_us,
        )

    def _non_finite(self, slot: int) -> None:
        """End a sequence whose logits are not numbers; blocks only it holds are cleaned, none stays findable."""
        sequence = self._table.at(slot)
        generated = int(self._table.num_known[slot]) - sequence.num_prompt
        own = self._scheduler.pool.held_once(self._table.blocks_of(slot))
        self._scheduler.drop(slot, keep_blocks=False)
        self._clean(own)
        fail(
            sequence,
            RowError.NON_FINITE_LOGITS,
            f"the model gave logits that are not finite numbers after {generated} generated tokens",
        )


def fail(sequence: Sequence, error: RowError, message: str) -> None:
    """End a request, which holds nothing any more, with an error."""
    sequence.call.end(
        Completion(
            row_id=sequence.request.row_id,
            token_ids=[],
            text="",
            finish_reason="error",
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=max(sequence.num_cached, 0),
            error=error.value,
            error_message=message,
            queued_us=sequence.queued_us,
            first_token_us=sequence.first_token_us,
        )
    )
