"""Who drafts in a new engine, and by which policy."""

from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.draft_model import DraftModelProposer
from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.compiled import select_lookup
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import DraftPolicy, FixedDrafts
from pipeline.engine.drafts.proposer import Proposer
from pipeline.engine.drafts.replay import MOST_REPLAYED, replay
from pipeline.engine.forward.runner import Runner
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.speculation.bandit import MeasuredDrafts, Replay
from pipeline.engine.startup.resolve import Resolved


def make_drafting(
    resolved: Resolved, scheduler: Scheduler, draft: Runner | None, vocab_size: int, say: Callable[[], None]
) -> Drafting | None:
    """None where speculation is off. draft: runs the draft model, where there is one. vocab_size: the target's. `say`
    is called before something that takes long."""
    speculation, table = resolved.speculation, scheduler.table
    if speculation is None:
        return None
    most, proposers = speculation.max_draft_tokens, list[Proposer]()
    for name in speculation.proposers:
        if name == "ngram":
            lookup = NgramProposer(table, most, compiled=select_lookup())
            say()
            lookup.warm_up()
            proposers.append(lookup)
        else:
            assert draft is not None
            # Where tokens must not depend on drafts, there is no rejection sampling, and no need of probabilities.
            exposes_draft_probs = not resolved.deterministic
            proposers.append(
                DraftModelProposer(
                    draft, table, scheduler.pool, most, vocab_size, exposes_draft_probs=exposes_draft_probs
                )
            )
    policy: DraftPolicy = FixedDrafts(most)
    if not speculation.forced:
        policy = MeasuredDrafts([_replay_of(each, scheduler) for each in proposers], most)
    return Drafting(proposers, policy, scheduler)


def _replay_of(proposer: Proposer, scheduler: Scheduler) -> Replay | None:
    if not isinstance(proposer, NgramProposer):
        return None
    # By slot: the same sequences again and again, so that their texts are indexed like those of ones that draft.
    return lambda: replay(proposer, scheduler.table, np.sort(scheduler.running)[:MOST_REPLAYED])
