"""The n-gram proposer against a search through the whole text, and its compiled pass against numpy."""

import numpy as np
import pytest

from pipeline.engine.drafts.lookup import ngram
from pipeline.engine.drafts.lookup.compiled import CompiledLookup, select_lookup
from pipeline.engine.drafts.lookup.corpus import FinishedOutputs
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.lookup.suffix_index import MAX_MATCH, MIN_MATCH, SuffixIndex, tails
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.sequence import Sequence, SlotTable

both = pytest.mark.parametrize("compiled", [None, select_lookup()], ids=["numpy", "compiled"])


def literal(table: SlotTable, most: int, compiled: CompiledLookup | None, **sizes: int) -> NgramProposer:
    """Without templates, which have tests of their own."""
    proposer = NgramProposer(table, most, compiled=compiled, **sizes)
    proposer._patterns = None
    return proposer


def admit(table: SlotTable, proposer: NgramProposer, order: int, tokens: list[int]) -> int:
    sequence = Sequence(Request(order, tokens, SamplingParams(max_tokens=500)), np.array(tokens, dtype=np.int32), order)
    slot = table.occupy(sequence, [])
    proposer.admitted(slot)
    return slot


def append(table: SlotTable, slot: int, tokens: list[int]) -> None:
    known = int(table.num_known[slot])
    table.token_ids[slot, known : known + len(tokens)] = tokens
    table.num_known[slot] += len(tokens)


def leave(table: SlotTable, proposer: NgramProposer, slot: int, finished: bool) -> None:
    proposer.left(slot, finished)
    table.vacate(slot)


def longest_match(text: list[int], tail: list[int]) -> tuple[int, int]:
    """The longest run of at most MAX_MATCH tokens that ends `tail` and stands in `text` with a token behind it: its
    length and where it ends last."""
    for length in range(min(MAX_MATCH, len(tail)), MIN_MATCH - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == tail[-length:]:
                return length, end
    return 0, 0


@both
@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_what_followed_the_longest_match_the_last_time(seed: int, compiled: CompiledLookup | None) -> None:
    """Many sequences that come, grow at their own pace, go and come back elsewhere; small alphabets match a lot."""
    rng = np.random.default_rng(seed)
    table = SlotTable(9, 150, 4)
    proposer = literal(table, 5, corpus_tokens=16, compiled=compiled)
    alphabet = int(rng.choice([2, 4, 12]))
    order, num_asked, num_forgotten, num_matches, slots = 0, 0, 0, 0, {}
    proposer.index = SuffixIndex(1 << 22)
    for _ in range(60):
        while len(slots) < 9 and rng.random() < 0.5:
            slots[admit(table, proposer, order, rng.integers(0, alphabet, int(rng.integers(1, 40))).tolist())] = order
            order += 1
        asked = np.array([s for s in slots if rng.random() < 0.8], dtype=np.int64)
        offer = proposer.offer(asked)
        assert (offer.slot_S == asked).all()
        for s, slot in enumerate(asked.tolist()):
            text = table.token_ids[slot, : table.num_known[slot]].tolist()
            length, end = longest_match(text, text)
            num_asked += 1
            drafts = offer.token_id_SK[s, : offer.count_S[s]].tolist()
            assert len(drafts) == (5 if offer.match_len_S[s] else 0)
            behind = text[end:]
            expected = [(behind * 5)[place] for place in range(5 if length else 0)]
            if (offer.match_len_S[s], drafts) != (length, expected):  # another run fell on its entry
                assert offer.match_len_S[s] <= length
                num_forgotten += 1
            num_matches += length > 0
        for slot in list(slots):
            append(table, slot, rng.integers(0, alphabet, int(rng.integers(0, 6))).tolist())
            if rng.random() < 0.05 or table.num_known[slot] > 140:
                leave(table, proposer, slot, finished=False)
                del slots[slot]
    assert num_matches > 50
    assert num_forgotten <= num_asked // 100


@pytest.mark.parametrize("seed", range(8))
def test_the_compiled_pass_offers_what_numpy_offers(seed: int) -> None:
    """Tables so small that runs fall on each other's entries, too; each goes on with what the other has indexed."""
    rng = np.random.default_rng(seed)
    table, num_drafts = SlotTable(7, 700, 4), int(rng.integers(1, 9))
    sizes = {"max_entries": int(rng.choice([16, 1024, 1 << 18])), "corpus_tokens": int(rng.choice([16, 80, 4096]))}
    pair = [literal(table, num_drafts, compiled=compiled, **sizes) for compiled in (None, select_lookup())]
    alphabet, slots, order, num_of_others = int(rng.choice([2, 6, 30])), [], 0, 0
    for number in range(120):
        while len(slots) < 7 and rng.random() < 0.3:
            prompt = rng.integers(0, alphabet, int(rng.choice([1, 2, 9, 60, 600]))).tolist()
            slots.append(admit(table, pair[0], order, prompt))
            pair[1].admitted(slots[-1])
            order += 1
        asked = np.array([slot for slot in slots if rng.random() < 0.8], dtype=np.int64)
        one, other = (proposer.offer(asked) for proposer in pair)
        assert one.count_S.tolist() == other.count_S.tolist()
        assert one.match_len_S.tolist() == other.match_len_S.tolist()
        assert one.token_id_SK.tolist() == other.token_id_SK.tolist()
        assert one.token_id_SK.dtype == other.token_id_SK.dtype
        assert (pair[0].index.end_E == pair[1].index.end_E).all()
        num_of_others += int(np.isin(one.count_S, range(1, num_drafts)).sum())
        for slot in list(slots):
            append(table, slot, rng.integers(0, alphabet, int(rng.integers(0, 4))).tolist())
            if rng.random() < 0.05 or table.num_known[slot] > 690:
                pair[1].left(slot, finished=True)
                leave(table, pair[0], slot, finished=True)
                slots.remove(slot)
        if number % 10 == 0:
            pair[0]._look_up, pair[1]._look_up = pair[1]._look_up, pair[0]._look_up
    assert num_of_others > 0 or num_drafts == 1


@both
def test_a_sequence_that_comes_back_in_another_slot_is_found_again(compiled: CompiledLookup | None) -> None:
    table = SlotTable(3, 60, 4)
    proposer = literal(table, 3, compiled=compiled)
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    first = admit(table, proposer, 0, text)
    assert proposer.offer(np.array([first])).token_id_SK.tolist() == [[4, 5, 6]]
    leave(table, proposer, first, finished=False)
    other = admit(table, proposer, 1, [9] * 20)
    assert proposer.offer(np.array([other])).token_id_SK.tolist() == [[9, 9, 9]]
    back = admit(table, proposer, 0, text)
    assert back != first
    offer = proposer.offer(np.array([other, back]))
    assert offer.token_id_SK.tolist() == [[9, 9, 9], [4, 5, 6]]
    assert offer.match_len_S.tolist() == [MAX_MATCH, 3]


@both
def test_finished_outputs_serve_others_where_they_match_better(compiled: CompiledLookup | None) -> None:
    table = SlotTable(4, 60, 4)
    proposer = literal(table, 4, compiled=compiled)
    done = admit(table, proposer, 0, [50, 51])
    append(table, done, [1, 2, 3, 4, 5, 6])
    leave(table, proposer, done, finished=True)
    gone = admit(table, proposer, 1, [50, 51])
    append(table, gone, [1, 2, 3, 9, 9, 9])
    leave(table, proposer, gone, finished=False)
    slots = np.array(
        [
            admit(table, proposer, 2, [8, 1, 2, 3]),  # found in the output
            admit(table, proposer, 3, [2, 3, 7, 8, 0, 2, 3]),  # equally good in its own text
            admit(table, proposer, 4, [50, 51]),  # the prompt of another is not searched
            admit(table, proposer, 5, [8, 5, 6]),  # nothing behind it
        ]
    )
    offer = proposer.offer(slots)
    assert offer.match_len_S.tolist() == [3, 2, 0, 0]
    assert offer.count_S.tolist() == [3, 4, 0, 0]
    assert offer.token_id_SK[0, :3].tolist() == [4, 5, 6]
    assert offer.token_id_SK[1].tolist() == [7, 8, 0, 2]


def test_rows_that_finished_while_nobody_asked_are_learnt_some_at_a_time_the_last_ones_first() -> None:
    table = SlotTable(2, ngram.LEARNT_TOKENS + 60, 4)
    proposer, num_rows = NgramProposer(table, 2), 2 * ngram.LEARNT_PER_CALL + 1
    for order in range(num_rows):
        slot = admit(table, proposer, order, [50] * (ngram.LEARNT_TOKENS + 9 if order % 2 else 3))
        append(table, slot, [100 + order, 101 + order, 200 + order, 300 + order])
        leave(table, proposer, slot, finished=True)
    asking = admit(table, proposer, 99, [7, 7, 7])
    nobody = np.array([], dtype=np.int64)

    def found() -> list[int]:
        """Rows whose output is known by now."""
        rows = []
        for order in range(num_rows):
            slot = admit(table, proposer, 1000 + order, [100 + order, 101 + order])
            offer = proposer._matches(np.array([slot]), table.num_known[[slot]], 512)
            rows += [order] if offer.token_id_SK[0, : offer.count_S[0]].tolist() == [200 + order, 300 + order] else []
            leave(table, proposer, slot, finished=False)
        return rows

    assert found() == []
    for asked in (np.array([asking]), nobody, nobody):
        known = len(found())
        proposer.offer(asked)
        assert found() == list(range(max(num_rows - known - ngram.LEARNT_PER_CALL, 0), num_rows))
    assert len(found()) == num_rows


@pytest.mark.parametrize("seed", range(4))
def test_finished_outputs_are_bounded_and_never_run_together(seed: int) -> None:
    """What is found was said behind that very run, in one output, not long ago."""
    rng = np.random.default_rng(seed)
    finished = FinishedOutputs(64)
    assert finished.is_empty
    outputs: list[list[int]] = []
    found = 0
    for _ in range(200):
        output = rng.integers(0, 3, int(rng.choice([1, 2, 3, 9, 20, 62, 100]))).tolist()
        finished.add(np.array(output, dtype=np.int32))
        outputs = [*outputs[-30:], output[-61:]]
        query = rng.integers(0, 3, (4, 9)).astype(np.int32)
        tail_NM = tails(query.reshape(-1), np.arange(4) * 9, np.full(4, 9))
        end_N, length_N = finished.find(tail_NM)
        token_NK, count_N = finished.after(end_N, 4)
        for n in range(4):
            if length_N[n]:
                said = [*query[n, 9 - length_N[n] :].tolist(), *token_NK[n, : count_N[n]].tolist()]
                assert any(said == o[i : i + len(said)] for o in outputs for i in range(len(o)))
                assert count_N[n] > 0 or finished.tokens[end_N[n]] < 0
                found += 1
    assert not finished.is_empty
    assert len(finished.tokens) == 64
    assert found > 100


@both
def test_a_table_that_is_far_too_small_forgets_and_never_errs(compiled: CompiledLookup | None) -> None:
    rng = np.random.default_rng(0)
    table = SlotTable(4, 200, 4)
    proposer = literal(table, 3, max_entries=16, corpus_tokens=16, compiled=compiled)
    assert proposer.index.num_entries == 16
    slots = np.array([admit(table, proposer, n, rng.integers(0, 3, 150).tolist()) for n in range(4)])
    matches = 0
    for _ in range(30):
        offer = proposer.offer(slots)
        for s, slot in enumerate(slots.tolist()):
            text = table.token_ids[slot, : table.num_known[slot]].tolist()
            length = int(offer.match_len_S[s])
            matches += length > 0
            said = text[len(text) - length :] + offer.token_id_SK[s, : offer.count_S[s]].tolist()
            assert length == 0 or any(said[: length + 1] == text[i : i + length + 1] for i in range(len(text)))
            append(table, slot, rng.integers(0, 3, 1).tolist())
    assert matches > 0


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEXED_PER_CALL", 100)
    table = SlotTable(2, 1000, 4)
    proposer = NgramProposer(table, 4)
    text = np.random.default_rng(0).permutation(900).tolist()
    slot = admit(table, proposer, 0, [*text, *text[700:705]])
    rows: list[int] = []
    keys = SuffixIndex.keys

    def counted(self: SuffixIndex, tail_NM: np.ndarray, salt_N: np.ndarray | int) -> np.ndarray:
        rows.append(len(tail_NM))
        return keys(self, tail_NM, salt_N)

    monkeypatch.setattr(SuffixIndex, "keys", counted)
    offers = [int(proposer.offer(np.array([slot])).match_len_S[0]) for _ in range(12)]
    assert offers == [0] * 7 + [5] * 5
    assert max(rows) == 101
    assert rows[-1] == 1


@both
def test_a_batch_that_nobody_asked_for_is_known_at_once(compiled: CompiledLookup | None) -> None:
    """Drafts from half of a text are worse than none, and go on being so for as many steps as it takes to know it."""
    rng, num = np.random.default_rng(0), 64
    table = SlotTable(num, 200, 4)
    proposer = literal(table, 3, compiled=compiled)
    texts = [rng.permutation(90).tolist() for _ in range(num)]
    slots = np.array([admit(table, proposer, n, [*text, *text[40:50]]) for n, text in enumerate(texts)])
    offer = proposer.offer(slots)
    assert (offer.match_len_S >= 4).all()
    assert offer.token_id_SK.tolist() == [text[50:53] for text in texts]
