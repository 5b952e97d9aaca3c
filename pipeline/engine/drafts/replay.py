"""What drafts would have come to, had they been made: the last tokens of a text drafted once more. No torch.

A proposer that only looks up can be asked at any place of a text that it has not looked at further on. So it is asked
after the tokens that it knew last, as in a step that drafts, and its offer is compared with the tokens that came; then
where the next step would have begun, and so on. This says what a row of steps with drafts comes to, for the price of
the look-ups. Offers at any other places say something else: in the midst of a run of right ones there is less of it
left.

Shapes: S sequences, K most drafts of one, O offers.
"""

from typing import Protocol

import numpy as np

from pipeline.engine.drafts.policy import Offer
from pipeline.engine.schedule.sequence import SlotTable

MOST_REPLAYED = 8  # sequences: looking up takes some microseconds for each
MOST_TOKENS = 32  # of a sequence, the last ones
_NONE = np.zeros(0, dtype=np.int64)
TELLING = 3  # right tokens of an offer whose others have not come yet, which tell enough; it is asked for again


class LooksUp(Protocol):
    """A proposer whose offers have their tokens."""

    def looked_at(self, slot_S: np.ndarray) -> np.ndarray:
        """How many tokens of each sequence it knows so far."""
        ...

    def offer_at(self, slot_S: np.ndarray, known_S: np.ndarray) -> Offer:
        """See `Proposer.offer`; as if so many of their tokens were known, no fewer than before."""
        ...


def replay(proposer: LooksUp, table: SlotTable, slot_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each step (O): which sequence, and how many drafts would have been accepted, from what the proposer has not
    looked at yet of these sequences. All known tokens have to be in the table."""
    until_S, first_S = table.num_known[slot_S], table.num_prompt[slot_S] + 1
    looked_S = np.maximum(proposer.looked_at(slot_S), first_S)
    at_S = np.maximum(looked_S, until_S - MOST_TOKENS)
    counts = at_S == looked_S  # else a step would not have begun there, but the next one might
    slots, accepted = [_NONE], [_NONE]
    while True:
        (going,) = (at_S < until_S).nonzero()
        if not len(going):
            return np.concatenate(slots), np.concatenate(accepted)
        slot, at = slot_S[going], at_S[going]
        offer = proposer.offer_at(slot, at)
        count = np.minimum(offer.count_S, np.maximum(table.limit[slot] - at - 1, 0))
        decided = np.minimum(count, until_S[going] - at)
        place_SK = np.arange(offer.token_id_SK.shape[1])
        came_SK = table.token_ids[slot[:, None], np.minimum(at[:, None] + place_SK, table.token_ids.shape[1] - 1)]
        wrong_SK = (came_SK != offer.token_id_SK) | (place_SK >= decided[:, None])
        agreed = np.where(wrong_SK.any(axis=1), wrong_SK.argmax(axis=1), wrong_SK.shape[1])
        is_known = (agreed < decided) | (decided == count)  # what came of it; else the text ends before
        tells = (is_known | (decided >= TELLING)) & counts[going]
        slots.append(slot[tells])
        accepted.append(agreed[tells])
        counts[going] = True
        at_S[going] = np.where(is_known, at + agreed + 1, until_S[going])
