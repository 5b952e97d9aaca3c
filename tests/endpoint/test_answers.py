"""Answers of servers as completions: whole and streamed, usual and wrong."""

import base64
import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import numpy as np
import pytest

from pipeline.endpoint.answer import completion_of
from pipeline.endpoint.body import chat_body, completion_body, embedding_body
from pipeline.endpoint.errors import BadAnswer, Overloaded, Rejected, Reply
from pipeline.endpoint.spec import PATHS, EndpointRequest, base_url
from pipeline.endpoint.stream import StreamedAnswer
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import RowError
from tests.endpoint.fake_server import HTML, FakeServer, answer_text, embedding_vector, too_long_response

PROMPT = "11 22 33 44 55"
MARKERS = {"start": "<think>", "end": "</think>"}


def request(is_chat: bool = True, **params: Any) -> EndpointRequest:
    sampling = SamplingParams(**{"max_tokens": 8, **params})
    messages = [{"role": "user", "content": PROMPT}]
    body = chat_body(messages, sampling, {}) if is_chat else completion_body(PROMPT, sampling)
    return EndpointRequest(7, body, sampling)


def answer(*contents: str | dict[str, Any], reason: str = "stop", **fields: Any) -> bytes:
    """Return a chat's answer with these texts or messages."""
    messages = [content if isinstance(content, dict) else {"content": content} for content in contents]
    choices = [{"index": i, "message": message, "finish_reason": reason} for i, message in enumerate(messages)]
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    return json.dumps({"model": "m", "choices": choices, "usage": usage, **fields}).encode()


def completed(raw: bytes, **params: Any) -> Completion:
    return completion_of(Reply.parse(200, {}, raw), request(**params))


def lines_of(raw: bytes) -> Iterator[bytes]:
    """Yield an answer as server-sent events, each text in pieces of two characters."""
    whole = json.loads(raw)
    for choice in whole["choices"]:
        for key, text in choice["message"].items():
            for begin in range(0, len(text or ""), 2):
                piece = {"index": choice["index"], "delta": {key: text[begin : begin + 2]}, "finish_reason": None}
                yield f"data: {json.dumps({'model': 'm', 'choices': [piece]})}\n".encode()
                yield b"\n"
        yield b": a comment\n"
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield f"data: {json.dumps({'choices': [end]})}\n".encode()
    yield f"data: {json.dumps({'choices': [], 'usage': whole['usage']})}\n".encode()
    yield b"data: [DONE]\n"


def assembled(lines: Iterator[bytes] | list[bytes]) -> bytes:
    stream = StreamedAnswer()
    for line in lines:
        stream.add(line)
    return json.dumps(stream.answer()).encode()


@pytest.mark.parametrize(
    "params", [{}, {"n": 3, "seed": 5}, {"n": 2, "logprobs": 2}, {"max_tokens": 3}, {"logprobs": 0}]
)
def test_whole_and_streamed_answers_give_the_same_completion(params: dict[str, Any]):
    with FakeServer(cached_tokens=2) as server:
        for is_chat in True, False:
            sent = request(is_chat, temperature=1.0, **params)
            url = base_url(server.url)[0] + PATHS["chat" if is_chat else "completion"]
            replies: list[list[bytes]] = []
            for fields in {}, {"stream": True, "stream_options": {"include_usage": True}}:
                body = json.dumps({"model": "fake-model", **sent.body, **fields}).encode()
                with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
                    replies.append(list(reply))
            whole = completion_of(Reply.parse(200, {}, b"".join(replies[0])), sent)
            assert completion_of(Reply.parse(200, {}, assembled(replies[1])), sent) == whole
            limit, seed = sent.params.max_tokens, params.get("seed")
            assert [sample.text for sample in whole.each] == [
                answer_text(PROMPT, limit, index, seed) for index in range(sent.params.n)
            ]
            assert [sample.num_tokens for sample in whole.each] == [len(sample.text.split()) for sample in whole.each]
            assert (whole.num_prompt_tokens, whole.num_cached_tokens) == (5, 2)
            assert all(sample.num_cached_tokens == 5 for sample in whole.each[1:])  # the prompt is computed once
            assert whole.finish_reason == ("length" if "max_tokens" in params else "stop")
            if "logprobs" in params:
                assert whole.token_ids == [55, 44, 33, 22, 11]
                assert {len(token.top) for token in whole.logprobs or ()} == {params["logprobs"]}


def test_log_probabilities_that_name_tokens_by_text_are_refused():
    tokens = {"content": [{"token": "Paris", "logprob": -0.5, "top_logprobs": []}]}
    choice = {"index": 0, "message": {"content": "Paris"}, "finish_reason": "stop", "logprobs": tokens}
    with pytest.raises(BadAnswer, match="'Paris' by its text"):
        completed(answer(choices=[choice]), logprobs=1)
    with pytest.raises(BadAnswer, match="no log-probabilities"):
        completed(answer("Paris"), logprobs=1)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"reasoning_content": "Hm.", "content": " Yes"}, ("Hm.", "Yes")),
        ({"reasoning": "Hm.", "content": "Yes"}, ("Hm.", "Yes")),
        ({"content": "<think>\nHm.\n</think>\n\nYes"}, ("Hm.", "Yes")),
        ({"content": "Hm.</think>Yes"}, ("Hm.", "Yes")),  # the template wrote the start
        ({"content": "Yes"}, (None, "Yes")),
        ({"content": "<think> </think>Yes"}, (None, "Yes")),
    ],
    ids=str,
)
def test_reasoning_is_split_from_the_text(message: dict[str, Any], expected: tuple[str | None, str], is_streamed: bool):
    details = {"prompt_tokens": 5, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 3}}
    raw = answer(message, usage=details)
    done = completed(assembled(lines_of(raw)) if is_streamed else raw, reasoning=MARKERS)
    assert (done.reasoning, done.text) == expected
    assert done.num_reasoning_tokens == (3 if done.reasoning else 0)
    assert done.num_tokens == 4
    without = completed(raw)
    assert (without.reasoning, without.text) == (None, message["content"])


@pytest.mark.parametrize(
    "usage",
    [None, {}, "many", {"completion_tokens": 4}]
    + [{"prompt_tokens": 5, "completion_tokens": count} for count in (-1, "many", 2**31, True, None, 1.5)],
    ids=str,
)
def test_impossible_usage_is_not_counted(usage: object):
    done = completed(answer("Yes", "No", usage=usage), n=2, temperature=1.0)
    assert [sample.text for sample in done.each] == ["Yes", "No"]
    assert [sample.token_count for sample in done.each] == [None, None]
    assert (done.num_prompt_tokens, done.num_generated_tokens) == (0, 0)


def test_usage_above_max_tokens_is_counted():
    done = completed(
        answer("a" * 30, "b" * 10, usage={"prompt_tokens": 5, "completion_tokens": 400}), n=2, temperature=1.0
    )
    assert [sample.num_tokens for sample in done.each] == [300, 100]
    assert done.num_prompt_tokens == 5


def test_samples_share_the_counted_tokens():
    done = completed(
        answer("a" * 30, "b" * 10, "", usage={"prompt_tokens": 5, "completion_tokens": 9}), n=3, temperature=1.0
    )
    assert done.num_generated_tokens == 9
    assert [sample.num_tokens for sample in done.each] == [6, 3, 0]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (answer(choices=[{"index": 0, "text": "x", "finish_reason": "stop"}] * 2), r"choices \[0, 0\]"),
        (answer(choices=[]), r"choices \[\]"),
        (answer(choices=None), "unexpected form"),
        (answer({"content": ["x"]}), "unexpected form"),
        (answer({"content": "x", "reasoning": {"a": 1}}), "not a string"),
        (answer("x", reason="pause"), "finish_reason 'pause'"),
        (answer(error={"message": "no memory"}), "status 200: no memory"),
        *((raw, "is not") for raw in (HTML.encode(), b"", b"[1]", b'{"choices": [', b"\xff\xfe")),
    ],
)
def test_answers_of_another_form_are_bad(raw: bytes, message: str):
    with pytest.raises(BadAnswer, match=message):
        completed(raw, reasoning=MARKERS)


def test_lone_surrogates_are_replaced_and_split_ones_joined():
    assert completed(answer("a\ud83d b")).text == "a\ufffd b"
    halves = [{"index": 0, "delta": {"content": half}, "finish_reason": None} for half in ("\ud83d", "\ude00")]
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    lines = [f"data: {json.dumps({'choices': [choice]})}".encode() for choice in (*halves, end)]
    assert completed(assembled([*lines, b"data: [DONE]"])).text == "\U0001f600"


def test_content_filter_is_an_error_row():
    done = completed(answer("Ye", reason="content_filter"))
    assert (done.error, done.text) == (RowError.CONTENT_FILTER.value, "")


REFUSAL = {"role": "assistant", "content": None, "refusal": "I cannot\nhelp with that."}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_refusal_is_an_error_row(is_streamed: bool):
    for messages, is_refused in (([REFUSAL], True), (["Yes", REFUSAL], True), ([{**REFUSAL, "content": "Yes"}], False)):
        raw = answer(*messages)
        raw = assembled(lines_of(raw)) if is_streamed else raw
        done = completed(raw, n=len(messages), temperature=1.0)
        expected = (RowError.REFUSED.value, "I cannot help with that.") if is_refused else (None, None)
        assert (done.error, done.error_message) == expected
    assert completed(answer({"content": "Yes", "refusal": None})).error is None


def called(*calls: dict[str, Any]) -> bytes:
    return answer({"content": None, "tool_calls": [*calls]}, reason="tool_calls")


def call(name: str, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def test_tool_calls_are_kept_as_json():
    calls = [call("time", "{}"), call("weather", '{"city": "K\u00f6ln"}')]
    whole = completion_of(Reply.parse(200, {}, called(*calls)), request(), has_tools=True)
    assert (whole.text, whole.finish_reason, json.loads(whole.tool_calls or "")) == ("", "stop", calls)
    assert "K\u00f6ln" in (whole.tool_calls or "")
    parts = [
        call("weather", "", index=1),
        call("time", "{", index=0),
        {"index": 1, "function": {"arguments": '{"city": '}},
        {"index": 1, "function": {"arguments": '"K\u00f6ln"}'}},
        {"index": 0, "id": "call_time", "function": {"arguments": "}"}},
    ]
    pieces = [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None} for part in parts]
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    lines = [f"data: {json.dumps({'choices': [piece]})}".encode() for piece in (*pieces, end)]
    streamed = completion_of(Reply.parse(200, {}, assembled([*lines, b"data: [DONE]"])), request(), has_tools=True)
    assert sorted(json.loads(streamed.tool_calls or ""), key=lambda one: one["id"]) == calls
    with pytest.raises(BadAnswer, match=r"calls a tool, and server\.extra_body has no tools"):
        completed(called(*calls))
    assert completed(answer({"content": "Yes", "tool_calls": []})).text == "Yes"
    double = [{"tool_calls": [call(name, "{}", index=0)]} for name in ("time", "weather")]
    lines = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}".encode() for delta in double]
    with pytest.raises(BadAnswer, match="two tool calls with the same index"):
        completion_of(Reply.parse(200, {}, assembled([*lines, b"data: [DONE]"])), request(), has_tools=True)


def test_a_choice_with_an_error_is_a_bad_answer():
    choice = {"index": 0, "message": {"content": "Ye"}, "finish_reason": "error", "error": {"message": "upstream lost"}}
    with pytest.raises(BadAnswer, match="choice 0 of the answer failed: upstream lost"):
        completed(answer(choices=[choice]))
    end = {"index": 0, "delta": {}, "finish_reason": "error", "error": {"code": 502, "message": "upstream lost"}}
    with pytest.raises(BadAnswer, match="choice 0 of the answer failed: upstream lost"):
        completed(assembled([f"data: {json.dumps({'choices': [end]})}".encode(), b"data: [DONE]"]))


FILTERED = b'{"error": {"message": "triggered the content management policy.", "code": "content_filter"}}'
REJECTED = [
    *(
        (400, too_long_response(style, 9000, 4096, 16).body, "prompt_too_long")
        for style in ("openai", "vllm", "llama.cpp")
    ),
    (413, b"Request Entity Too Large", "prompt_too_long"),
    (400, FILTERED, "content_filter"),
    (400, b'{"error": {"message": "top_k: unknown field"}}', "invalid_request"),
    (422, b'{"detail": [{"loc": ["body"], "msg": "unknown field"}]}', "invalid_request"),
    # What an error echoes of the row is no cause.
    (422, b'{"detail": [{"msg": "unknown field", "input": "the context window and the content policy"}]}',
     "invalid_request"),
    (400, b'{"error": {"message": "invalid role for \'what is a context window?\'", "param": "messages"}}',
     "invalid_request"),
    (400, b'{"error": {"message": "bad image"}, "request": {"text": "a content_filter, too many tokens"}}',
     "invalid_request"),
    *((status, json.dumps(body).encode(), "prompt_too_long") for status, body in (
        (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 "
                        "`inputs` tokens and 16 `max_new_tokens`", "error_type": "validation"}),  # TGI
        (400, {"type": "error", "error": {"type": "invalid_request_error",
               "message": "prompt is too long: 200251 tokens > 200000 maximum"}}),  # Anthropic
        (400, [{"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "The input token count (1200000) "
                          "exceeds the maximum number of tokens allowed (1048576)."}}]),  # Gemini
        (400, {"code": "Client specified an invalid argument", "error": "This model's maximum prompt length is 131072 "
               "but the request contains 537812 tokens."}),  # xAI
        (400, {"message": "Input is too long for requested model."}),  # Bedrock
        (400, {"object": "error", "type": "BadRequestError", "code": 400, "message": "This model's maximum context "
               "length is 4096 tokens. However, you requested 5016 tokens in the messages."}),  # NIM
        (500, {"error": {"code": 500, "type": "server_error", "message": "context size has been exceeded"}}),
        (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}),
        (400, {"message": "Prompt contains 33000 tokens and 0 draft tokens, too large for model with 32768 maximum "
               "context length", "type": "invalid_request_error", "code": 3051}),  # Mistral
        (400, {"error": {"message": "litellm.ContextWindowExceededError: no", "code": "400"}}),
        (429, {"error": {"message": "Request too large for m on tokens per min (TPM): Limit 30000, Requested 50000",
                         "type": "tokens", "code": "rate_limit_exceeded"}}),  # it will never fit
        (200, {"object": "error", "message": "maximum context length is 4096 tokens", "code": 40303}),  # vLLM's worker
        (400, {"error": {"message": "Provider returned error", "code": 400, "metadata": {
               "raw": '{"error": {"message": "the prompt is too long"}}', "provider_name": "P"}}}),  # OpenRouter
    )),
    *((status, json.dumps(body).encode(), "content_filter") for status, body in (
        (403, {"error": {"code": 403, "message": "m requires moderation. Your input was flagged for violence."}}),
        (400, {"error": {"message": "no", "innererror": {"code": "ResponsibleAIPolicyViolation"}}}),  # Azure
        (400, {"error": {"code": "data_inspection_failed", "message": "Output data may contain ..."}}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("status", "raw", "code"), REJECTED)
def test_rejected_requests_are_error_rows(status: int, raw: bytes, code: str):
    reply = Reply.parse(status, {}, raw)
    done = completion_of(reply, request())
    assert (done.error, done.finish_reason, done.text, done.row_id) == (code, "error", "", 7)
    assert f"(status {status}): {reply.message}" in (done.error_message or "")


def header(given: str) -> str:
    """Return a header's text; a form of time and seconds become the time in as many seconds."""
    form, _, seconds = given.partition(" ")
    if not seconds:
        return given
    moment = datetime.now(UTC) + timedelta(seconds=float(seconds))
    forms = {"iso": moment.isoformat(), "http": format_datetime(moment, usegmt=True)}
    return forms.get(form) or f"{moment.timestamp() * (1000 if form == 'ms' else 1):.0f}"


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        *(({"Retry-After": text}, None) for text in ("soon", "-1", "nan", "inf")),
        ({"retry-after": "7"}, 7.0),
        ({"Retry-After": "7.5s"}, 7.5),
        ({"Retry-After": "http 90"}, 90.0),
        ({"Retry-After": "http -90"}, 0.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"x-ratelimit-reset-requests": "120ms", "x-ratelimit-reset-tokens": "1m30s"}, 0.12),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2s",
          "x-ratelimit-remaining-tokens": "900", "x-ratelimit-reset-tokens": "6m0s"}, 2.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "8h",
          "x-ratelimit-reset-tokens": "6m0s"}, 28800.0),
        ({"Retry-After": "3", "x-ratelimit-reset-tokens": "6m0s"}, 3.0),
        ({"X-RateLimit-Reset": "ms 90"}, 90.0),
        ({"x-ratelimit-reset": "s 90"}, 90.0),
        ({"anthropic-ratelimit-requests-reset": "iso 90"}, 90.0),
    ],
    ids=str,
)  # fmt: skip
def test_overload_is_no_error_of_the_row(headers: dict[str, str], wait_s: float | None):
    for status in (408, 425, 429, 502, 503, 504, 522, 529):
        sent = {name: header(text) for name, text in headers.items()}
        with pytest.raises(Overloaded, match="busy") as caught:
            completion_of(Reply(status, sent, {"error": "busy"}), request())
        assert caught.value.wait_s == (None if wait_s is None else pytest.approx(wait_s, abs=5 if wait_s > 60 else 0))


def test_googles_wait_is_found_in_its_details():
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}]
    quota = {"code": 429, "message": "You exceeded your current quota, please check your plan.", "details": details}
    with pytest.raises(Overloaded) as caught:
        completion_of(Reply(429, {}, {"error": quota}), request())
    assert caught.value.wait_s == 34.5


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, {"message": "You exceeded your current quota, please check your plan.", "code": "insufficient_quota"}),
        (400, {"type": "invalid_request_error", "message": "Your credit balance is too low to access the API."}),
        (402, {"message": "Insufficient Balance"}),
        (200, {"code": 402, "message": "This request requires more credits"}),
    ],
)
def test_a_server_that_is_paid_no_more_rejects_all(status: int, error: dict[str, Any]):
    with pytest.raises(Rejected) as caught:
        completion_of(Reply(status, {}, {"error": error}), request())
    assert caught.value.is_unpaid


def test_other_statuses_are_errors_of_the_server():
    for status in (401, 402, 403, 404, 405, 302, 500, 501):
        with pytest.raises(Rejected if 401 <= status <= 405 else BadAnswer, match="Welcome to the proxy"):
            completion_of(Reply.parse(status, {}, HTML.encode()), request())
    for code, kind in (429, Overloaded), (502, Overloaded), (401, Rejected), (500, BadAnswer):
        with pytest.raises(kind, match="no"):
            completion_of(Reply(200, {}, {"error": {"code": code, "message": "no"}}), request())


def test_messages_are_found_in_the_forms_of_servers():
    for form in (
        {"error": {"message": "no"}},
        {"error": "no"},
        {"message": "no"},
        {"detail": "no"},
        {"error": {"code": "no"}},
    ):
        assert Reply(400, {}, form).message == "no"
    assert Reply.parse(400, {}, b"").message == "(empty)"
    assert len(Reply.parse(400, {}, b"x\ny" * 10_000).message) == 500
    assert Reply(422, {}, {"detail": [{"loc": ["body", "n"], "msg": "too large"}]}).message == "body.n: too large"


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        *(({"finish_reason": name}, "stop") for name in ("eos_token", "stop_sequence", "end_turn", "STOP", "eos")),
        *(({"finish_reason": name}, "length") for name in ("model_length", "MAX_TOKENS", "length")),
        ({"finish_reason": None}, "stop"),
        ({"finish_reason": "content_filter: PROHIBITED_CONTENT"}, "error"),
        ({"finish_reason": "SAFETY"}, "error"),
        ({"message": {"content": PARTS}}, "stop"),
        ({"message": {"content": [{"type": "text", "text": "Y"}, {"type": "text", "text": "es"}]}}, "stop"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_dialects_of_an_answer(choice: dict[str, Any], expected: str, is_streamed: bool):
    """None has an index."""
    whole = {"message": {"content": "Yes"}, "finish_reason": "stop", **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    raw = json.dumps({"model": "m", "choices": [whole], "usage": usage}).encode()
    if is_streamed:
        content = whole["message"]["content"]
        pieces = [{"delta": {"content": content[i : i + 1]}, "logprobs": None} for i in range(len(content))]
        pieces.append({"delta": {}, "finish_reason": whole["finish_reason"]})
        lines = [f"data: {json.dumps({'choices': [piece]})}\n".encode() for piece in pieces]
        again = json.dumps({"choices": [pieces[-1]], "usage": usage}, indent=1).splitlines()
        ends = [b"data: [DONE]\n"] if whole["finish_reason"] is None else []
        raw = assembled([*lines, b"data:\n", *(f"data: {line}\n".encode() for line in again), b"\n", *ends])
    done = completed(raw, reasoning=MARKERS)
    assert (done.finish_reason, done.text) == (expected, "" if expected == "error" else "Yes")
    assert done.reasoning == ("Hm." if "message" in choice and choice["message"]["content"] is PARTS else None)
    assert completed(answer("Yes", reason=None), max_tokens=4).finish_reason == "length"  # type: ignore[arg-type]


def test_a_call_of_a_function_in_the_former_form():
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    whole = {"message": {"content": None, "function_call": call}, "finish_reason": "function_call"}
    pieces = [{"function_call": {"name": "weather", "arguments": ""}}, *(
        {"function_call": {"arguments": text}} for text in ('{"city": ', '"Rome"}'))]  # fmt: skip
    lines = [f"data: {json.dumps({'choices': [{'delta': piece}]})}".encode() for piece in pieces]
    end = {"choices": [{"delta": {}, "finish_reason": "function_call"}]}
    streamed = assembled([*lines, f"data: {json.dumps(end)}".encode()])
    for raw in json.dumps({"choices": [whole]}).encode(), streamed:
        done = completion_of(Reply.parse(200, {}, raw), request(), has_tools=True)
        assert json.loads(done.tool_calls or "") == [{"type": "function", "function": call}]


def test_log_probabilities_may_begin_with_null():
    first = {"content": None, "refusal": None}
    tokens = [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": []}]
    pieces = [(None, "", None), (first, "", None), ({"content": tokens}, "Yes", None), (None, "", "stop")]
    lines = [
        f"data: {json.dumps({'choices': [{'delta': {'content': t}, 'logprobs': p, 'finish_reason': r}]})}".encode()
        for p, t, r in pieces
    ]
    assert completed(assembled(lines), logprobs=0).token_ids == [7]


STREAM = list(lines_of(answer("Yes")))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (STREAM[:-3], "cut off"),
        ([], "cut off"),
        ([STREAM[0], b'data: {"error": {"message": "no memory"}}'], "no memory"),
        ([b"data: {broken"], "not JSON"),
        ([b"data: {broken", b"\n"], "not JSON"),
        ([b'data: {"object": "error", "message": "no memory"}'], "no memory"),
        ([*STREAM[:-1], *STREAM], "continued after its end"),
        ([b'data: {"choices": [7]}', STREAM[-1]], "unexpected form"),
        ([b"data: 7", STREAM[-1]], "unexpected form"),
    ],
    ids=str,
)
def test_broken_streams_are_bad_answers(lines: list[bytes], message: str):
    with pytest.raises(BadAnswer, match=message):
        completed(assembled(lines))


def test_embeddings_have_the_requested_length():
    sent = EndpointRequest(7, embedding_body("some text", 4), SamplingParams())
    vector = embedding_vector("some text", 4)

    def embedded(*vectors: object) -> Completion:
        data = [{"index": i, "embedding": value} for i, value in enumerate(vectors)]
        return completion_of(Reply(200, {}, {"data": data, "usage": {"prompt_tokens": 2}}), sent)

    done = embedded(vector)
    assert np.array_equal(done.result.values, np.float32(vector))
    assert done.num_prompt_tokens == 2
    for other in (base64.b64encode(np.float32(vector).tobytes()).decode(), [vector]):
        assert np.array_equal(embedded(other).result.values, np.float32(vector))
    for wrong in (
        (vector[:3],),
        (vector, vector),
        (),
        ("AAAA",),
        ([*vector[:3], float("nan")],),
        ([None] * 4,),
        ("?",),
    ):
        with pytest.raises(BadAnswer):
            embedded(*wrong)
