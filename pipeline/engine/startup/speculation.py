"""Construction of an engine's proposer and draft policy."""

from collections.abc import Callable

from pipeline.engine.drafts.draft_model import DraftModelProposer
from pipeline.engine.drafts.policy import DraftPolicy, FixedDrafts
from pipeline.engine.drafts.proposer import Proposer
from pipeline.engine.drafts.spec_decoder import SpecDecoder
from pipeline.engine.forward.runner import Runner
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.engine.startup.resolve import Resolved


def make_spec_decoder(
    resolved: Resolved, scheduler: Scheduler, draft: Runner | None, vocab_size: int, log: Callable[[str], None]
) -> SpecDecoder | None:
    """Return the `SpecDecoder` of an engine; None if speculation is off.

    draft: runner of the draft model, if there is one. vocab_size: the target's. log: receives a message before slow
    operations."""
    speculation, table = resolved.speculation, scheduler.table
    max_drafts = speculation.num_speculative_tokens
    if speculation.method == "off":
        return None
    proposer: Proposer
    if speculation.method == "lookup":
        from pipeline.engine.drafts.lookup.ngram import NgramProposer  # imports numba, which may be missing

        proposer = NgramProposer(table, max_drafts)
        log("warming up lookup (it is compiled the first time on a machine)")
        proposer.warm_up()
    else:
        assert draft is not None
        # Where tokens must not depend on drafts, there is no rejection sampling, so no probabilities are needed.
        proposer = DraftModelProposer(
            draft, table, scheduler.pool, max_drafts, vocab_size, exposes_draft_probs=not resolved.deterministic
        )
    policy: DraftPolicy = FixedDrafts() if speculation.forced else MeasuredDrafts(max_drafts)
    return SpecDecoder(proposer, policy, scheduler)
