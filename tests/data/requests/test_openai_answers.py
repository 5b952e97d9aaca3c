"""Rows as lines of OpenAI's Batch API: cases that jobs with a fake engine do not reach."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pipeline.data.requests.openai_answers import Answered
from pipeline.engine.completion import FinishReason
from pipeline.errors import RowError

ROW = {
    "custom_id": "a", "generated_text": "x", "finish_reason": "stop", "error": None, "error_message": None,
    "num_input_tokens": 5, "num_cached_tokens": 4, "num_generated_tokens": 1, "source_file": "f", "source_row": 0,
    "logprobs": None,
}  # fmt: skip
CHAT, TEXT = (Answered(endpoint, "m", 7, "0123abcd" * 8) for endpoint in ("chat", "text"))


def body(answered: Answered, **changed):
    kind = ChatCompletion if answered is CHAT else Completion
    return kind.model_validate(answered.line({**ROW, **changed})["response"]["body"], strict=True)


@pytest.mark.parametrize("answered", [CHAT, TEXT])
def test_every_finish_reason_is_one_of_the_api(answered):
    for reason in FinishReason.__args__:
        if reason != "error":
            got = body(answered, finish_reason=reason).choices[0].finish_reason
            assert got == ("stop" if reason == "stop" else "length")


@pytest.mark.parametrize("answered", [CHAT, TEXT])
def test_log_probabilities_that_are_not_finite(answered):
    low = {"token_id": 3, "logprob": float("-inf")}
    logprobs = body(answered, logprobs=[{**low, "top": [low]}]).choices[0].logprobs
    found = logprobs.content[0].logprob if answered is CHAT else logprobs.token_logprobs[0]
    assert found == -9999.0
    assert body(answered, logprobs=[{**low, "top": None}]).choices[0].logprobs is not None


@pytest.mark.parametrize("answered", [CHAT, TEXT])
def test_the_prompts_log_probabilities_are_a_field_as_in_vllm(answered):
    """The field is keyed by token id: next to the choices of a chat, in each choice of a text, if the output has it."""
    low, best = {"token_id": 3, "logprob": float("-inf")}, {"token_id": 5, "logprob": -0.25}
    logprobs = [None, {**low, "top": [best]}, {**best, "top": [best]}, {**best, "top": []}]
    row = {**ROW, "generated_text": ["x", "y"], "finish_reason": ["stop", "stop"]}
    found = answered.line({**row, "prompt_logprobs": logprobs})["response"]["body"]
    fifth = {"logprob": -0.25, "rank": 1, "decoded_token": None}
    expected = [
        None,
        {"3": {"logprob": -9999.0, "rank": None, "decoded_token": None}, "5": fifth},
        {"5": fifth},
        {"5": {**fifth, "rank": None}},
    ]
    holders = [found] if answered is CHAT else found["choices"]
    assert [holder["prompt_logprobs"] for holder in holders] == [expected] * len(holders)
    for without in (ROW, {**ROW, "prompt_logprobs": None}):
        assert "prompt_logprobs" not in str(answered.line(without))


def test_cached_tokens_are_in_the_usage():
    usage = body(CHAT).usage
    assert (usage.prompt_tokens, usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 6, 4)


@pytest.mark.parametrize("answered", [CHAT, TEXT])
def test_reasoning_is_a_field_next_to_the_answer_and_counted(answered):
    plain = body(answered)
    assert plain.usage.completion_tokens_details is None
    assert "reasoning" not in plain.model_dump_json()
    samples = {"generated_text": ["x", "", "y"], "finish_reason": ["stop", "length", "stop"],
               "reasoning": ["so", "so long", None], "num_reasoning_tokens": 9}  # fmt: skip
    found = body(answered, **samples)
    assert found.usage.completion_tokens_details.reasoning_tokens == 9
    holders = [choice.message if answered is CHAT else choice for choice in found.choices]
    assert [holder.reasoning for holder in holders] == samples["reasoning"]
    texts = [holder.content if answered is CHAT else holder.text for holder in holders]
    assert texts == ["x", None if answered is CHAT else "", "y"]
    single = body(answered, reasoning="so", num_reasoning_tokens=2).choices[0]
    assert (single.message if answered is CHAT else single).reasoning == "so"


def test_tool_calls_are_in_the_message():
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    samples = {"generated_text": ["", "x"], "finish_reason": ["stop", "stop"], "tool_calls": [json.dumps(calls), None]}
    first, second = body(CHAT, **samples).choices
    assert [call.model_dump() for call in first.message.tool_calls] == calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "x", None)
    (single,) = body(CHAT, generated_text="", tool_calls=json.dumps(calls)).choices
    assert single.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("code", list(RowError))
def test_a_failure_has_the_status_of_the_row_or_of_the_engine(code):
    answer = CHAT.line({**ROW, "error": str(code), "error_message": None, "generated_text": None})
    ours = ("kv_cache_exhausted", "out_of_memory", "token_out_of_vocabulary", "non_finite_logits", "engine_failure",
            "server_error")  # fmt: skip
    assert answer["response"]["status_code"] == (500 if code in ours else 400)
    assert answer["response"]["body"]["error"]["message"] == code


def test_ids_depend_on_the_row_and_the_job():
    other = [Answered("chat", "m", 7, "0" * 64).line(ROW), CHAT.line({**ROW, "source_row": 1})]
    assert len({line["id"] for line in [CHAT.line(ROW), *other]}) == 3
    assert CHAT.line(ROW) == CHAT.line(ROW)
