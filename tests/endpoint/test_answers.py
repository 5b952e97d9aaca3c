"""Answers of servers as completions: whole and streamed, usual and wrong."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipeline.endpoint.answer import BadAnswer, Overloaded, Rejected, StreamedAnswer, completion_of, message_of
from pipeline.endpoint.body import chat_body, completion_body, embedding_body
from pipeline.endpoint.spec import PATHS, EndpointRequest, base_url
from pipeline.engine.params import Completion, SamplingParams
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
    return completion_of(200, {}, raw, request(**params))


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
    return stream.raw()


@pytest.mark.parametrize(
    "params", [{}, {"n": 3, "seed": 5}, {"n": 2, "logprobs": 2}, {"max_tokens": 3}, {"logprobs": 0}]
)
def test_whole_and_streamed_answers_give_the_same_completion(params: dict[str, Any]):
    with FakeServer(cached_tokens=2) as server:
        for is_chat in True, False:
            sent = request(is_chat, temperature=1.0, **params)
            url = base_url(server.url) + PATHS["chat" if is_chat else "completion"]
            replies: list[list[bytes]] = []
            for fields in {}, {"stream": True, "stream_options": {"include_usage": True}}:
                body = json.dumps({"model": "fake-model", **sent.body, **fields}).encode()
                with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
                    replies.append(list(reply))
            whole = completion_of(200, {}, b"".join(replies[0]), sent)
            assert completion_of(200, {}, assembled(replies[1]), sent) == whole
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
        (answer({"content": ["x"]}), "not a string"),
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
    whole = completion_of(200, {}, called(*calls), request(), has_tools=True)
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
    streamed = completion_of(200, {}, assembled([*lines, b"data: [DONE]"]), request(), has_tools=True)
    assert sorted(json.loads(streamed.tool_calls or ""), key=lambda one: one["id"]) == calls
    with pytest.raises(BadAnswer, match=r"calls a tool, and server\.extra_body has no tools"):
        completed(called(*calls))
    assert completed(answer({"content": "Yes", "tool_calls": []})).text == "Yes"
    double = [{"tool_calls": [call(name, "{}", index=0)]} for name in ("time", "weather")]
    lines = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}".encode() for delta in double]
    with pytest.raises(BadAnswer, match="two tool calls with the same index"):
        completion_of(200, {}, assembled([*lines, b"data: [DONE]"]), request(), has_tools=True)


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
]


@pytest.mark.parametrize(("status", "raw", "code"), REJECTED)
def test_rejected_requests_are_error_rows(status: int, raw: bytes, code: str):
    done = completion_of(status, {}, raw, request())
    assert (done.error, done.finish_reason, done.text, done.row_id) == (code, "error", "", 7)
    assert f"(status {status}): {message_of(raw)}" in (done.error_message or "")


@pytest.mark.parametrize(("header", "wait_s"), [(None, None), ("7", 7.0), ("soon", None), ("-1", None), ("nan", None)])
def test_overload_is_no_error_of_the_row(header: str | None, wait_s: float | None):
    for status in (408, 425, 429, 503, 529):
        with pytest.raises(Overloaded, match="busy") as caught:
            completion_of(status, {"Retry-After": header} if header else {}, b'{"error": "busy"}', request())
        assert caught.value.wait_s == wait_s


def test_other_statuses_are_errors_of_the_server():
    for status in (401, 402, 403, 404, 405, 204, 302, 500, 502, 504):
        with pytest.raises(Rejected if 401 <= status <= 405 else BadAnswer, match="Welcome to the proxy"):
            completion_of(status, {}, HTML.encode(), request())


def test_messages_are_found_in_the_forms_of_servers():
    for form in (
        {"error": {"message": "no"}},
        {"error": "no"},
        {"message": "no"},
        {"detail": "no"},
        {"error": {"code": "no"}},
    ):
        assert message_of(json.dumps(form).encode()) == "no"
    assert message_of(b"") == "(empty)"
    assert len(message_of(b"x\ny" * 10_000).splitlines()[0]) == 500


STREAM = list(lines_of(answer("Yes")))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (STREAM[:-1], "cut off"),
        ([], "cut off"),
        ([STREAM[0], b'data: {"error": {"message": "no memory"}}'], "no memory"),
        ([b"data: {broken"], "not JSON"),
        ([*STREAM[:-1], *STREAM], "twice"),
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
        return completion_of(200, {}, json.dumps({"data": data, "usage": {"prompt_tokens": 2}}).encode(), sent)

    done = embedded(vector)
    assert np.array_equal(done.result.values, np.float32(vector))
    assert done.num_prompt_tokens == 2
    for wrong in ((vector[:3],), (vector, vector), (), ("AAAA",), ([*vector[:3], float("nan")],), ([None] * 4,)):
        with pytest.raises(BadAnswer):
            embedded(*wrong)
