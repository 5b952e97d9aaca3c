"""Drafts by templates: what finished outputs have in common, with the copies that a row's own prompt says."""

from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.engine.drafts.lookup.compiled_lookup import MAX_MATCH, MIN_MATCH
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.schedule.sequence import SlotTable
from tests.engine.drafts.test_ngram import admit, append, leave

ON, BY, FOR, STOP = 901, 902, 903, 904  # what outputs say of their own
DATE, WHO, FAULT, COLON, LINE = 911, 912, 913, 914, 915  # and prompts
DAY, NAME, NOISE = [1, 2, 3], [4, 5], [6, 7, 8, 9]


def form(*values: list[int], names: tuple[int, ...] = (DATE, WHO, FAULT)) -> list[int]:
    """A prompt that says these values, each behind its name."""
    return [0, *(token for name, value in zip(names, values) for token in (name, COLON, *value, LINE)), 0]


def said(*values: list[int]) -> list[int]:
    return [token for word, value in zip((ON, BY, FOR), values) for token in (word, *value)] + [STOP]


class Rows:
    """Rows of a table that one proposer with templates knows."""

    def __init__(self, num_drafts: int, **sizes: int) -> None:
        self.table = SlotTable(4, 400, 4)
        self.proposer = NgramProposer(self.table, num_drafts, **sizes)
        self.order = 0

    def begin(self, prompt: list[int], output: list[int]) -> int:
        self.order += 1
        slot = admit(self.table, self.proposer, self.order, prompt)
        append(self.table, slot, output)
        return slot

    def finished(self, prompt: list[int], output: list[int]) -> None:
        leave(self.table, self.proposer, self.begin(prompt, output), finished=True)
        self.proposer.propose(np.array([], dtype=np.int64))

    def drafts(self, slot: int) -> list[int]:
        proposal = self.proposer.propose(np.array([slot]))
        return proposal.token_id_SK[0, : proposal.count_S[0]].tolist()

    def asked(self, prompt: list[int], output: list[int]) -> list[int]:
        """The drafts of a row that stays no longer."""
        slot = self.begin(prompt, output)
        drafts = self.drafts(slot)
        leave(self.table, self.proposer, slot, finished=False)
        return drafts


def test_a_template_is_filled_with_what_the_own_prompt_says() -> None:
    rows = Rows(12)
    rows.finished(form([10, 11], [12, 13, 14], [15, 16]), said([10, 11], [12, 13, 14], [15, 16]))
    whole = said(DAY, NAME, NOISE)
    slot = rows.begin(form(DAY, NAME, NOISE), whole[:1])
    for at in range(1, len(whole) - 1):
        assert rows.drafts(slot) == whole[at : at + 12], at  # inside of copies, at their beginning and behind them
        append(rows.table, slot, whole[at : at + 1])


def test_a_value_goes_on_until_what_stood_behind_it_stands_there() -> None:
    rows = Rows(8)
    rows.finished(form([10, 11], [12, LINE, 13]), said([10, 11], [12, LINE, 13]))  # two tokens behind it: the value
    name = [14, 15, LINE, 16]  # has the first one
    assert rows.asked(form(DAY, name), [ON, *DAY, BY]) == [*name, STOP]
    assert rows.asked([*form(DAY)[:-1], WHO, COLON, *NAME], [ON, *DAY, BY]) == NAME  # the prompt ends: so do drafts


def test_nothing_follows_the_end_of_an_output_that_overwrote_a_longer_one() -> None:
    rows = Rows(12, corpus_tokens=40)
    rows.finished([50, 51], list(range(100, 130)))
    day = list(range(10, 20))
    rows.finished(form(day), [ON, *day, STOP])  # it does not fit behind the other one; it has three symbols
    assert rows.asked(form(DAY), [ON]) == [*DAY, STOP]


# -- against lists and dicts


class Plain:
    """The same in as few words as possible, without bounds."""

    def __init__(self) -> None:
        self.symbols: list[object] = ["border"]
        self.copies: list[tuple[int, ...]] = [()]
        self.ends: dict[tuple[object, ...], int] = {}
        self.known: dict[tuple[object, ...], list[tuple[int, ...]]] = {}

    @staticmethod
    def parse(text: list[int], num_prompt: int) -> tuple[list[object], list[tuple[int, int]]]:
        """Symbols, and of each where it begins and, of a copy, its place in the prompt, else 0."""

        def find(begin: int, end: int) -> int:
            places = range(2, num_prompt - (end - begin) + 1)
            return next((p for p in places if text[p : p + end - begin] == text[begin:end]), 0)

        symbols: list[object] = []
        where: list[tuple[int, int]] = []
        for at in range(num_prompt, len(text)):
            begin = where[-1][0] if where else 0
            if symbols and symbols[-1] == "copy":
                place = where[-1][1]
                same = place + at - begin < num_prompt and text[place + at - begin] == text[at]
                place = place if same else find(begin, at + 1)
                if place:
                    where[-1] = begin, place
                    continue
            elif symbols and (place := find(at - 1, at + 1)):
                symbols[-1], where[-1] = "copy", (at - 1, place)
                continue
            symbols.append(text[at])
            where.append((at, 0))
        return symbols, where

    def learn(self, text: list[int], num_prompt: int) -> None:
        symbols, where = self.parse(text, num_prompt)
        first = len(self.symbols)
        for i, (symbol, (begin, place)) in enumerate(zip(symbols, where)):
            before = ("border", *symbols[:i])
            for length in range(MIN_MATCH, min(MAX_MATCH, len(before)) + 1):
                self.ends[before[-length:]] = first + i
            copy: tuple[int, ...] = ()
            if symbol == "copy":
                until = place + ((where[i + 1][0] if i + 1 < len(where) else len(text)) - begin)
                behind = text[until] if until < num_prompt else -1
                more = text[until + 1] if until + 1 < num_prompt and behind in text[place:until] else -1
                copy = (text[place - 2], text[place - 1], behind, more)
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

    def drafts(self, text: list[int], num_prompt: int, most: int) -> tuple[list[int], int]:
        def copy_of(before: list[object], instance: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            for copy in self.sources(before, instance):
                for place in range(2, num_prompt):
                    if tuple(text[place - 2 : place]) == copy[:2]:
                        return place, copy
            return 0, ()

        def copied(place: int, copy: tuple[int, ...], least: int) -> tuple[list[int], bool]:
            for until in range(place + least, num_prompt):
                more = text[until + 1] if until + 1 < num_prompt else -2
                if text[until] == copy[2] and copy[3] in (-1, more):
                    return text[place:until], True
            return text[place:num_prompt], False

        symbols, where = self.parse(text, num_prompt)
        end, match = self.longest(symbols)
        drafts: list[int] = []
        has_end = True
        if symbols and symbols[-1] == "copy":
            if match:
                begin, place = where[-1]
                source = tuple(text[place - 2 : place])
                instance = self.copies[end - 1]
                known = self.sources(["border", *symbols[:-1]], instance)
                copy = next((each for each in known if each[:2] == source), instance)
                drafts, has_end = copied(place + len(text) - begin, copy, 0)
        elif symbols:
            other_end, other = self.longest(symbols[:-1])
            if other and other >= match and self.symbols[other_end] == "copy":
                place, copy = copy_of(["border", *symbols[:-1]], self.copies[other_end])
                if place and text[place] == text[-1]:
                    end, match = other_end + 1, other + 1
                    drafts, has_end = copied(place + 1, copy, 0)
        while match and has_end and len(drafts) < most and self.symbols[end] != "border":
            if self.symbols[end] == "copy":
                place, copy = copy_of(self.symbols[:end], self.copies[end])
                if not place:
                    break
                more, has_end = copied(place, copy, 1)
                drafts += more
            else:
                drafts.append(self.symbols[end])  # type: ignore[arg-type]
            end += 1
        return drafts[:most], min(match, MAX_MATCH)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_those_of_a_plain_search(seed: int) -> None:
    """Over forms with some kinds of names and values of few tokens, so that values repeat and stand elsewhere too."""
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
    """Outputs of all lengths, also longer than all that is kept; ids that the model has are all that is offered."""
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
