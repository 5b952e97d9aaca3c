"""The grammars of the running rows: their matchers, and the masks of a step's rows.

    sampled tokens of the last step -> matchers -> masks -> logits of this step

A mask depends on all tokens before it, so a step with such rows begins after the tokens of the one before are known;
the masks are filled by the host while the device computes the logits.
"""

from time import perf_counter_ns

import numpy as np

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.grammar.compiler import GrammarCompiler
from pipeline.engine.grammar.matcher import NOTHING_FITS, RowMatcher
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.grammar.token_mask import MaskFiller, TokenMask
from pipeline.engine.params import EngineStats
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.tokenization.tokenizer import Tokenizer


class GrammarMasks:
    """Of one engine."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, table: SlotTable, stats: EngineStats, num_threads: int
    ) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._table, self._stats, self._num_threads = table, stats, num_threads
        self._filler_made: MaskFiller | None = None

    def check(self, wanted: StructuredOutputs) -> None:
        """Raises ConfigError where it cannot be compiled."""
        self._compiler.check(wanted)

    def of_plan(self, plan: StepPlan, drafting: Drafting | None) -> TokenMask | None:
        """Masks of the rows of logits of a plan whose known tokens are all known; None where no row has a grammar."""
        slot_S = plan.sampling_slot_S
        constrained = np.flatnonzero(self._table.has_grammar[slot_S])
        if not len(constrained):
            return None
        begun_ns = perf_counter_ns()
        first_S, drafts = np.arange(len(slot_S)), [[] for _ in constrained]
        if plan.draft_S is not None:
            assert drafting is not None
            count_S = plan.draft_S[plan.samples_S] + 1
            first_S, drafts = np.cumsum(count_S) - count_S, drafting.draft_ids(constrained)
        matchers = [self.matcher_of(slot) for slot in slot_S[constrained].tolist()]
        mask = self._filler.fill(matchers, drafts, first_S[constrained])
        self._stats.masked_tokens += len(mask.row_M)
        self._stats.mask_us += (perf_counter_ns() - begun_ns) // 1000
        return mask

    def matcher_of(self, slot: int) -> RowMatcher:
        """Of the sequence there; it keeps it for life."""
        sequence = self._table.at(slot)
        if sequence.matcher is None:
            wanted = sequence.request.params.structured_outputs
            assert wanted is not None
            sequence.matcher = self._compiler.matcher(wanted)
        return sequence.matcher

    def dead_end(self, slot: int) -> str | None:
        """Why no token can follow the tokens of the sequence there; None: one can, or there is no grammar."""
        if not self._table.has_grammar[slot]:
            return None
        matcher = self.matcher_of(slot)
        return matcher.error or (NOTHING_FITS if self._filler.allows_nothing(matcher) else None)

    @property
    def _filler(self) -> MaskFiller:
        if self._filler_made is None:
            compiler = self._compiler
            self._filler_made = MaskFiller(compiler.mask_words, compiler.vocab_size, self._num_threads)
        return self._filler_made
