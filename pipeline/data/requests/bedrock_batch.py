"""Lines of Amazon Bedrock's batch inference, `{"recordId": ..., "modelInput": {...}}`, and the records it delivers.

A modelInput is a body of Converse, or that which Llama models take through InvokeModel. Fields as in the user guide's
batch-inference-data, batch-inference-results and model-parameters-meta, and in API_runtime_Converse. One file holds all
records, those of errors too. An output does not keep what was asked, so records come without modelInput.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.data.requests.openai_answers import Answered, is_of_engine, only_text
from pipeline.data.requests.request_row import (
    CUSTOM_ID,
    Endpoint,
    Heading,
    Refused,
    Request,
    chat_json,
    check_fields,
    id_of,
    parameter,
    shortened,
)

ENDPOINTS: Mapping[str, Endpoint] = {"Converse": "chat", "InvokeModel": "text"}
OF_LINE = ("recordId", "modelInput")
# They change no token here; promptVariables are of stored prompts.
IGNORED = (
    "requestMetadata",
    "performanceConfig",
    "serviceTier",
    "additionalModelResponseFieldPaths",
    "promptVariables",
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # with the values that ask for nothing
    "toolConfig": (),
    "guardrailConfig": (),
    "outputConfig": ({},),
    "additionalModelRequestFields": ({},),
}
_OF_CONVERSE = {"maxTokens": "max_tokens", "temperature": "temperature", "topP": "top_p", "stopSequences": "stop"}
_OF_LLAMA = {"max_gen_len": "max_tokens", "temperature": "temperature", "top_p": "top_p"}


def heading(line: Mapping[str, Any]) -> Heading:
    """Raises NoRequest where there is no recordId."""
    record_id, body = id_of(line, "recordId"), line.get("modelInput")
    body = body if isinstance(body, dict) else {}
    endpoint = "chat" if "messages" in body else "text" if "prompt" in body else None
    return Heading(record_id, endpoint, None, tuple(name for name in IGNORED if body.get(name) is not None))


def request(line: Mapping[str, Any], endpoint: Endpoint) -> Request:
    """Raises Refused."""
    check_fields(line, OF_LINE, {}, "")
    body = line.get("modelInput")
    if not isinstance(body, dict):
        raise Refused(f"modelInput: expected an object, got {'nothing' if body is None else shortened(body)}")
    if endpoint == "text":
        check_fields(body, ("prompt", *_OF_LLAMA), {"images": ([],)}, "modelInput.")
        if not isinstance(body.get("prompt"), str):
            raise Refused(f"modelInput.prompt: expected text, got {shortened(body.get('prompt'))}")
        return Request(line["recordId"], body["prompt"], _parameters(body, _OF_LLAMA, "modelInput"))
    check_fields(body, ("messages", "system", "inferenceConfig", *IGNORED), UNSUPPORTED, "modelInput.")
    given, messages, where = body.get("inferenceConfig") or {}, body.get("messages"), "modelInput.inferenceConfig"
    if not isinstance(given, dict):
        raise Refused(f"{where}: expected an object, got {shortened(given)}")
    check_fields(given, _OF_CONVERSE, {}, f"{where}.")
    if isinstance(messages, list):
        messages = [{**m, "content": _parts(m.get("content"))} if isinstance(m, dict) else m for m in messages]
    system = _parts(body.get("system")) or None
    chat = chat_json(messages, "modelInput.messages", system, "modelInput.system")
    return Request(line["recordId"], chat, _parameters(given, _OF_CONVERSE, where))


def _parts(content: object) -> object:
    """Converse's blocks, which are called by their key, as parts with a type."""
    if not isinstance(content, list):
        return content
    blocks = [block for block in content if not (isinstance(block, dict) and block.keys() == {"cachePoint"})]
    return [{"type": next(iter(b), None), **b} if isinstance(b, dict) else b for b in blocks]


def _parameters(given: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    values = {name: given[name] for name in names if given.get(name) is not None}
    return {names[name]: parameter(names[name], value, f"{where}.{name}") for name, value in values.items()}


def answer(answered: Answered, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the output as a record."""
    if row["error"] is not None:
        error = {"errorCode": 500 if is_of_engine(row) else 400, "errorMessage": row["error_message"] or row["error"]}
        return {"recordId": row[CUSTOM_ID], "error": error}
    (text, reason), num_input, num_output = only_text(row), row["num_input_tokens"], row["num_generated_tokens"]
    if answered.endpoint == "text":
        counts = {"prompt_token_count": num_input, "generation_token_count": num_output}
        output = {"generation": text, **counts, "stop_reason": "stop" if reason == "stop" else "length"}
    else:
        output = {
            "output": {"message": {"role": "assistant", "content": [{"text": text}]}},
            "stopReason": "end_turn" if reason == "stop" else "max_tokens",
            "usage": {"inputTokens": num_input, "outputTokens": num_output, "totalTokens": num_input + num_output},
        }
    return {"recordId": row[CUSTOM_ID], "modelOutput": output}
