"""Drafts that are replayed over tokens that came: as a row of steps with drafts would have made them."""

import numpy as np
import pytest

from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.propose.policy import FixedDrafts, StepFacts
from pipeline.engine.propose.replay import MOST_TOKENS, TELLING, Foretold, replay
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.kernels.select import select_lookup
from tests.engine.hash_runner import expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import run
from tests.engine.step.test_in_flight_drafts import Waits
from tests.engine.test_ngram import admit, append, leave

K = 4


def drafted(proposer: NgramProposer, table: SlotTable, slot: int, output: list[int]) -> list[tuple[int, ...]]:
    """Count, match, tokens decided on and right ones of each step that drafts, over a row whose output this is."""
    append(table, slot, output[:1])
    steps, at = [], 1
    while at < len(output):
        offer = proposer.offer(np.array([slot]))
        count = min(int(offer.count_S[0]), int(table.limit[slot] - table.num_known[slot]) - 1)
        decided = min(count, len(output) - at)
        alike = [a == b for a, b in zip(offer.token_id_SK[0, :decided].tolist(), output[at:])]
        agreed = alike.index(False) if False in alike else decided
        if agreed < decided or decided == count or decided >= TELLING:
            steps.append((count, int(offer.match_len_S[0]), decided, agreed))
        append(table, slot, output[at : at + agreed + 1])
        at += agreed + 1
    return steps


def replayed(proposer: NgramProposer, table: SlotTable, *slots: int) -> tuple[np.ndarray, ...]:
    """Count, match, tokens decided on and right ones of what is replayed of these."""
    told = replay(proposer, table, np.array(slots))
    assert told.offer_us >= 0
    assert not told.is_rest
    return told.count_O, told.match_len_O, told.decided_O, told.agreed_O


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
    num_steps = num_cut = 0
    for turn in range(12):
        rows = [texts(rng) for _ in range(3)]
        slots = [admit(one, drafts, 3 * turn + r, prompt) for r, (prompt, _) in enumerate(rows)]
        expected = sorted(step for slot, (_, output) in zip(slots, rows) for step in drafted(drafts, one, slot, output))
        again = [admit(other, later, 3 * turn + r, prompt) for r, (prompt, _) in enumerate(rows)]
        for slot, (_, output) in zip(again, rows):
            append(other, slot, output)
        told = replayed(later, other, *again)
        assert sorted(zip(*(part.tolist() for part in told))) == expected
        num_steps += len(expected)
        num_cut += sum(decided < count for count, _, decided, _ in expected)
        for table, proposer, of in ((one, drafts, slots), (other, later, again)):
            for slot in of:
                leave(table, proposer, slot, finished=True)
    assert num_steps > 200
    assert num_cut > 0


def test_only_what_was_not_looked_at_is_replayed_and_of_that_the_last() -> None:
    table = SlotTable(1, 400, 4)
    proposer, text = NgramProposer(table, K), [1, 2, 3, 4, 5] * 30
    slot = admit(table, proposer, 0, [9, 9])
    append(table, slot, text[:21])
    first = replayed(proposer, table, slot)
    assert first[0].tolist()[:7] == [0] * 6 + [K]  # nothing occurs twice before the seventh
    assert (first[3][7:] == first[2][7:]).all()
    assert len(replayed(proposer, table, slot)[0]) <= 1  # at most what was cut short
    append(table, slot, text[21:120])
    _, _, decided, agreed = replayed(proposer, table, slot)
    assert (agreed == decided).all()
    assert MOST_TOKENS // (K + 1) == 6
    assert decided.tolist() == [K] * 5  # the first began in the midst of something, the last has two tokens


def test_a_row_that_could_not_generate_more_is_offered_less() -> None:
    table = SlotTable(1, 24, 4)
    proposer = NgramProposer(table, K)
    slot = admit(table, proposer, 0, [1, 2, 3] * 6)
    append(table, slot, [1, 2, 3, 1])
    assert table.limit[slot] == 24
    count, _, decided, agreed = replayed(proposer, table, slot)
    assert (count.tolist(), decided.tolist(), agreed.tolist()) == ([K], [TELLING], [TELLING])
    append(table, slot, [9])
    count, _, decided, agreed = replayed(proposer, table, slot)
    assert (count.tolist(), decided.tolist(), agreed.tolist()) == ([K], [K], [K - 1])  # one more can come, undrafted
    other = admit(table := SlotTable(1, 24, 4), proposer := NgramProposer(table, K), 0, [1, 2, 3] * 6 + [1])
    append(table, other, [2, 3])
    count, _, decided, _ = replayed(proposer, table, other)
    assert table.limit[other] - int(table.num_prompt[other]) - 2 == 3
    assert (count.tolist(), decided.tolist()) == ([], [])
    append(table, other, [1, 2])
    assert replayed(proposer, table, other)[0].tolist() == [3]


class Replaying(FixedDrafts):
    """Drafts nothing, and wants to know in most steps what drafts would have come to."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(K)
        self.rng = rng
        self.told: list[Foretold] = []

    def proposer(self, facts: StepFacts) -> int | None:
        return None

    def shadows(self, facts: StepFacts) -> int | None:
        return 0 if self.rng.random() < 0.7 else None

    def foretold(self, foretold: Foretold) -> None:
        self.told.append(foretold)


def test_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device works beside the host a step is still launched before the last one's tokens are read."""
    engine = hash_engine(120, 4, memory=1, is_asynchronous=True, max_num_batched_tokens=200)
    policy = Replaying(np.random.default_rng(0))
    engine.speculate([NgramProposer(engine.table, K)], policy)
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
    assert not any(foretold.is_rest for foretold in policy.told)
    assert sum(int(foretold.agreed_O.sum()) for foretold in policy.told) > 10
    assert max(len(foretold.count_O) for foretold in policy.told) > 1
