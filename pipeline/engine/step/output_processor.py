"""Appends sampled tokens to sequences, checks stop conditions, and builds completions.

Owns stop conditions, the text of a completion, and the handling of non-finite logits. A step with drafts gives a
sequence several tokens; they are appended one after the other, each as in a plain step, or all at once if none of them
can end the sequence.

Suffixes: S sequences of the step, R rows of logits, F rows with finite logits, G sequences that continue.
"""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns
from typing import NamedTuple

import numpy as np

from pipeline.engine.completion import Completion, FinishReason
from pipeline.engine.reasoning.tracking import Decode, RowReasoning, TextReasoning, Thinking
from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.verify import Verified
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import ranges
from pipeline.engine.schedule.thinking import update_thinking
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.repetition import repeats_itself
from pipeline.engine.tasks import ScoreResult, TokenLogprobs
from pipeline.errors import RowError
from pipeline.tokenization.tokenizer import Tokenizer


class _End(NamedTuple):
    """End of one sequence; `text` is set if a stop string cut it or a grammar ended it."""

    slot: int
    reason: FinishReason
    text: str | None = None


class OutputProcessor:
    """Output processor of one engine. A sequence that ends passes its completion to its group or its call. `clean`
    zeroes KV blocks whose content is not valid."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        masks: GrammarMasks,
        vocab_size: int,
        clean: Callable[[list[int]], None],
    ) -> None:
        self._scheduler, self._table, self._stats = scheduler, scheduler.table, scheduler.stats
        self._tokenizer, self._masks, self._clean = tokenizer, masks, clean
        self.is_eos = np.isin(np.arange(vocab_size), sorted(tokenizer.eos_token_ids))

    def append_tokens(self, slot_S: np.ndarray, output: SamplerOutput | Verified) -> int:
        """Append the next tokens of each sequence and return their total number."""
        before, now_us = self._stats.generated_tokens, monotonic_ns() // 1000
        if isinstance(output, Verified):
            num_ended = self._append_verified(slot_S, output, now_us)
            num_ended += self._append_forced(slot_S, now_us)
            if num_ended:
                slot_S = slot_S[np.isin(slot_S, self._scheduler.running)]
            self._scheduler.release_uncomputed(slot_S)
        else:
            self._append_one(slot_S, output, now_us)
            self._append_forced(slot_S, now_us)
        return self._stats.generated_tokens - before

    def _append_one(self, slot_R: np.ndarray, output: SamplerOutput, now_us: int) -> int:
        """Append one token to each sequence and return how many end with it."""
        slot_F, token_F = slot_R, output.token_ids
        if not output.finite.all():
            slot_F, token_F = slot_R[output.finite], token_F[output.finite]
            for slot in slot_R[~output.finite].tolist():
                self._fail_without_token(slot)
        self._record_first_tokens(slot_F, now_us)
        self._scheduler.append(slot_F, token_F)
        for row, logprobs in output.logprobs.items():
            token_logprobs = self._table.at(int(slot_R[row])).logprobs
            assert token_logprobs is not None
            token_logprobs.append(logprobs)
        self._stats.generated_tokens += len(slot_F)
        return len(slot_R) - len(slot_F) + self._finish_ended(slot_F, token_F, now_us)

    def _record_first_tokens(self, slot_R: np.ndarray, now_us: int) -> None:
        # Only a first token finds the prompt alone: after a preemption the generated tokens are known too.
        for slot in slot_R[self._table.num_known[slot_R] == self._table.num_prompt[slot_R]].tolist():
            self._table.at(slot).first_token_us = now_us

    def _append_forced(self, slot_S: np.ndarray, now_us: int) -> int:
        """Append the tokens that each sequence's grammar forces next, and return how many sequences end."""
        constrained = slot_S[self._table.has_grammar[slot_S] & (self._table.thinking[slot_S] == Thinking.NO)]
        if not len(constrained):
            return 0
        ends: list[_End] = []
        for slot, token_ids, is_whole in self._masks.advance_forced(constrained):
            self._scheduler.append_uncomputed(slot, token_ids)
            self._stats.generated_tokens += len(token_ids)
            self._stats.forced_tokens += len(token_ids)
            if is_whole:
                ends.append(_End(slot, "stop", self._full_text(slot)))
            elif self._table.num_known[slot] >= self._table.limit[slot]:
                ends.append(_End(slot, "length"))
        self._end(ends, now_us)
        return len(ends)

    # -- sequences that generate nothing

    def finish_read(self, slot_S: np.ndarray) -> None:
        """Finish the sequences that generate nothing and are fully computed."""
        table = self._table
        if not table.num_readers:
            return
        now_us, slot_S = monotonic_ns() // 1000, slot_S[~table.generates[slot_S]]
        whole: list[int] = []
        for slot in slot_S[table.num_computed[slot_S] == table.num_known[slot_S]].tolist():
            reader = table.at(slot).reader
            if reader is None or not reader.is_finite:
                self._fail_not_finite(slot, "for the prompt")
            elif (following := reader.next_text()) is not None:
                table.read_next(slot, *following)
            else:
                whole.append(slot)
        for sequence in self._scheduler.finish(whole):
            assert sequence.reader is not None
            sequence.first_token_us = now_us
            sequence.end(replace(self._build(sequence, "stop", [], "", now_us), result=sequence.reader.result()))

    # -- ends

    def _finish_ended(self, slot_R: np.ndarray, token_R: np.ndarray, now_us: int) -> int:
        table = self._table
        known_R = table.num_known[slot_R]
        length_R = known_R >= table.limit[slot_R]
        stop_R = self.is_eos[token_R]
        if stop_R.any():
            stop_R &= table.stops_at_eos[slot_R] & (known_R >= table.min_known[slot_R])
        loop_R = np.zeros(len(slot_R), dtype=bool)
        if table.max_pattern[slot_R].any():
            loop_R = repeats_itself(table, slot_R)
        continues_R, completes_R = ~stop_R, np.zeros(len(slot_R), dtype=bool)
        if table.thinking[slot_R].any():
            continues_R &= ~update_thinking(table, slot_R, token_R)
        if table.has_grammar[slot_R].any():
            completes_R = self._masks.advance(slot_R, token_R, continues_R)
        ends: list[_End] = []
        for r in np.flatnonzero(stop_R | completes_R | length_R | loop_R | table.has_stops[slot_R]).tolist():
            slot, text = int(slot_R[r]), None
            stopped = bool(stop_R[r])
            if table.has_stops[slot] and not stopped:
                stopped, text = self._check_stops(slot, int(token_R[r]), bool(known_R[r] >= table.min_known[slot]))
            if completes_R[r] and not stopped:
                stopped, text = True, self._full_text(slot)
            if stopped:
                ends.append(_End(slot, "stop", text))
            elif loop_R[r]:
                ends.append(_End(slot, "length_loop"))
            elif length_R[r]:
                ends.append(_End(slot, "length"))
        self._end(ends, now_us)
        return len(ends)

    def _end(self, ends: list[_End], now_us: int) -> None:
        if ends:
            for sequence, end in zip(self._scheduler.finish([end.slot for end in ends]), ends):
                sequence.end(self._completion(sequence, end, now_us))

    def _check_stops(self, slot: int, token: int, may_stop: bool) -> tuple[bool, str | None]:
        """Return whether a stop token id or a stop string ends the sequence here, and the text cut by a stop string."""
        sequence = self._table.at(slot)
        if may_stop and token in sequence.request.params.stop_token_ids:
            return True, None
        match = sequence.stop_checker.push(token) if sequence.stop_checker is not None else None
        return match is not None, None if match is None else match.text

    def _full_text(self, slot: int) -> str:
        """Return the text of a sequence that its grammar ended, including the last token."""
        known = self._table.token_ids[slot, self._table.num_prompt[slot] : self._table.num_known[slot]]
        return self._tokenizer.decode(known.tolist())

    def _completion(self, sequence: Sequence, end: _End, now_us: int) -> Completion:
        token_ids = sequence.token_ids[sequence.num_prompt :].tolist()
        text = end.text
        if text is None:
            # Without a stop string, "stop" means that the last token is EOS or a stop token id, which is not text.
            text = self._tokenizer.decode(token_ids[:-1] if end.reason == "stop" else token_ids)
        whole = self._build(sequence, end.reason, token_ids, text, now_us)
        return (
            whole if sequence.reasoning is None else split_reasoning(whole, sequence.reasoning, self._tokenizer.decode)
        )

    def _build(
        self, sequence: Sequence, reason: FinishReason, token_ids: list[int], text: str, now_us: int
    ) -> Completion:
        return Completion(
            row_id=sequence.request.row_id,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=max(sequence.num_cached, 0),
            logprobs=sequence.logprobs,
            prompt_logprobs=_prompt_logprobs(sequence),
            queued_us=sequence.queued_us,
            first_token_us=sequence.first_token_us,
            last_token_us=now_us,
        )

    def _fail_without_token(self, slot: int) -> None:
        """End a sequence that no token can follow: its grammar allows none, or its logits are not finite. In the second
        case the blocks that only it holds are zeroed, and none stays findable."""
        sequence = self._table.at(slot)
        generated = int(self._table.num_known[slot]) - sequence.num_prompt
        dead_end = self._masks.dead_end(slot)
        if dead_end is not None:
            self._scheduler.drop(slot).fail(
                RowError.GRAMMAR_ERROR, f"sampling.structured_outputs: after {generated} generated tokens {dead_end}"
            )
            return
        self._fail_not_finite(slot, f"after {generated} generated tokens")

    def _fail_not_finite(self, slot: int, context: str) -> None:
        own = self._scheduler.pool.held_once(self._table.pages_of(slot))
        sequence = self._scheduler.drop(slot, keep_blocks=False)
        self._clean(own)
        sequence.fail(RowError.NON_FINITE_LOGITS, f"the model returned non-finite logits {context}")

    # -- drafts

    def _append_verified(self, slot_S: np.ndarray, verified: Verified, now_us: int) -> int:
        """Append each sequence's accepted drafts and the token after them. Return how many sequences end."""
        continues_S = self._cannot_end(slot_S, verified)
        continuing = np.flatnonzero(continues_S)
        if len(continuing):
            self._record_first_tokens(slot_S[continuing], now_us)
            count_G = verified.num_accepted_S[continuing] + 1
            row_N = ranges(verified.first_S[continuing], count_G)
            self._scheduler.append(slot_S[continuing], verified.output.token_ids[row_N], count_G)
            self._stats.generated_tokens += len(row_N)
        left_S, num_ended = np.where(continues_S, -1, verified.num_accepted_S), 0
        for number in range(int(left_S.max(initial=-1)) + 1):
            due = np.flatnonzero(left_S >= number)
            if num_ended:  # nothing follows the end of a sequence
                due = due[np.isin(slot_S[due], self._scheduler.running)]
            output = verified.output.of_rows(verified.first_S[due] + number)
            num_ended += self._append_one(slot_S[due], output, now_us)
        return num_ended

    def _cannot_end(self, slot_S: np.ndarray, verified: Verified) -> np.ndarray:
        """Return which sequences cannot end with any of their tokens; none if a row needs log-probabilities."""
        table, output, count_S = self._table, verified.output, verified.num_accepted_S + 1
        if output.logprobs:
            return np.zeros(len(slot_S), dtype=bool)
        needs_check_S = table.has_stops[slot_S] | table.has_grammar[slot_S] | (table.max_pattern[slot_S] > 0)
        needs_check_S |= table.thinking[slot_S] > 0
        continues_S = (table.num_known[slot_S] + count_S < table.limit[slot_S]) & ~needs_check_S
        ends_R = self.is_eos[output.token_ids] | ~output.finite
        if ends_R.any():
            before_R1 = np.append(0, np.cumsum(ends_R))
            continues_S &= before_R1[verified.first_S + count_S] == before_R1[verified.first_S]
        return continues_S


def split_reasoning(whole: Completion, reasoning: RowReasoning | TextReasoning, decode: Decode) -> Completion:
    """Return `whole`, whose text covers all tokens, with its text reduced to the answer and the rest as reasoning.
    Models write empty lines at the border, so the reasoning is stripped and the answer left-stripped."""
    thought, answer, num_tokens = reasoning.split(whole.token_ids, whole.text, decode)
    if thought is None:
        return whole
    return replace(whole, text=answer.lstrip(), reasoning=thought.strip() or None, num_reasoning_tokens=num_tokens)


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprobs] | None:
    if not sequence.generates or sequence.request.params.prompt_logprobs is None:
        return None
    if sequence.reader is None:
        return []
    score = sequence.reader.result()
    assert isinstance(score, ScoreResult)
    return list(score.tokens or ())
