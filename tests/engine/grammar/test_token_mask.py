"""Masks against brute force: the tokens that continue some text of the language."""

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
    """Return the tokens that stay finite when the mask is applied to logits."""
    z_RV = torch.zeros(len(mask.row_M), VOCAB)
    mask.apply(z_RV, mask.row_M)
    return [set(torch.isfinite(z_V).nonzero()[:, 0].tolist()) for z_V in z_RV]


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_is_what_brute_force_finds(name: str, tokenizer, compiler: GrammarCompiler, filler: MaskFiller) -> None:
    """If text is forced, llguidance allows one token, the one that encoding gives."""
    given, words = LANGUAGES[name]
    spelled = [tokenizer.decode([token]) for token in range(VOCAB)]
    wanted, states = StructuredOutputs.from_config(given), [()]
    num_free = 0
    for tokens in states:
        matcher = compiler.matcher(wanted)
        text = "".join(spelled[token] for token in tokens)
        ended = [matcher.advance(token) for token in tokens]
        next_characters = {word[len(text)] for word in words if word.startswith(text) and word != text}
        assert not any(ended[:-1])
        assert (ended or [False])[-1] == (not next_characters)
        if not next_characters:
            continue
        possible = {t for t in range(VOCAB) if spelled[t] and any(w.startswith(text + spelled[t]) for w in words)}
        possible |= {EOS} if text in words else set()
        (found,) = allowed(filler.mask([matcher], np.zeros(1, dtype=np.int64)))
        if len(next_characters) + (text in words) > 1:
            num_free += 1
            assert found == possible, text
        else:
            assert len(found) == 1, text
            assert found <= possible, text
        states += [(*tokens, token) for token in found - {EOS}]
    assert len(states) > len(words) / 2
    assert num_free
