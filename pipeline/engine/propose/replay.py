"""What drafts would have come to, had they been made: the last tokens of a text drafted once more. No torch.

A proposer that only looks up can be asked at any place of a text that it has not looked at further on. So it is asked
behind the tokens that it knew last, as in a step that drafts, and what it has to offer is compared with the tokens that
came; then where the step behind that would have begun, and so on. Drafts go on where the last ones ended, so this says
what a row of steps with drafts comes to, for the price of the look-ups. Offers at any other places say something else:
in the midst of a run of right ones there is less of it left.

Shapes: S sequences, K most drafts of one, O offers.
"""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.schedule.sequence import SlotTable

MOST_TOKENS = 32  # of a sequence, the last ones
TELLING = 3  # right tokens of an offer whose others have not come yet, which tell enough; it is asked for again


@dataclass(frozen=True)
class Foretold:
    """What became of offers, their counts and matches as they have them: of its tokens so many were decided on before
    the known tokens ended, and the first agreed_O of them were right. offer_us: what asking took. is_rest: of those
    sequences alone that drafted nothing, in a step in which others may have."""

    count_O: np.ndarray
    match_len_O: np.ndarray
    decided_O: np.ndarray
    agreed_O: np.ndarray
    offer_us: int
    is_rest: bool


@runtime_checkable
class LooksUp(Protocol):
    """A proposer whose offers have their tokens."""

    def looked_at(self, slot_S: np.ndarray) -> np.ndarray:
        """How many tokens of each sequence it knows so far."""
        ...

    def offer(self, slot_S: np.ndarray, known_S: np.ndarray | None = None) -> Offer:
        """See `Proposer.offer`. known_S: as if so many of their tokens were known; None: all. No fewer than before."""
        ...


def replay(proposer: LooksUp, table: SlotTable, slot_S: np.ndarray) -> Foretold:
    """From what the proposer has not looked at yet of these sequences; perhaps of no offers. All known tokens have to
    be in the table."""
    begun_ns = time.perf_counter_ns()
    until_S, first_S = table.num_known[slot_S], table.num_prompt[slot_S] + 1
    looked_S = np.maximum(proposer.looked_at(slot_S), first_S)
    at_S = np.maximum(looked_S, until_S - MOST_TOKENS)
    counts = at_S == looked_S  # else a step would not have begun there, but the next one might
    found: list[np.ndarray] = []
    while True:
        (going,) = (at_S < until_S).nonzero()
        if not len(going):
            break
        slot, at = slot_S[going], at_S[going]
        offer = proposer.offer(slot, at)
        most = np.maximum(table.limit[slot] - at - 1, 0)
        count = np.minimum(offer.count_S, most)
        decided = np.minimum(count, until_S[going] - at)
        place_SK = np.arange(offer.token_id_SK.shape[1])
        came_SK = table.token_ids[slot[:, None], np.minimum(at[:, None] + place_SK, table.token_ids.shape[1] - 1)]
        wrong_SK = (came_SK != offer.token_id_SK) | (place_SK >= decided[:, None])
        agreed = np.where(wrong_SK.any(axis=1), wrong_SK.argmax(axis=1), wrong_SK.shape[1])
        is_known = (agreed < decided) | (decided == count)  # what came of it; else the text ends before
        tells = (is_known | (decided >= TELLING)) & counts[going]
        found.append(np.stack((count, offer.match_len_S, decided, agreed))[:, tells])
        counts[going] = True
        at_S[going] = np.where(is_known, at + agreed + 1, until_S[going])
    count_O, match_len_O, decided_O, agreed_O = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    took_us = (time.perf_counter_ns() - begun_ns) // 1000
    return Foretold(count_O, match_len_O, decided_O, agreed_O, took_us, is_rest=False)
