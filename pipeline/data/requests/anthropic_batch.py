"""Lines of Anthropic's Message Batches API, `{"custom_id": ..., "params": {...}}`, and the results that it delivers.

Fields as in https://platform.claude.com/docs/en/api/messages/create and /messages/batches/results. One file holds all
results, those of errors too. Which stop sequence ended a text is not kept, so its stop_reason is end_turn.
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

ENDPOINTS: Mapping[str, Endpoint] = {"/v1/messages": "chat"}
OF_LINE = (CUSTOM_ID, "params")
# They change no token here.
IGNORED = ("metadata", "service_tier", "stream", "inference_geo", "cache_control", "user_profile_id")
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # with the values that ask for nothing
    "tools": ([],),
    "tool_choice": ({"type": "none"},),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "container": (),
    "mcp_servers": ([],),
}
_PARAMETERS = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {"stop_sequences": "stop"}
_KNOWN = (*_PARAMETERS, "model", "messages", "system")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "length_loop": "max_tokens"}


def heading(line: Mapping[str, Any]) -> Heading:
    """Raises NoRequest where there is no custom_id."""
    custom_id, params = id_of(line, CUSTOM_ID), line.get("params")
    if not isinstance(params, dict):
        return Heading(custom_id, None, None)
    model, ignored = params.get("model"), tuple(name for name in IGNORED if params.get(name) is not None)
    return Heading(custom_id, "chat", model if isinstance(model, str) else None, ignored)


def request(line: Mapping[str, Any], endpoint: Endpoint) -> Request:
    """Raises Refused."""
    check_fields(line, OF_LINE, {}, "")
    params = line.get("params")
    if not isinstance(params, dict):
        raise Refused(f"params: expected an object, got {'nothing' if params is None else shortened(params)}")
    check_fields(params, (*_KNOWN, *IGNORED), UNSUPPORTED, "params.")
    messages, system = params.get("messages"), params.get("system")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") not in ("user", "assistant"):
            raise Refused(
                f"params.messages[{i}]: role: expected user or assistant, got {shortened(message.get('role'))}"
            )
    chat = chat_json(messages, "params.messages", system, "params.system")
    given = {name: value for name, value in params.items() if name in _PARAMETERS and value is not None}
    return Request(
        line[CUSTOM_ID],
        chat,
        {_PARAMETERS[name]: parameter(_PARAMETERS[name], value, f"params.{name}") for name, value in given.items()},
    )


def answer(answered: Answered, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the output as a line of the results."""
    key = answered.key(row)
    if row["error"] is not None:
        kind = "api_error" if is_of_engine(row) else "invalid_request_error"
        error = {"type": kind, "message": row["error_message"] or row["error"]}
        failed = {"type": "error", "error": error, "request_id": f"req_{key[24:48]}"}
        return {CUSTOM_ID: row[CUSTOM_ID], "result": {"type": "errored", "error": failed}}
    text, reason = only_text(row)
    message = {
        "id": f"msg_{key[:24]}",
        "type": "message",
        "role": "assistant",
        "model": answered.model,
        "content": [{"type": "text", "text": text}],
        "stop_reason": _STOP_REASONS[reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": row["num_input_tokens"] - row["num_cached_tokens"],  # as there, without those from cache
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": row["num_cached_tokens"],
            "output_tokens": row["num_generated_tokens"],
        },
    }
    return {CUSTOM_ID: row[CUSTOM_ID], "result": {"type": "succeeded", "message": message}}
