"""Offers that nobody drafts from, kept until the tokens have come that they foretold. No torch.

So it is seen what would have become of drafts, and no step computes them. Greedy tokens are what drafts would have been
checked against; drawn ones agree with an offer as often as drafts of it would be accepted.

Shapes: S sequences of the offer that is kept, K most tokens of one.
"""

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.replay import Foretold
from pipeline.engine.schedule.sequence import SlotTable


class ShadowOffers:
    """Of one engine's `table`. One offer is kept at a time."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._offer: Offer | None = None
        self._known_S = self._decided_S = self._agreed_S = np.zeros(0, dtype=np.int64)
        self._place_of: dict[int, int] = {}  # in the offer, by slot: of those that are still there

    @property
    def is_empty(self) -> bool:
        return self._offer is None

    def keep(self, offer: Offer) -> None:
        """What these sequences are offered behind the tokens that they know now; it has to have its tokens."""
        assert self._offer is None, "one at a time"
        self._offer = offer
        self._known_S = self._table.num_known[offer.slot_S]
        self._place_of = {slot: place for place, slot in enumerate(offer.slot_S.tolist())}
        self._decided_S, self._agreed_S = np.zeros_like(offer.slot_S), np.zeros_like(offer.slot_S)

    def left(self, slot: int, finished: bool) -> None:
        """The sequence is about to leave the slot. Of one that comes back nothing is decided: its tokens in the table
        may be promised ones."""
        place = self._place_of.pop(slot, None)
        if place is not None and finished:
            assert self._offer is not None
            self._decide(self._offer, slot, place)

    def foretold(self) -> Foretold | None:
        """What became of the offer, which is kept no longer; None: there is none, or its tokens have not come yet. All
        known tokens have to be in the table."""
        offer = self._offer
        if offer is None:
            return None
        end_S, num_known = self._known_S + offer.count_S, self._table.num_known
        if any(num_known[slot] < end_S[place] for slot, place in self._place_of.items()):
            return None
        for slot, place in self._place_of.items():
            self._decide(offer, slot, place)
        self._offer, self._place_of = None, {}
        decided_S, agreed_S = self._decided_S, self._agreed_S
        return Foretold(offer.count_S, offer.match_len_S, decided_S, agreed_S, offer_us=0, is_rest=True)

    def _decide(self, offer: Offer, slot: int, place: int) -> None:
        """Compare the offer with the tokens that have come, for one sequence. (Eight of them one by one take about as
        long as all at once, and one a fifth of that.)"""
        known = int(self._known_S[place])
        decided = min(int(self._table.num_known[slot]) - known, int(offer.count_S[place]))
        is_alike_K = self._table.token_ids[slot, known : known + decided] == offer.token_id_SK[place, :decided]
        self._decided_S[place] = decided
        self._agreed_S[place] = decided if is_alike_K.all() else is_alike_K.argmin()
