"""Drafts that are replayed over tokens that came: as a row of steps with drafts would have made them."""

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.compiled import select_lookup
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts, StepFacts, StepOutcome
from pipeline.engine.drafts.replay import MOST_TOKENS, TELLING, replay
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.sequence import SlotTable
from tests.engine.drafts.test_ngram import admit, append, leave
from tests.engine.hash_runner import expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import run
from tests.engine.step.test_in_flight_drafts import Waits

K = 4


def drafted(proposer: NgramProposer, table: SlotTable, slot: int, output: list[int]) -> list[tuple[int, int]]:
    """The slot and the accepted drafts of each step that drafts, over a row whose output this is."""
    append(table, slot, output[:1])
    steps, at = [], 1
    while at < len(output):
        offer = proposer.offer(np.array([slot]))
        count = min(int(offer.count_S[0]), int(table.limit[slot] - table.num_known[slot]) - 1)
        decided = min(count, len(output) - at)
        alike = [a == b for a, b in zip(offer.token_id_SK[0, :decided].tolist(), output[at:])]
        agreed = alike.index(False) if False in alike else decided
        if agreed < decided or decided == count or decided >= TELLING:
            steps.append((slot, agreed))
        append(table, slot, output[at : at + agreed + 1])
        at += agreed + 1
    return steps


def texts(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    prompt = rng.integers(0, 5, int(rng.integers(2, 40))).tolist()
    at = int(rng.integers(0, len(prompt)))
    return prompt, (rng.integers(0, 5, 6).tolist() + prompt[at : at + 20] + rng.integers(0, 5, 9).tolist())[
        :MOST_TOKENS
    ]


@pytest.mark.parametrize("compiled", [None, select_lookup()], ids=["numpy", "compiled"])
@pytest.mark.parametrize("seed", range(5))
def test_it_says_what_a_row_of_drafts_would_have_come_to(seed: int, compiled) -> None:
    """Of several rows at once, and of rows before them that were learnt from. (In small tables runs fall on each
    other's entries, by the order in which rows are looked at.)"""
    rng = np.random.default_rng(seed)
    one, other = (SlotTable(3, 20_000, 4) for _ in range(2))
    drafts, later = (NgramProposer(table, K, compiled=compiled) for table in (one, other))
    num_steps = num_right = 0
    for turn in range(12):
        rows = [texts(rng) for _ in range(3)]
        slots = [admit(one, drafts, 3 * turn + r, prompt) for r, (prompt, _) in enumerate(rows)]
        expected = sorted(step for slot, (_, output) in zip(slots, rows) for step in drafted(drafts, one, slot, output))
        again = [admit(other, later, 3 * turn + r, prompt) for r, (prompt, _) in enumerate(rows)]
        for slot, (_, output) in zip(again, rows):
            append(other, slot, output)
        found = replay(later, other, np.array(again))
        assert sorted(zip(found[0].tolist(), found[1].tolist())) == expected
        num_steps += len(expected)
        num_right += sum(accepted for _, accepted in expected)
        for table, proposer, of in ((one, drafts, slots), (other, later, again)):
            for slot in of:
                leave(table, proposer, slot, finished=True)
    assert num_steps > 200
    assert num_right > 100


def test_only_what_was_not_looked_at_is_replayed_and_of_that_the_last() -> None:
    table = SlotTable(1, 400, 4)
    proposer, text = NgramProposer(table, K), [1, 2, 3, 4, 5] * 30
    slot = np.array([admit(table, proposer, 0, [9, 9])])
    append(table, int(slot[0]), text[:21])
    first = replay(proposer, table, slot)[1].tolist()
    assert first[:6] == [0] * 6  # nothing occurs twice before the seventh
    assert len(first) > 6
    assert min(first[6:]) >= TELLING
    assert len(replay(proposer, table, slot)[1]) <= 1  # at most what was cut short
    append(table, int(slot[0]), text[21:120])
    assert MOST_TOKENS // (K + 1) == 6
    assert replay(proposer, table, slot)[1].tolist() == [K] * 5  # the first began in the midst, the last has two tokens


def test_a_row_that_could_not_generate_more_is_offered_less() -> None:
    table = SlotTable(1, 24, 4)
    proposer = NgramProposer(table, K)
    slot = np.array([admit(table, proposer, 0, [1, 2, 3] * 6)])
    append(table, int(slot[0]), [1, 2, 3, 1])
    assert table.limit[slot] == 24
    assert replay(proposer, table, slot)[1].tolist() == [TELLING]
    append(table, int(slot[0]), [9])
    assert replay(proposer, table, slot)[1].tolist() == [K - 1]  # one more can come, undrafted
    table = SlotTable(1, 24, 4)
    proposer = NgramProposer(table, K)
    slot = np.array([admit(table, proposer, 0, [1, 2, 3] * 6 + [1])])
    append(table, int(slot[0]), [2, 3])
    assert replay(proposer, table, slot)[1].tolist() == []
    append(table, int(slot[0]), [1, 2])
    assert replay(proposer, table, slot)[1].tolist() == [3]


class Replaying(FixedDrafts):
    """Drafts nothing, and replays after most steps what drafts would have come to."""

    def __init__(self, rng: np.random.Generator, look: Callable[[], np.ndarray]) -> None:
        super().__init__(K)
        self.rng, self.look = rng, look
        self.told: list[np.ndarray] = []

    def select(self, facts: StepFacts) -> int | None:
        return None

    def observe(self, outcome: StepOutcome) -> None:
        if self.rng.random() < 0.7:
            self.told.append(self.look())


def test_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device works beside the host a step is still launched before the last one's tokens are read."""
    engine = hash_engine(120, 4, memory=1, is_asynchronous=True, max_num_batched_tokens=200)
    proposer = NgramProposer(engine.table, K)
    policy = Replaying(np.random.default_rng(0), lambda: replay(proposer, engine.table, engine.scheduler.running)[1])
    engine.draft_as(Drafting([proposer], policy, engine.scheduler))
    waits = Waits(engine, monkeypatch)
    chains = [[n, *expected_tokens([n], 20, 64, False, 1), n] for n in range(6)]  # behind its end it begins again
    lengths = [8, 12, 20, 20, 5, 16, 20, 9]
    requests = [
        Request(n, chains[n % 6], SamplingParams(max_tokens=length, ignore_eos=True))
        for n, length in enumerate(lengths)
    ]
    done = run(engine, requests, check=False)
    outputs = {r.row_id: expected_tokens(chains[r.row_id % 6], lengths[r.row_id], 64, False, 1) for r in requests}  # type: ignore[operator]
    assert {row: completion.token_ids for row, completion in done.items()} == outputs
    assert waits.early == []
    assert waits.read_at[:-1] == [*range(2, engine.stats.num_steps + 1)]
    assert sum(int(accepted_O.sum()) for accepted_O in policy.told) > 10
    assert max(map(len, policy.told)) > 1
