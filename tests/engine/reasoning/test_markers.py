"""Markers of a checkpoint's tokenizer, prompts that open reasoning, and the division of texts."""

from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pipeline.engine.completion import Completion
from pipeline.engine.reasoning.markers import MarkerTokens, ReasoningMarkers, find_markers, marker_tokens
from pipeline.engine.reasoning.tracking import RowReasoning, TextReasoning
from pipeline.engine.step.output_processor import split_reasoning
from pipeline.errors import ConfigError
from pipeline.tokenization.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
    "{% if thinks %}<think>\n{% elif thinks is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer_with(*added: str, is_special: bool = False) -> Tokenizer:
    """Build a tokenizer of single characters and these added tokens."""
    pieces = [chr(code) for code in range(0x21, 0x7F)] + ["\u0120", "\u010a"]  # byte-level's blank and line feed
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(text, special=is_special, normalized=False) for text in added])
    return Tokenizer(backend, name="small", eos_token_ids=frozenset(), digest="", chat_template=TEMPLATE)


@pytest.mark.parametrize("is_special", [False, True])
def test_auto_finds_the_tokenizers_markers_and_prompts_decide_whether_a_row_begins_reasoning(is_special: bool) -> None:
    tokenizer = tokenizer_with("[THINK]", "<think>", "</think>", is_special=is_special)
    assert find_markers("auto", tokenizer) == ReasoningMarkers("<think>", "</think>")
    magistral = tokenizer_with("[THINK]", "[/THINK]", "<think>")
    assert find_markers("auto", magistral) == ReasoningMarkers("[THINK]", "[/THINK]")
    gemma4 = tokenizer_with("<|channel>", "<channel|>", is_special=is_special)
    assert find_markers("auto", gemma4) == ReasoningMarkers("<|channel>", "<channel|>")
    markers = marker_tokens("auto", tokenizer)
    assert isinstance(markers, MarkerTokens)
    assert markers == MarkerTokens(tokenizer.added_tokens["<think>"], tokenizer.added_tokens["</think>"])
    try:
        for content in ("why", "what does <think> do", "a <think> b </think> c"):  # text of data is no marker
            for kwargs, is_open in (({"thinks": True}, True), ({"thinks": False}, False), ({}, False)):
                ids = tokenizer.encode_chat([{"role": "user", "content": content}], template_kwargs=kwargs)
                row = RowReasoning.after(np.array(ids), markers, 5, False)
                assert (row.is_open, row.thinking_deadline(len(ids))) == (is_open, len(ids) + 5 + (not is_open))
    finally:
        tokenizer.close()


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    ("is_open", "text", "cut", "reasoning", "answer", "num_tokens"),
    [
        (True, "\nso\n</think>\n\n yes \n", 0, "so", "yes \n", 4),
        (False, "<think>\nso</think>yes", 0, "so", "yes", 3),
        (True, "<think>so</think>yes", 0, "so", "yes", 2),  # opened twice
        (False, "<think>\n\n</think>\nyes", 0, None, "yes", 2),
        (True, "so long", 0, "so long", "", 7),
        (False, "<think>so long", 0, "so long", "", 7),
        (False, " yes <think> no", 0, None, " yes <think> no", 0),
        (False, "so</think>yes", 0, "so", "yes", 2),  # opened by unknown words
        (True, "so</think>yes</think>no", 0, "so", "yes</think>no", 2),
        (True, "so</think>\nyes!!", 2, "so", "yes", 2),  # a stop string
        (True, "so long!!", 2, "so long", "", 9),
    ],
)
def test_a_completion_is_divided_at_its_markers(
    is_special: bool, is_open: bool, text: str, cut: int, reasoning: str | None, answer: str, num_tokens: int
) -> None:
    tokenizer = tokenizer_with("<think>", "</think>", is_special=is_special)
    ids = tokenizer._parsing.encode(text, add_special_tokens=False).ids
    shown = tokenizer.decode(ids)
    if is_special:  # special tokens are no text
        answer = answer.replace("<think>", "").replace("</think>", "")
    whole = Completion(0, ids, shown[: len(shown) - cut], "stop", 1)
    markers = marker_tokens("auto", tokenizer)
    assert isinstance(markers, MarkerTokens)
    found = split_reasoning(whole, RowReasoning(markers, is_open), tokenizer.decode)
    assert (found.reasoning, found.text, found.num_reasoning_tokens) == (reasoning, answer, num_tokens)
    assert found.token_ids == ids
    if is_special:
        return
    without = tokenizer_with()  # here each character of a marker is a token
    texts = ReasoningMarkers("<think>", "</think>")
    assert marker_tokens(texts, without) == texts
    whole = replace(whole, token_ids=without.encode(text))
    found = split_reasoning(whole, TextReasoning(texts, is_open), without.decode)
    num_tokens -= cut if not answer and reasoning else 0  # the tokens of a stop string are no reasoning here
    assert (found.reasoning, found.text, found.num_reasoning_tokens) == (reasoning, answer, num_tokens)


@pytest.mark.parametrize(
    ("is_special", "text", "stop", "reasoning"),
    [
        (False, "<think>abcd", ">abcd", None),  # begins in the start marker: nothing is left
        (True, "<think>so!</think>?", "!?", "so"),
        (False, "<think>so!</think>?", "!</think>?", "so"),
        (False, "<think>so!</think>?", "</think>?", "so!"),
    ],
)
def test_a_stop_string_that_reaches_into_a_marker(
    is_special: bool, text: str, stop: str, reasoning: str | None
) -> None:
    tokenizer = tokenizer_with("<think>", "</think>", is_special=is_special)
    ids = tokenizer._parsing.encode(text, add_special_tokens=False).ids
    shown = tokenizer.decode(ids)
    assert shown.endswith(stop)
    markers = marker_tokens("auto", tokenizer)
    assert isinstance(markers, MarkerTokens)
    whole = Completion(0, ids, shown.removesuffix(stop), "stop", 1)
    found = split_reasoning(whole, RowReasoning(markers, False), tokenizer.decode)
    assert (found.reasoning, found.text) == (reasoning, "")


def test_markers_within_tokens_are_found_in_the_text() -> None:
    pieces = ["<th", "ink", ">\n", "so", " it", " is</", "think", ">yes", "Once", " ", "<think", ">"]

    def decode(ids) -> str:
        return "".join(pieces[i] for i in ids)

    def after(*prompt: int) -> TextReasoning:
        return TextReasoning.after(np.array(prompt, dtype=np.int64), markers, decode)

    markers = ReasoningMarkers("<think>", "</think>")
    for prompt, is_open in (([8], False), ([8, 0, 1, 2], True), ([10, 11, 9], True), ([10, 11, 8], False), ([], False)):
        assert after(*prompt).is_open == is_open, prompt
    ids = [0, 1, 2, 3, 4, 5, 6, 7]
    assert after(8).split(ids, decode(ids), decode) == ("\nso it is", "yes", 2)
    assert after(8, 0, 1, 2).split(ids[3:], decode(ids[3:]), decode) == ("so it is", "yes", 2)
    assert after(8).split(ids[:5], decode(ids[:5]), decode) == ("\nso it", "", 2)
    assert after(8).split([8, 0, 1], "Once<think", decode) == (None, "Once<think", 0)
    blanks = TextReasoning(ReasoningMarkers("\n<think>\n", "</think>"), False)
    assert blanks.split(ids, decode(ids), decode) == ("\nso it is", "yes", 2), "blanks around the start do not matter"


def test_a_special_token_and_blanks_are_no_text_to_look_for() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.reasoning\.start = ' \\n ': whitespace of several tokens"):
        find_markers(ReasoningMarkers(" \n ", "So much for that."), tokenizer_with())
    special = tokenizer_with("<think>", is_special=True)
    with pytest.raises(ConfigError, match=r"sampling\.reasoning\.start = '<think>': is a special token"):
        find_markers(ReasoningMarkers("<think>", "So much for that."), special)
    in_words = ReasoningMarkers("<think>", "So much for that.")
    assert find_markers(in_words, tokenizer_with("<think>")) == in_words, "an added token that is text"
