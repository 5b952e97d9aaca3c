"""Grammars of the running rows: their matchers, and the masks of a step's rows, including those of thinking budgets.

    sampled tokens of the last step -> matchers -> forced tokens -> masks -> logits of this step

A mask depends on all tokens before it, so a step with such rows starts once the tokens of the previous one are known;
the host fills the masks while the device computes the logits. If a grammar forces the next tokens, such as the keys of
a JSON object, they need neither mask nor logits, and the next step computes them together.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.engine.drafts.spec_decoder import SpecDecoder
from pipeline.engine.grammar.compiler import GrammarCompiler
from pipeline.engine.grammar.matcher import NOTHING_FITS, RowMatcher
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.grammar.token_mask import MaskFiller, TokenMask
from pipeline.engine.reasoning.tracking import Thinking
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.schedule.thinking import budget_exhausted, closing_ids, num_thoughts
from pipeline.engine.stats import EngineStats
from pipeline.tokenization.tokenizer import Tokenizer


class GrammarMasks:
    """Matchers and masks of one engine."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, table: SlotTable, stats: EngineStats, num_threads: int
    ) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._table, self._stats, self._num_threads = table, stats, num_threads
        self._filler_made: MaskFiller | None = None

    def check(self, wanted: StructuredOutputs) -> None:
        """Raise ConfigError if the grammar cannot be compiled."""
        self._compiler.check(wanted)

    def of_plan(self, plan: StepPlan, spec_decoder: SpecDecoder | None) -> TokenMask | None:
        """Return the masks of a plan's rows of logits, or None if no row needs one. All its known tokens must have been
        sampled.

        Grammars apply after reasoning ends. A row that is reasoning has no mask up to its end marker, also among its
        drafts; one that may begin reasoning may also sample the start marker; one whose budget is used up must sample
        the end marker, or its next token.
        """
        table, slot_S = self._table, plan.sampling_slot_S
        has_grammar_S, may_think = table.has_grammar[slot_S], bool(table.thinking[slot_S].any())
        exhausted = np.flatnonzero(budget_exhausted(table, slot_S)) if may_think else np.arange(0)
        if not len(exhausted) and not has_grammar_S.any():
            return None
        first_S, drafts = np.arange(len(slot_S)), None
        if plan.draft_S is not None:
            count_S = plan.draft_S[plan.samples_S] + 1
            first_S = np.cumsum(count_S) - count_S
            assert spec_decoder is not None
            drafts = spec_decoder.draft_ids(np.flatnonzero(has_grammar_S))
        mask = self._of_grammars(slot_S, has_grammar_S, first_S, drafts)
        self._stats.masked_tokens += len(mask.row_M)
        if may_think:
            begins = np.flatnonzero(has_grammar_S & (table.thinking[slot_S] == Thinking.MAY_BEGIN))
            mask.also(first_S[begins], table.start_id[slot_S[begins]])
        if len(exhausted):
            return mask.with_rows(first_S[exhausted], closing_ids(table, slot_S[exhausted]))
        return mask if len(mask.row_M) else None

    def _of_grammars(
        self, slot_S: np.ndarray, has_grammar_S: np.ndarray, first_S: np.ndarray, drafts: list[list[int]] | None
    ) -> TokenMask:
        """Return the masks of the rows with a grammar. drafts: of these sequences; None: the step has no drafts."""
        table, constrained = self._table, np.flatnonzero(has_grammar_S)
        if drafts is None and not table.thinking[slot_S].any():
            return self._filler.mask(self._matchers(slot_S[constrained]), constrained)
        thinks = table.thinking[slot_S[constrained]] == Thinking.YES
        if drafts is None:
            constrained = constrained[~thinks]
            return self._filler.mask(self._matchers(slot_S[constrained]), constrained)
        first = first_S[constrained]
        for index in np.flatnonzero(thinks).tolist():
            count = num_thoughts(table, int(slot_S[constrained[index]]), drafts[index])
            thinks[index] = count is None
            if count is not None:
                drafts[index], first[index] = drafts[index][count:], first[index] + count
        answers = np.flatnonzero(~thinks)
        matchers = self._matchers(slot_S[constrained[answers]])
        return self._filler.mask_with_drafts(matchers, [drafts[index] for index in answers.tolist()], first[answers])

    def advance(self, slot_S: np.ndarray, token_S: np.ndarray, continues_S: np.ndarray) -> np.ndarray:
        """Advance the matchers by these tokens. Return which of the continuing sequences are complete with them."""
        is_whole_S = np.zeros(len(slot_S), dtype=bool)
        constrained = np.flatnonzero(self._table.has_grammar[slot_S] & continues_S)
        if len(constrained):
            pairs = zip(self._matchers(slot_S[constrained]), token_S[constrained].tolist())
            is_whole_S[constrained] = [matcher.advance(token) for matcher, token in pairs]
        return is_whole_S

    def advance_forced(self, slot_S: np.ndarray) -> Iterator[tuple[int, list[int], bool]]:
        """Yield for each sequence whose grammar forces its next tokens: slot, these tokens, and whether it is complete
        with them."""
        table, sequences = self._table, self._table.sequences
        present = [(slot, sequence) for slot in slot_S.tolist() if (sequence := sequences[slot]) is not None]
        for slot, sequence in present:  # the others have ended
            matcher = sequence.matcher or self.matcher_of(slot)
            if matcher.look():
                token_ids, is_whole = matcher.advance_forced(int(table.limit[slot] - table.num_known[slot]))
                if token_ids:
                    yield slot, token_ids, is_whole

    def _matchers(self, slot_S: np.ndarray) -> list[RowMatcher]:
        sequences = self._table.sequences
        return [
            (sequence.matcher if (sequence := sequences[slot]) is not None else None) or self.matcher_of(slot)
            for slot in slot_S.tolist()
        ]

    def matcher_of(self, slot: int) -> RowMatcher:
        """Return the matcher of this slot's sequence, created on first use and kept for its lifetime."""
        sequence = self._table.at(slot)
        if sequence.matcher is None:
            params = sequence.request.params
            assert params.structured_outputs is not None
            # Forced tokens have no logits to report, and only the grammar is checked for an end among them.
            checks_each_token = params.stop or params.stop_token_ids or params.min_tokens or params.repetition_detection
            can_force = params.logprobs is None and not checks_each_token
            sequence.matcher = self._compiler.matcher(params.structured_outputs, can_force)
        return sequence.matcher

    def dead_end(self, slot: int) -> str | None:
        """Return why no token can follow this slot's sequence; None if one can, or without a grammar."""
        if not self._table.has_grammar[slot]:
            return None
        matcher = self.matcher_of(slot)
        return matcher.error or (NOTHING_FITS if self._filler.allows_nothing(matcher) else None)

    @property
    def _filler(self) -> MaskFiller:
        if self._filler_made is None:
            compiler = self._compiler
            self._filler_made = MaskFiller(compiler.mask_words, compiler.vocab_size, self._num_threads, self._stats)
        return self._filler_made
