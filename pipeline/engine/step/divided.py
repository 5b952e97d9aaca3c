"""A completion in two: its reasoning, and its answer."""

from dataclasses import replace

from pipeline.engine.params import Completion
from pipeline.engine.reasoning.row_reasoning import RowReasoning
from pipeline.engine.reasoning.text_reasoning import TextReasoning
from pipeline.tokenization.tokenizer import Tokenizer


def divided(whole: Completion, reasoning: RowReasoning | TextReasoning, tokenizer: Tokenizer) -> Completion:
    """`whole`, whose text is that of all tokens up to its end, with the answer as its text. Blanks at the border fall
    away: around the reasoning and before the answer, as models write empty lines there."""
    if isinstance(reasoning, TextReasoning):
        thought, answer, num_tokens = reasoning.split(whole.token_ids, whole.text, tokenizer.decode)
        return whole if thought is None else _in_two(whole, thought, answer, num_tokens)
    thought_ids, answer_ids = reasoning.split(whole.token_ids)
    if thought_ids is None:
        return whole
    # A stop string or a last token that is no text cuts the end of the text, wherever the row is.
    num_cut = len(tokenizer.decode(whole.token_ids)) - len(whole.text)
    answer, thought = tokenizer.decode(answer_ids), tokenizer.decode(thought_ids)
    num_after = len(answer)  # characters after the thought
    if reasoning.markers.end_id in whole.token_ids:
        num_after += len(tokenizer.decode([reasoning.markers.end_id]))
    thought = _without_end(thought, max(num_cut - num_after, 0))
    return _in_two(whole, thought, _without_end(answer, num_cut), len(thought_ids))


def _in_two(whole: Completion, thought: str, answer: str, num_tokens: int) -> Completion:
    return replace(whole, text=answer.lstrip(), reasoning=thought.strip() or None, num_reasoning_tokens=num_tokens)


def _without_end(text: str, num_characters: int) -> str:
    return text[: max(len(text) - num_characters, 0)]
