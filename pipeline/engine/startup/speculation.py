"""Who drafts in a new engine, and by which policy."""

from collections.abc import Callable

from pipeline.engine.drafts.draft_model import DraftModelProposer
from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.policy import DraftPolicy, FixedDrafts
from pipeline.engine.drafts.proposer import Proposer
from pipeline.engine.forward.runner import Runner
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.engine.startup.resolve import Resolved


def make_drafting(
    resolved: Resolved, scheduler: Scheduler, draft: Runner | None, vocab_size: int, say: Callable[[str], None]
) -> Drafting | None:
    """Return the drafting of an engine; None where speculation is off. draft: runs the draft model, where there is one.
    vocab_size: the target's. say: receives a line before something that takes long."""
    speculation, table = resolved.speculation, scheduler.table
    most = speculation.num_speculative_tokens
    if speculation.method == "off":
        return None
    proposer: Proposer
    if speculation.method == "lookup":
        from pipeline.engine.drafts.lookup.ngram import NgramProposer  # imports numba, which may be missing

        proposer = NgramProposer(table, most)
        say("warming up lookup (compiling it, the first time on a machine)")
        proposer.warm_up()
    else:
        assert draft is not None
        # Where tokens must not depend on drafts, there is no rejection sampling, and no need of probabilities.
        proposer = DraftModelProposer(
            draft, table, scheduler.pool, most, vocab_size, exposes_draft_probs=not resolved.deterministic
        )
    policy: DraftPolicy = FixedDrafts() if speculation.forced else MeasuredDrafts(most)
    return Drafting(proposer, policy, scheduler)
