"""Lines of OpenAI's Batch API as requests: accepted fields, and fields that are refused by name."""

import json
import re

import pytest

from pipeline.data.requests.input_checks import Requests
from pipeline.data.requests.openai_batch import ENDPOINTS, heading, request
from pipeline.data.requests.request_row import NoRequest, request_schema

MESSAGES = [{"role": "user", "content": "Why? äöü 🙂"}]


def chat(**body) -> dict:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    return {**line, "body": {"model": "m", "messages": MESSAGES, **body}}


def text(**body) -> dict:
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "Once", **body},
    }


def embedding(**body) -> dict:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    return {**line, "body": {"model": "m", "input": "Once", **body}}


def test_a_chat_becomes_its_messages_and_parameters():
    """The example of the API's reference has every field that has a column."""
    got = request(
        chat(max_tokens=7, temperature=0, top_p=0.5, stop="END", seed=3, presence_penalty=1, frequency_penalty=0.5,
             top_k=20, min_p=0.1, repetition_penalty=1.1, min_tokens=1, stop_token_ids=[5], ignore_eos=True,
             logprobs=True, top_logprobs=2, n=1, stream=False, user="u", metadata={"k": "v"}, store=True),
        "chat",
    )  # fmt: skip
    assert got.refused is None
    assert json.loads(got.prompt or "") == MESSAGES
    assert got.parameters == {
        "max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "stop": ["END"], "seed": 3, "presence_penalty": 1.0,
        "frequency_penalty": 0.5, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
        "stop_token_ids": [5], "ignore_eos": True, "logprobs": 2, "n": 1,
    }  # fmt: skip
    assert got.row("chat").keys() <= {*request_schema("chat").names}
    assert heading(chat(user="u", stream=True)).ignored == ("stream", "user")
    assert [heading(chat(prompt_logprobs=n)).prompt_logprobs for n in (None, 0, 2)] == [False, True, True]
    assert [heading(chat(n=n)).samples for n in (None, 1, "2", 2, 3.0)] == [False, False, False, True, True]


# The default values of vLLM's request classes.
OFF_VALUES = {
    "top_k": -1, "min_p": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "n": 1,
    "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False, "stop": [], "stop_token_ids": [],
}  # fmt: skip
OFF_IN_VLLM = OFF_VALUES | {
    "max_tokens": None, "seed": -1, "logprobs": None, "prompt_logprobs": None, "logit_bias": None, "stream": False,
    "use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "bad_words": [], "echo": False, "priority": 0, "request_id": "a",
    "return_tokens_as_token_ids": False, "return_token_ids": False, "vllm_xargs": {}, "structured_outputs": None,
}  # fmt: skip
OF_CHATS_OFF_IN_VLLM = {
    "logprobs": False, "top_logprobs": 0, "add_special_tokens": False, "add_generation_prompt": True,
    "continue_final_message": False, "chat_template_kwargs": {}, "include_reasoning": True, "documents": [],
}  # fmt: skip


@pytest.mark.parametrize(("line", "endpoint", "parameters"), [
    (chat(max_completion_tokens=9, max_tokens=5), "chat", {"max_tokens": 9}),
    (chat(logprobs=True), "chat", {"logprobs": 0}),
    (chat(logprobs=False, top_logprobs=0), "chat", {}),
    (chat(temperature=None, tools=None, response_format={"type": "text"}, tools_choice=None), "chat", {}),
    (chat(stop=["a", "b"], max_tokens=4.0), "chat", {"stop": ["a", "b"], "max_tokens": 4}),
    (chat(seed=-2), "chat", {"seed": 2**63 - 2}),
    (chat(seed=-1), "chat", {}),
    (chat(**OFF_IN_VLLM), "chat", OFF_VALUES),
    (text(**OFF_IN_VLLM, add_special_tokens=True), "text", OFF_VALUES),
    (chat(**OF_CHATS_OFF_IN_VLLM), "chat", {}),
    (chat(thinking_token_budget=0, reasoning_effort=None), "chat", {"thinking_token_budget": 0}),
    (chat(tools=[], logit_bias={}, tool_choice="none"), "chat", {}),
    (chat(n=3.0), "chat", {"n": 3}),
    (text(n=1), "text", {"n": 1}),
    (text(logprobs=3, echo=False, best_of=1, suffix=None), "text", {"logprobs": 3}),
    (text(prompt=["Once"]), "text", {}),
    (text(prompt_logprobs=0), "text", {"prompt_logprobs": 0}),
])  # fmt: skip
def test_parameters_and_values_without_an_effect(line, endpoint, parameters):
    got = request(line, endpoint)
    assert (got.refused, got.parameters) == (None, parameters)


REFUSED = [
    (chat(n="2"), r"body\.n: expected an integer, got '2'"),
    (chat(n=True), r"body\.n: "),
    (chat(tools=[{}]), r"body\.tools: "),
    (chat(audio={"voice": "x"}), r"body\.audio: not supported; got an object of 1"),
    (chat(frobnicate=1), r"body\.frobnicate: unknown field for /v1/chat/completions"),
    (chat(**{"x" * 10_000: 1}), r"body\.x{80}: "),
    (chat(prompt="x"), r"body\.prompt: unknown field for /v1/chat"),
    (chat(reasoning_effort="low"), r"body\.reasoning_effort: unknown field.*thinking_token_budget"),
    (chat(thinking_token_budget="low"), r"body\.thinking_token_budget: expected an integer"),
    (chat(chat_template_kwargs={"a": 1}), r"body\.chat_template_kwargs.*prompt\.chat\.chat_template_kwargs in"),
    (chat(prompt_logprobs=True), r"body\.prompt_logprobs: expected an integer, got True"),
    (chat(max_tokens="5"), r"body\.max_tokens: expected an integer, got '5'"),
    (chat(max_tokens=True), r"body\.max_tokens: expected an integer, got True"),
    (chat(max_tokens=1.5), r"body\.max_tokens: expected an integer"),
    (chat(max_tokens=2**63), r"body\.max_tokens: expected an integer"),
    (chat(max_tokens=10**400), r"body\.max_tokens: expected an integer"),
    (chat(temperature="hot"), r"body\.temperature: expected a number"),
    (chat(stop=[1]), r"body\.stop: expected a text or a list of texts"),
    (chat(stop_token_ids=7), r"body\.stop_token_ids: expected a list of integers"),
    (chat(ignore_eos=1), r"body\.ignore_eos: expected true or false"),
    (chat(logprobs=5), r"body\.logprobs: expected true or false"),
    (chat(top_logprobs=5), r"body\.top_logprobs: requires body\.logprobs: true"),
    (chat(model=5), r"body\.model: expected text"),
    (chat(messages=[]), r"body\.messages: expected a list of messages"),
    (chat(messages=None), r"body\.messages: "),
    (chat(messages=[{"role": "user", "content": ["x"]}]), r"body\.messages\[0\]: content\[0\] is a part without a"),
    (chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "audio": {"id": "a"}}]),
     r"body\.messages\[1\]: audio; only text is supported"),
    (chat(messages=[{"role": "user"}]), r"body\.messages\[0\]: content is neither text nor text parts"),
    (chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]),
     r"body\.messages\[0\]: tool_calls\[0\]\.function\.arguments: expected a JSON object as text"),
    (chat(continue_final_message=True), r"body\.continue_final_message: not supported; expected false.*prompt\.chat"),
    (chat(continue_final_message=False, messages=[*MESSAGES, {"role": "assistant", "content": "Well"}]),
     r"body\.continue_final_message: false, but the last message is an assistant's.*prompt\.chat"),
    (chat(use_beam_search=True), r"body\.use_beam_search: not supported; expected false, got True"),
    (chat(add_special_tokens=True), r"body\.add_special_tokens: not supported; expected false"),
    (text(add_special_tokens=False), r"body\.add_special_tokens: not supported; expected true"),
    (text(prompt=["a", "b"]), r"body\.prompt: expected one text, got a list of 2"),
    (text(prompt=[1, 2]), r"body\.prompt: expected one text, got a list of 2; token ids are not supported"),
    (text(prompt=[5]), r"body\.prompt: expected one text, got 5; token ids are not supported"),
    (text(temperature=float("nan")), r"body\.temperature: expected a number, got nan"),
    (text(top_p=float("inf")), r"body\.top_p: expected a number, got inf"),
    (text(suffix="x"), r"body\.suffix: "),
    (embedding(input=["a", "b"]), r"body\.input: expected one text, got a list of 2; write one line per text"),
    (embedding(input=[5, 7]), r"body\.input: expected one text, got a list of 2; token ids"),
    (embedding(input=None), r"body\.input: expected one text, got None$"),
    (embedding(encoding_format="int8"), r"body\.encoding_format: expected float or base64, got 'int8'"),
    (embedding(temperature=0), r"body\.temperature: unknown field for /v1/embeddings"),
    (chat(dimensions=8), r"body\.dimensions: unknown field for /v1/chat/completions"),
    (text(messages=MESSAGES), r"body\.messages: unknown field for /v1/completions"),
    ({**chat(), "body": None}, r"body: expected an object, got nothing"),
    ({**chat(), "body": "x" * 10_000}, r"body: expected an object, got 'x{80}'\.\.\."),
    ({**chat(), "method": "GET"}, r"method: expected POST, got 'GET'"),
    ({**chat(), "url": "/v1/chat"}, r"url: expected /v1/chat/completions, /v1/completions, /v1/embeddings, got"),
    ({**chat(), "url": ["/v1/chat/completions"]}, r"url: expected"),
    ({**chat(), "extra": 1}, r"'extra': unknown field of a line"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_a_row_is_refused_by_the_name_of_a_field(line, message):
    row = Requests(ENDPOINTS.get(str(line["url"]), "chat")).row(line)
    assert {name for name, value in row.items() if value is not None} == {"custom_id", "refused"}
    assert row["custom_id"] == "a"
    assert re.match(message, row["refused"])
    assert len(row["refused"]) < 300


@pytest.mark.parametrize("form", [
    "/{}", "{}", "/v1/{}", "v1/{}", "/v1/{}/", "/{}/", "/openai/v1/{}", "/openai/deployments/my-gpt/{}?api-version=1",
    "https://api.openai.com/v1/{}", "http://localhost:8000/v1/{}/", "https://x.example/{}",
    "https://x.openai.azure.com/openai/deployments/my-gpt/{}?api-version=2024-10-21",
])  # fmt: skip
@pytest.mark.parametrize("make", [chat, text, embedding])
def test_a_url_may_have_the_forms_of_other_services(make, form):
    line = make()
    endpoint = ENDPOINTS[line["url"]]
    line["url"] = form.format(line["url"].removeprefix("/v1/"))
    assert heading(line).endpoint == endpoint
    assert request(line, endpoint).refused is None


@pytest.mark.parametrize("url", [
    "/v1/chat", "/v1/other/completions", "/v1chat/completions", "/xchat/completions", "/v1/embeddings2", "", None,
    "https://", "https://completions", "/v1/chat/completions/x", "ftp://x/v1/embeddings", "https://x.example/v1/xcompletions",
])  # fmt: skip
def test_a_url_of_another_endpoint_has_none(url):
    assert heading({**chat(), "url": url}).endpoint is None


def test_a_row_with_missing_fields_has_no_values():
    row = Requests("chat").row({})
    assert row == {"custom_id": None, "messages": None, "refused": "method: expected POST, got None"}


@pytest.mark.parametrize(("line", "message"), [
    ({}, "no custom_id"),
    ({"custom_id": ""}, "no custom_id"),
    ({"custom_id": 5}, "custom_id is 5, expected text"),
    ({"custom_id": {"a": 1}}, "custom_id is an object of 1"),
    ({"custom_id": "a", "url": "/v1/responses"}, "url '/v1/responses' is not supported; expected /v1/chat"),
    ({"custom_id": "a", "url": "/responses/"}, "url '/responses/' is not supported"),
    ({"custom_id": "a", "url": "https://api.openai.com/v1/images/edits"}, "url 'https://.*' is not supported"),
    (embedding(dimensions="4"), r"body\.dimensions: expected an integer of at least 1, got '4'"),
])  # fmt: skip
def test_the_whole_input_is_refused(line, message):
    with pytest.raises(NoRequest, match=message):
        heading(line)


def test_a_response_format_is_kept_as_json_and_text_means_none():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert json.loads(request(chat(response_format=form), "chat").parameters["response_format"]) == form
    assert "response_format" not in request(chat(response_format={"type": "text"}), "chat").parameters
