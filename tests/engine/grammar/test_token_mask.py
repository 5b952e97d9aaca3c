"""Masks against brute force: which of all tokens go on with some text of the language."""

import numpy as np
import pytest
import torch

from pipeline.engine.grammar.compiler import GrammarCompiler
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.grammar.token_mask import MaskFiller, TokenMask
from pipeline.engine.stats import EngineStats
from tests.engine.grammar.small_vocabulary import small_tokenizer
from tests.engine.hash_runner import EOS, VOCAB

LANGUAGES = {
    "choice": ({"choice": ["yes", "yellow", "no", "n", '"a":1']}, ["yes", "yellow", "no", "n", '"a":1']),
    "regex": ({"regex": "(ab|a|\\{\")[0-2]{1,2}"}, [h + a + b for h in ("ab", "a", '{"') for a in "012"
                                                   for b in ("", "0", "1", "2")]),
    "lark": ({"grammar": 'start: item item?\nitem: "a" | "ab" | ",\\""'}, [a + b for a in ("a", "ab", ',"')
                                                                          for b in ("", "a", "ab", ',"')]),
    "json": ({"json": {"type": "object", "properties": {"ab": {"enum": [1, "a", None]}}, "required": ["ab"],
                       "additionalProperties": False}}, ['{"ab":1}', '{"ab":"a"}', '{"ab":null}']),
    "json with blanks": ({"json": {"enum": [[1]]}, "whitespace_pattern": "[ ]{0,1}"},
                         [f"[{a}1{b}]" for a in ("", " ") for b in ("", " ")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


@pytest.fixture
def filler(compiler: GrammarCompiler) -> MaskFiller:
    return MaskFiller(compiler.mask_words, VOCAB, 2, EngineStats())


def allowed(mask: TokenMask) -> list[set[int]]:
    """By laying it on logits."""
    z_RV = torch.zeros(len(mask.row_M), VOCAB)
    mask.apply(z_RV, mask.row_M)
    return [set(torch.isfinite(z_V).nonzero()[:, 0].tolist()) for z_V in z_RV]


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_is_what_brute_force_finds(name: str, tokenizer, compiler: GrammarCompiler, filler: MaskFiller) -> None:
    """Of text that is forced llguidance allows one token, the one that encoding it gives."""
    given, words = LANGUAGES[name]
    spelled = [tokenizer.decode([token]) for token in range(VOCAB)]
    wanted, states = StructuredOutputs.of(given), [()]
    num_free = 0
    for tokens in states:
        matcher = compiler.matcher(wanted)
        text = "".join(spelled[token] for token in tokens)
        ended = [matcher.take(token) for token in tokens]
        goes_on = {word[len(text)] for word in words if word.startswith(text) and word != text}
        assert not any(ended[:-1])
        assert (ended or [False])[-1] == (not goes_on)
        if not goes_on:
            continue
        possible = {t for t in range(VOCAB) if spelled[t] and any(w.startswith(text + spelled[t]) for w in words)}
        possible |= {EOS} if text in words else set()
        (found,) = allowed(filler.mask([matcher], np.zeros(1, dtype=np.int64)))
        if len(goes_on) + (text in words) > 1:
            num_free += 1
            assert found == possible, text
        else:
            assert len(found) == 1, text
            assert found <= possible, text
        states += [(*tokens, token) for token in found - {EOS}]
    assert len(states) > len(words) / 2
    assert num_free


def test_masks_after_drafts_are_those_after_tokens(compiler: GrammarCompiler, filler: MaskFiller, tokenizer) -> None:
    """And the matchers stay where they were; rows after a refused draft are free."""
    wanted = StructuredOutputs.of({"regex": "[ab]{1,4}x|[0-9]+"})
    matchers = [compiler.matcher(wanted) for _ in range(3)]
    draft = [*tokenizer.encode("abbx"), 5]
    refused = [*tokenizer.encode("12"), *tokenizer.encode("a"), *tokenizer.encode("3")]
    first_S = np.array([0, len(draft) + 1, len(draft) + 2])
    for _ in range(2):
        before = filler._stats.filled_masks
        mask = filler.mask_with_drafts(matchers, [draft, [], refused], first_S)
        assert filler._stats.filled_masks - before == len(mask.row_M), "all of them are counted"
        assert mask.row_M.tolist() == list(range(len(draft) + 1 + 1 + len(refused) + 1))
        found = allowed(mask)
        for row in range(len(draft)):
            alone = compiler.matcher(wanted)
            is_whole = [alone.take(token) for token in draft[:row]]
            assert found[row] == ({EOS} if is_whole and is_whole[-1] else _next(filler, alone)), row
        assert found[len(draft) - 1] == {EOS}, "nothing follows the whole text"
        assert found[first_S[1]] == found[0] == _next(filler, compiler.matcher(wanted))
        assert found[first_S[2] + 3] == found[first_S[2] + 4] == set(range(VOCAB))


def test_a_place_that_forces_nothing_has_no_mask_before_a_token_is_refused(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer
) -> None:
    """From the first token on; what is refused and what is allowed is the same with the mask and without it."""
    given = ("[ab]{1,4}x|[0-9]+", "ab[a-z]", "[ab]{1,4}x|[0-9]+", "x")
    matchers = [compiler.matcher(StructuredOutputs.of({"regex": regex})) for regex in given]
    assert [matcher.is_open for matcher in matchers] == [True, False, True, False]
    mask, counts = filler.mask(matchers, np.array([1, 2, 4, 7])), filler._stats
    assert counts.filled_masks == 2
    for token in range(VOCAB):
        token_R = np.full(8, token)
        late = filler.mask(matchers, np.array([1, 2, 4, 7]))
        late.fill(np.arange(4))
        assert mask.refused(token_R).tolist() == late.refused(token_R).tolist()
    before = counts.filled_masks
    mask.also(np.array([4]), np.array([3]))
    assert counts.filled_masks == before + 1
    assert mask.refused(np.full(8, 3)).tolist() == [1, 2, 7]
    assert allowed(mask)[2] == allowed(mask)[0] | {3}


def _next(filler: MaskFiller, matcher) -> set[int]:
    return allowed(filler.mask([matcher], np.zeros(1, dtype=np.int64)))[0]


def test_a_mask_is_laid_on_its_own_rows_among_any(compiler: GrammarCompiler) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        num_rows, vocab = int(rng.integers(1, 9)), int(rng.choice([33, 64, 97]))
        row_M = np.flatnonzero(rng.random(num_rows) < 0.5)
        bits_MW = rng.integers(-(2**31), 2**31, (len(row_M), -(-97 // 32))).astype(np.int32)
        rows = np.flatnonzero(rng.random(num_rows) < 0.6)
        z_RV = torch.from_numpy(rng.normal(size=(len(rows), vocab)).astype(np.float32))
        expected = z_RV.clone()
        for place, row in enumerate(rows):
            for m in np.flatnonzero(row_M == row):
                for token in range(vocab):
                    if not int(bits_MW[m, token // 32]) >> (token % 32) & 1:
                        expected[place, token] = -np.inf
        TokenMask(row_M, bits_MW).apply(z_RV, rows)
        assert torch.equal(z_RV, expected)
