"""Drafts by templates: text that finished outputs share, with values copied from the row's own prompt."""

from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.engine.drafts.lookup.compiled_lookup import MAX_MATCH, MIN_MATCH
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.roofline.kv_pages import KVPages
from tests.engine.drafts.test_ngram import admit, append, leave

ON, BY, FOR, STOP = 901, 902, 903, 904  # words of outputs
DATE, AUTHOR, FAULT, COLON, LINE = 911, 912, 913, 914, 915  # words of prompts
DAY, NAME, NOISE = [1, 2, 3], [4, 5], [6, 7, 8, 9]


def form(*values: list[int], names: tuple[int, ...] = (DATE, AUTHOR, FAULT)) -> list[int]:
    """Build a prompt with these values, each after its name."""
    return [0, *(token for name, value in zip(names, values) for token in (name, COLON, *value, LINE)), 0]


def output_of(*values: list[int]) -> list[int]:
    return [token for word, value in zip((ON, BY, FOR), values) for token in (word, *value)] + [STOP]


class Rows:
    """Rows of a table that one proposer with templates knows."""

    def __init__(self, num_drafts: int, **sizes: int) -> None:
        self.table = SlotTable(4, 400, KVPages(4, 0))
        self.proposer = NgramProposer(self.table, num_drafts, **sizes)
        self.order = 0

    def begin(self, prompt: list[int], output: list[int]) -> int:
        self.order += 1
        slot = admit(self.table, self.proposer, self.order, prompt)
        append(self.table, slot, output)
        return slot

    def add_finished(self, prompt: list[int], output: list[int]) -> None:
        leave(self.table, self.proposer, self.begin(prompt, output), finished=True)
        self.proposer.propose(np.array([], dtype=np.int64))

    def drafts(self, slot: int) -> list[int]:
        proposal = self.proposer.propose(np.array([slot]))
        return proposal.token_id_SK[0, : proposal.count_S[0]].tolist()

    def drafts_of_new_row(self, prompt: list[int], output: list[int]) -> list[int]:
        """Return the drafts of a row that is evicted afterwards."""
        slot = self.begin(prompt, output)
        drafts = self.drafts(slot)
        leave(self.table, self.proposer, slot, finished=False)
        return drafts


def test_a_template_is_filled_from_the_own_prompt() -> None:
    rows = Rows(12)
    rows.add_finished(form([10, 11], [12, 13, 14], [15, 16]), output_of([10, 11], [12, 13, 14], [15, 16]))
    whole = output_of(DAY, NAME, NOISE)
    slot = rows.begin(form(DAY, NAME, NOISE), whole[:1])
    for at in range(1, len(whole) - 1):
        assert rows.drafts(slot) == whole[at : at + 12], at  # inside of copies, at their beginning and after them
        append(rows.table, slot, whole[at : at + 1])


def test_a_copied_value_ends_before_the_token_that_followed_the_earlier_one() -> None:
    rows = Rows(8)
    rows.add_finished(form([10, 11], [12, LINE, 13]), output_of([10, 11], [12, LINE, 13]))
    # The two tokens after the value decide its end; this name contains the first of them.
    name = [14, 15, LINE, 16]
    assert rows.drafts_of_new_row(form(DAY, name), [ON, *DAY, BY]) == [*name, STOP]
    # The prompt ends, and so do the drafts.
    assert rows.drafts_of_new_row([*form(DAY)[:-1], AUTHOR, COLON, *NAME], [ON, *DAY, BY]) == NAME


def test_nothing_follows_the_end_of_an_output_that_overwrote_a_longer_one() -> None:
    rows = Rows(12, corpus_tokens=40)
    rows.add_finished([50, 51], list(range(100, 130)))
    day = list(range(10, 20))
    rows.add_finished(form(day), [ON, *day, STOP])  # it does not fit after the other one; it has three symbols
    assert rows.drafts_of_new_row(form(DAY), [ON]) == [*DAY, STOP]


# -- against lists and dicts


class Plain:
    """Plain implementation of the same search, without bounds."""

    def __init__(self) -> None:
        self.symbols: list[object] = ["border"]
        self.copies: list[tuple[int, ...]] = [()]
        self.ends: dict[tuple[object, ...], int] = {}
        self.known: dict[tuple[object, ...], list[tuple[int, ...]]] = {}

    @staticmethod
    def parse(text: list[int], num_prompt: int) -> tuple[list[object], list[tuple[int, int]]]:
        """Return symbols, and each one's beginning and, for a copy, its position in the prompt, else 0."""

        def find(begin: int, end: int) -> int:
            starts = range(2, num_prompt - (end - begin) + 1)
            return next((p for p in starts if text[p : p + end - begin] == text[begin:end]), 0)

        symbols: list[object] = []
        spans: list[tuple[int, int]] = []
        for at in range(num_prompt, len(text)):
            begin = spans[-1][0] if spans else 0
            if symbols and symbols[-1] == "copy":
                source = spans[-1][1]
                same = source + at - begin < num_prompt and text[source + at - begin] == text[at]
                source = source if same else find(begin, at + 1)
                if source:
                    spans[-1] = begin, source
                    continue
            elif symbols and (source := find(at - 1, at + 1)):
                symbols[-1], spans[-1] = "copy", (at - 1, source)
                continue
            symbols.append(text[at])
            spans.append((at, 0))
        return symbols, spans

    def learn(self, text: list[int], num_prompt: int) -> None:
        symbols, spans = self.parse(text, num_prompt)
        first = len(self.symbols)
        for i, (symbol, (begin, source)) in enumerate(zip(symbols, spans)):
            before = ("border", *symbols[:i])
            for length in range(MIN_MATCH, min(MAX_MATCH, len(before)) + 1):
                self.ends[before[-length:]] = first + i
            copy: tuple[int, ...] = ()
            if symbol == "copy":
                until = source + ((spans[i + 1][0] if i + 1 < len(spans) else len(text)) - begin)
                follower = text[until] if until < num_prompt else -1
                more = text[until + 1] if until + 1 < num_prompt and follower in text[source:until] else -1
                copy = (text[source - 2], text[source - 1], follower, more)
                for number in range(1, min(3, len(before)) + 1):
                    kept = self.known.setdefault(before[-number:], [])
                    kept[:] = [copy, *(each for each in kept if each[:2] != copy[:2])]
            self.symbols.append(symbol)
            self.copies.append(copy)
        self.symbols.append("border")
        self.copies.append(())

    def longest(self, symbols: list[object]) -> tuple[int, int]:
        context = ("border", *symbols)
        lengths = range(min(MAX_MATCH, len(context)), MIN_MATCH - 1, -1)
        return next(((self.ends[context[-n:]], n) for n in lengths if context[-n:] in self.ends), (0, 0))

    def sources(self, before: list[object], instance: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield instance
        if "border" in before:
            before = before[len(before) - 1 - before[::-1].index("border") :]
        for number in range(min(3, len(before)), 0, -1):
            yield from self.known.get(tuple(before[-number:]), [])

    def drafts(self, text: list[int], num_prompt: int, max_drafts: int) -> tuple[list[int], int]:
        def copy_of(before: list[object], instance: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            for copy in self.sources(before, instance):
                for source in range(2, num_prompt):
                    if tuple(text[source - 2 : source]) == copy[:2]:
                        return source, copy
            return 0, ()

        def copied(source: int, copy: tuple[int, ...], min_length: int) -> tuple[list[int], bool]:
            for until in range(source + min_length, num_prompt):
                more = text[until + 1] if until + 1 < num_prompt else -2
                if text[until] == copy[2] and copy[3] in (-1, more):
                    return text[source:until], True
            return text[source:num_prompt], False

        symbols, spans = self.parse(text, num_prompt)
        end, match = self.longest(symbols)
        drafts: list[int] = []
        has_end = True
        if symbols and symbols[-1] == "copy":
            if match:
                begin, source = spans[-1]
                pattern = tuple(text[source - 2 : source])
                instance = self.copies[end - 1]
                known = self.sources(["border", *symbols[:-1]], instance)
                copy = next((each for each in known if each[:2] == pattern), instance)
                drafts, has_end = copied(source + len(text) - begin, copy, 0)
        elif symbols:
            other_end, other = self.longest(symbols[:-1])
            if other and other >= match and self.symbols[other_end] == "copy":
                source, copy = copy_of(["border", *symbols[:-1]], self.copies[other_end])
                if source and text[source] == text[-1]:
                    end, match = other_end + 1, other + 1
                    drafts, has_end = copied(source + 1, copy, 0)
        while match and has_end and len(drafts) < max_drafts and self.symbols[end] != "border":
            if self.symbols[end] == "copy":
                source, copy = copy_of(self.symbols[:end], self.copies[end])
                if not source:
                    break
                more, has_end = copied(source, copy, 1)
                drafts += more
            else:
                drafts.append(self.symbols[end])  # type: ignore[arg-type]
            end += 1
        return drafts[:max_drafts], min(match, MAX_MATCH)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_those_of_a_plain_search(seed: int) -> None:
    """Forms have few kinds of names and short values, so that values repeat and occur elsewhere too."""
    rng = np.random.default_rng(seed)
    rows, plain = Rows(int(rng.integers(1, 14))), Plain()
    templates = [rng.integers(200, 206, rng.integers(3, 9)).tolist() for _ in range(3)]
    num_exchanged = num_copied = 0
    for _ in range(60):
        names = rng.permutation(np.arange(300, 303) + 10 * rng.integers(0, 3)).tolist()
        values = [rng.integers(0, 12, rng.integers(1, 5)).tolist() for _ in names]
        prompt = [*rng.integers(0, 12, 3).tolist(), *form(*values, names=tuple(names))]
        output: list[int] = []
        for token in templates[rng.integers(0, 3)]:
            value = values[names.index(300 + 10 * (names[0] // 10 - 30) + token % 3)]
            output += [token, *(value if rng.random() < 0.9 else rng.integers(0, 12, 2).tolist())]
        output.append(STOP)
        slot, at = rows.begin(prompt, output[:1]), 1
        while at < len(output):
            text = [*prompt, *output[:at]]
            literal = rows.proposer._matches(np.array([slot]), rows.table.num_known[[slot]], 1000)
            drafts, match = plain.drafts(text, len(prompt), rows.proposer.max_draft_tokens)
            proposal = rows.proposer.propose(np.array([slot]))
            found = proposal.token_id_SK[0, : proposal.count_S[0]].tolist()
            if drafts and match >= literal.match_len_S[0]:
                assert (found, proposal.match_len_S[0]) == (drafts, match)
                num_exchanged += 1
                num_copied += any(token < 12 for token in drafts)
            else:
                assert found == literal.token_id_SK[0, : literal.count_S[0]].tolist()
            more = int(rng.integers(1, 4))
            append(rows.table, slot, output[at : at + more])
            at += more
        plain.learn([*prompt, *output], len(prompt))
        leave(rows.table, rows.proposer, slot, finished=True)
        rows.proposer.propose(np.array([], dtype=np.int64))
    assert num_exchanged > 100
    assert num_copied > 50


@pytest.mark.parametrize("seed", range(4))
def test_tables_that_are_far_too_small_forget_and_never_fail(seed: int) -> None:
    """Outputs have all lengths, also beyond the kept corpus; only valid token ids are offered."""
    rng = np.random.default_rng(seed)
    rows, num_offered = Rows(5, corpus_tokens=40), 0
    for _ in range(150):
        prompt = rng.integers(0, 8, int(rng.choice([1, 2, 3, 30, 150]))).tolist()
        output = (prompt[: rng.integers(0, 60)] + rng.integers(0, 8, int(rng.integers(1, 60))).tolist())[:200]
        slot = rows.begin(prompt, output[:-1])
        proposal = rows.proposer.propose(np.array([slot]))
        drafts = proposal.token_id_SK[0, : proposal.count_S[0]]
        num_offered += len(drafts)
        assert ((drafts >= 0) & (drafts < 8)).all()
        leave(rows.table, rows.proposer, slot, finished=True)
    assert num_offered > 100
