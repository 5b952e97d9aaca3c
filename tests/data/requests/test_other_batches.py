"""Lines of Anthropic's and of Amazon's batches as requests, and rows as what these deliver: shapes of their pages."""

import json
import re

import pytest

from pipeline.data.requests import anthropic_batch, bedrock_batch
from pipeline.data.requests.input_checks import Requests
from pipeline.data.requests.openai_answers import Answered
from pipeline.data.requests.request_row import NoRequest, RequestFormat
from pipeline.data.source import open_source
from pipeline.errors import InputError, OutputError
from tests.data.requests.test_openai_answers import ROW

CHATS = [{"role": "user", "content": "Hello, world"}]


def params(**more) -> dict:
    """The example of Anthropic's page on batches."""
    return {"custom_id": "a", "params": {"model": "claude", "max_tokens": 1024, "messages": CHATS, **more}}


def converse(**more) -> dict:
    """The example of Amazon's page on the data of batches, of the type Converse."""
    return {"recordId": "a", "modelInput": {"messages": [{"role": "user", "content": [{"text": "Hello"}]}], **more}}


def llama(**more) -> dict:
    return {"recordId": "a", "modelInput": {"prompt": "Once", **more}}


FORM: dict[object, RequestFormat] = {params: "anthropic-batch", converse: "bedrock-batch", llama: "bedrock-batch"}
GIVEN = [
    (params, {}, CHATS, {"max_tokens": 1024}),
    (
        params,
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "temperature": 0,
         "top_p": 0.5, "top_k": 4, "stop_sequences": ["END"], "tools": [], "thinking": {"type": "disabled"},
         "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "metadata": {"user_id": "u"}, "stream": False},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}],
        {"max_tokens": 1024, "temperature": 0.0, "top_p": 0.5, "top_k": 4, "stop": ["END"]},
    ),
    (params, {"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHATS], {"max_tokens": 1024}),
    (converse, {}, [{"role": "user", "content": "Hello"}], {}),
    (
        converse,
        {"system": [{"text": "Be brief."}, {"cachePoint": {"type": "default"}}], "requestMetadata": {"k": "v"},
         "inferenceConfig": {"maxTokens": 9, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]}},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["END"]},
    ),
    (llama, {"temperature": 0.5, "top_p": 0.9, "max_gen_len": 512}, "Once",
     {"temperature": 0.5, "top_p": 0.9, "max_tokens": 512}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "more", "prompt", "parameters"), GIVEN)
def test_a_line_is_its_prompt_and_its_own_values(make, more, prompt, parameters):
    reader = anthropic_batch if make is params else bedrock_batch
    got = reader.request(make(**more), "text" if make is llama else "chat")
    assert (got.custom_id, got.parameters) == ("a", parameters)
    assert got.prompt == prompt if make is llama else json.loads(got.prompt or "") == prompt


def message(block: dict) -> dict:
    return {"messages": [{"role": "user", "content": [block]}]}


REFUSED = [
    (params(tools=[{"name": "f"}]), r"params\.tools: not supported; only \[\] is taken, got a list of 1"),
    (params(thinking={"type": "enabled"}), r"params\.thinking: not supported; only \{\"type\": \"disabled\"\}"),
    (params(output_config={"format": {}}), r"params\.output_config: not supported"),
    (params(frobnicate=1), r"params\.frobnicate: not a field that is known; there are max_tokens, "),
    (params(max_tokens="5"), r"params\.max_tokens: expected an integer, got '5'"),
    (params(stop_sequences=5), r"params\.stop_sequences: expected a text or a list of texts"),
    (params(**message({"type": "image", "source": {}})), r"params\.messages\[0\]: content\[0\] is a part of type 'im"),
    (params(**message({"type": "tool_result"})), r"params\.messages\[0\]: content\[0\] is a part of type 'tool"),
    (params(messages=[{"role": "system", "content": "x"}]), r"params\.messages\[0\]: role: expected user or assistant"),
    (params(system=5), r"params\.system: content is neither"),
    (params(messages=[]), r"params\.messages: expected a list of messages"),
    ({**params(), "params": 5}, r"params: expected an object, got 5"),
    ({**params(), "method": "POST"}, r"method: not a field that is known; there are custom_id, params"),
    (converse(toolConfig={"tools": []}), r"modelInput\.toolConfig: not supported"),
    (converse(additionalModelRequestFields={"top_k": 5}), r"modelInput\.additionalModelRequestFields: not supported"),
    (converse(max_tokens=5), r"modelInput\.max_tokens: not a field that is known; there are messages, system, "),
    (converse(inferenceConfig={"topK": 5}), r"modelInput\.inferenceConfig\.topK: not a field that is known"),
    (converse(inferenceConfig={"maxTokens": 1.5}), r"modelInput\.inferenceConfig\.maxTokens: expected an integer"),
    (converse(inferenceConfig=5), r"modelInput\.inferenceConfig: expected an object, got 5"),
    (converse(**message({"image": {"format": "png"}})), r"modelInput\.messages\[0\]: content\[0\] is a part of ty"),
    (converse(system=[{"guardContent": {}}]), r"modelInput\.system: content\[0\] is a part of type 'guardContent'"),
    ({**converse(), "modelInput": None}, r"modelInput: expected an object, got nothing"),
    (llama(max_tokens=5), r"modelInput\.max_tokens: not a field that is known; there are prompt, max_gen_len, "),
    (llama(images=["x"]), r"modelInput\.images: not supported"),
    (llama(prompt=["x"]), r"modelInput\.prompt: expected text, got a list of 1"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_a_row_is_refused_by_the_name_of_a_field(line, says):
    form = "anthropic-batch" if "custom_id" in line else "bedrock-batch"
    body = line.get("modelInput")
    endpoint = "text" if isinstance(body, dict) and "prompt" in body else "chat"
    row = Requests(form, endpoint).row(line)
    assert (row["custom_id"], row["prompt" if endpoint == "text" else "messages"]) == ("a", None)
    assert re.match(says, row["refused"]), row["refused"]


def test_the_whole_input_is_refused(tmp_path):
    for heading, name in ((anthropic_batch.heading, "custom_id"), (bedrock_batch.heading, "recordId")):
        with pytest.raises(NoRequest, match=f"no {name}, by which"):
            heading({})
    cases = [
        (params, params(model="other"), r"a\.jsonl:2: params\.model 'other', \S+:1 has 'claude'"),
        (params, params(), r"a\.jsonl:2: custom_id 'a' is that of \S+:1 too"),
        (converse, llama(), r"a\.jsonl:2: modelInput 'InvokeModel', \S+:1 has 'Converse'"),
        (converse, converse(), r"a\.jsonl:2: recordId 'a' is that of \S+:1 too"),
    ]
    for make, second, says in cases:
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(make())}\n{json.dumps(second)}\n")
        with pytest.raises(InputError, match=says):
            open_source(str(tmp_path), requests=FORM[make])


def test_what_changes_nothing_here_is_noted():
    assert anthropic_batch.heading(params(metadata={}, stream=False)).ignored == ("metadata", "stream")
    assert bedrock_batch.heading(converse(requestMetadata={"a": "b"})).ignored == ("requestMetadata",)


CHAT, TEXT = (Answered(endpoint, "m", 7, "0123abcd" * 8) for endpoint in ("chat", "text"))


def test_a_row_is_a_result_of_anthropics():
    key = CHAT.key(ROW)
    line = anthropic_batch.answer(CHAT, ROW)
    assert line == {
        "custom_id": "a",
        "result": {
            "type": "succeeded",
            "message": {
                "id": f"msg_{key[:24]}", "type": "message", "role": "assistant", "model": "m",
                "content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "stop_sequence": None,
                "usage": {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                          "output_tokens": 1},
            },
        },
    }  # fmt: skip
    for reason in ("length", "length_loop"):
        cut = anthropic_batch.answer(CHAT, {**ROW, "finish_reason": reason})
        assert cut["result"]["message"]["stop_reason"] == "max_tokens"
    for code, kind in (("invalid_request", "invalid_request_error"), ("out_of_memory", "api_error")):
        failed = anthropic_batch.answer(CHAT, {**ROW, "error": code, "error_message": "Why."})["result"]
        told = {"type": "error", "error": {"type": kind, "message": "Why."}, "request_id": f"req_{key[24:48]}"}
        assert failed == {"type": "errored", "error": told}


def test_a_row_is_a_record_of_bedrocks():
    assert bedrock_batch.answer(CHAT, ROW) == {
        "recordId": "a",
        "modelOutput": {
            "output": {"message": {"role": "assistant", "content": [{"text": "x"}]}},
            "stopReason": "end_turn",
            "usage": {"inputTokens": 5, "outputTokens": 1, "totalTokens": 6},
        },
    }
    counts = {"prompt_token_count": 5, "generation_token_count": 1}
    for reason, told in (("stop", "stop"), ("length", "length"), ("length_loop", "length")):
        row = {**ROW, "finish_reason": reason}
        assert bedrock_batch.answer(TEXT, row)["modelOutput"] == {"generation": "x", **counts, "stop_reason": told}
        stop = {"stop": "end_turn", "length": "max_tokens"}[told]
        assert bedrock_batch.answer(CHAT, row)["modelOutput"]["stopReason"] == stop
    for code, status in (("invalid_request", 400), ("engine_failure", 500)):
        failed = bedrock_batch.answer(CHAT, {**ROW, "error": code, "error_message": None})
        assert failed == {"recordId": "a", "error": {"errorCode": status, "errorMessage": code}}


@pytest.mark.parametrize("answer", [anthropic_batch.answer, bedrock_batch.answer])
def test_a_list_of_one_completion_is_that_one_and_several_are_refused(answer):
    one = {"generated_text": ["x"], "finish_reason": ["stop"]}
    assert answer(CHAT, {**ROW, **one}) == answer(CHAT, ROW)
    with pytest.raises(OutputError, match="a: has 2 completions; only lines of openai-batch hold several"):
        answer(CHAT, {**ROW, "generated_text": ["x", "y"], "finish_reason": ["stop", "stop"]})
