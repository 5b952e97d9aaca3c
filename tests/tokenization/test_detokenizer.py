"""Streamed text equals a full decode after each token; stop strings equal a search in the full text."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tokenization.detokenizer import StopChecker, StopMatch, StreamDetokenizer
from tests.tokenization import small_tokenizers

WORDS = [
    "pump", " hall", " 7", "你好", "世界", "🎉", "👩‍👩‍👧", "é", "\n", " ", "end", "ｅｎｄ", "aaa", "Ελλ", "<|eos|>",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


@cache
def byte_level():
    return small_tokenizers.byte_level(330)


@cache
def sentencepiece_like():
    return small_tokenizers.sentencepiece_like()


RANDOM_IDS = st.lists(st.integers(0, 339), max_size=90)
BYTE_IDS = st.one_of(TEXT.map(lambda text: byte_level().encode(text).ids), RANDOM_IDS)
STOP_STRINGS = ["你", "好世", "🎉", "d", "end", "\n", " 7", "aa", "7\n", "é ", "pump"]
STOP = st.lists(st.sampled_from(STOP_STRINGS) | st.text("ae你 \n", min_size=1, max_size=4), min_size=1, max_size=3)


def visible(decoder, ids):
    return decoder.decode(ids).rstrip("\ufffd")


def plain_stop(decoder, ids, stop, min_tokens):
    """Search full decodes token by token. Return (tokens until the match, match), or None."""
    for count in range(1, len(ids) + 1):
        if count < min_tokens:
            continue
        before, text = visible(decoder, ids[: count - 1]), visible(decoder, ids[:count])
        matches = []
        for one in stop:
            starts = [at for at in range(len(text)) if text.startswith(one, at) and at + len(one) > len(before)]
            matches += [(at, -len(one), one) for at in starts]
        if matches:
            at, _, one = min(matches)
            return count, StopMatch(text[:at], one)
    return None


def pushed(checker, ids):
    for count, token in enumerate(ids, start=1):
        match = checker.push(token)
        if match is not None:
            return count, match
    return None


@settings(max_examples=150, deadline=None)
@given(BYTE_IDS)
def test_streamed_text_is_the_visible_text_after_every_token(ids):
    stream = StreamDetokenizer(byte_level())
    text = ""
    for count, token in enumerate(ids, start=1):
        text += stream.push(token)
        assert text == visible(byte_level(), ids[:count])


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_streamed_text_of_sentencepiece_like_tokenizers(text):
    """Their decoders drop the first blank of a text and spell characters in bytes. An unfinished character hides its
    whole run of bytes, finished ones too, because shown text must never change."""
    ids = sentencepiece_like().encode(text).ids
    stream = StreamDetokenizer(sentencepiece_like())
    shown = longest = ""
    for count, token in enumerate(ids, start=1):
        shown += stream.push(token)
        longest = max(longest, visible(sentencepiece_like(), ids[:count]), key=len)
        assert shown == longest
    assert shown == sentencepiece_like().decode(ids)


@settings(max_examples=250, deadline=None)
@given(BYTE_IDS, STOP, st.sampled_from([0, 0, 1, 3, 10]))
def test_stop_strings_end_like_a_search_of_the_whole_text(ids, stop, min_tokens):
    checker = StopChecker(byte_level(), stop, min_tokens)
    assert pushed(checker, ids) == plain_stop(byte_level(), ids, stop, min_tokens)


def test_a_stop_string_across_tokens_and_inside_one():
    tokenizer = byte_level()
    for text, stop, expected in (
        ("one 你好 two", "你好", "one "),
        ("ab🎉cd", "b🎉c", "a"),
        ("The pump in hall", "e pump i", "Th"),
        ("The pump in hall", "um", "The p"),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found = pushed(StopChecker(tokenizer, [stop]), ids)
        assert found[1] == StopMatch(expected, stop)
        assert pushed(StopChecker(tokenizer, ["nowhere"]), ids) is None


def test_special_tokens_in_the_middle_cost_no_blank():
    """Special tokens are not shown, and the next word must not lose its blank at the start of a window."""
    decoder = sentencepiece_like()
    word = decoder.encode(" te", add_special_tokens=False).ids
    for run in range(1, 30):
        ids = word * 4 + [2] * run + word * 4
        stream = StreamDetokenizer(decoder)
        assert "".join(stream.push(token) for token in ids) == decoder.decode(ids)


class Counting:
    def __init__(self, decoder):
        self.decoder = decoder
        self.most = self.total = 0

    def decode(self, ids):
        self.most = max(self.most, len(ids))
        self.total += len(ids)
        return self.decoder.decode(ids)


@pytest.mark.parametrize("kind", ["text", "invalid bytes", "special tokens"])
def test_a_push_decodes_a_bounded_window(kind):
    tokenizer = byte_level()
    ids = {
        "text": tokenizer.encode("pump hall 你好世界 🎉 " * 100).ids,
        "invalid bytes": [tokenizer.token_to_id("ÿ")] * 2000,
        "special tokens": [tokenizer.token_to_id("<|eos|>")] * 2000,
    }[kind]
    counting = Counting(tokenizer)
    checker = StopChecker(counting, ["nowhere"])
    assert pushed(checker, ids) is None
    assert counting.most <= 33
    assert counting.total <= 35 * len(ids)


def test_invalid_bytes_hide_no_stop_string_behind_them():
    tokenizer = byte_level()
    invalid = tokenizer.token_to_id("ÿ")
    for count in (1, 31, 32, 33, 100):
        ids = [*tokenizer.encode("pump").ids, *[invalid] * count, *tokenizer.encode("the end").ids]
        found = pushed(StopChecker(tokenizer, ["end"]), ids)
        assert found[1].text == tokenizer.decode(ids)[:-3]
        assert pushed(StopChecker(tokenizer, ["pumpt"]), ids) is None
