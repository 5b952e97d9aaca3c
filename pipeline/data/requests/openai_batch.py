"""Request lines of OpenAI's Batch API: `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`.

The fields are those of https://platform.openai.com/docs/api-reference/batch/request-input, /chat/create,
/completions/create and /embeddings/create, and additional ones of vLLM's server (top_k, min_p, repetition_penalty,
min_tokens, stop_token_ids, ignore_eos, prompt_logprobs, thinking_token_budget). Other vLLM fields are accepted if their
value has no effect, as in lines written from vLLM's request classes. An unknown field makes its row an error row: a
completion that ignores part of its request is worse than none.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.data.requests.request_row import (
    CUSTOM_ID,
    ENCODING_FORMAT,
    BatchRequest,
    Endpoint,
    Heading,
    NoRequest,
    Refused,
    chat_json,
    check_unsupported,
    id_of,
    parameter,
    shortened,
)

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/embeddings": "embedding",
}
_EXPECTED_URL = ", ".join(ENDPOINTS)
OTHER_ENDPOINTS = ("responses", "moderations", "images/generations", "images/edits", "videos")
# A path as of OpenAI or Azure (`/chat/completions`, `/openai/deployments/NAME/...`), or a whole url.
_URL = re.compile(
    r"(?:https?://[^/?#]+(?:/[^?#]*?)?|(?:/?openai)?(?:/?v1)?(?:/?deployments/[^/?#]+)?)/?"
    rf"(?<![^/])({'|'.join([*(url.removeprefix('/v1/') for url in ENDPOINTS), *OTHER_ENDPOINTS])})/?(?:[?#].*)?"
)

# Fields that affect how a response is delivered, stored or billed, but not its tokens.
IGNORED = ("stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier",
           "prompt_cache_key", "prompt_cache_retention", "priority", "request_id", "session_id", "cache_salt",
           "stream_interval")  # fmt: skip
# Fields with the name and form of the sampling parameter; the other parameters are converted.
SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "stop", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n",
             "prompt_logprobs", "thinking_token_budget")  # fmt: skip
# Unsupported fields, with the values that have no effect and are accepted.
_OF_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "bad_words": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "vllm_xargs": ({},),
}
UNSUPPORTED: Mapping[Endpoint, Mapping[str, tuple[Any, ...]]] = {
    "chat": {
        **_OF_COMPLETIONS,
        "add_special_tokens": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template_kwargs": ({},),
        "include_reasoning": (True,),
        "documents": ([],),
    },
    "text": {**_OF_COMPLETIONS, "add_special_tokens": (True,)},
    "embedding": {},
}
_HINTS = {
    "chat_template_kwargs": "set prompt.chat.chat_template_kwargs in the job file, for all rows",
    "reasoning_effort": "set prompt.chat.chat_template_kwargs in the job file if the model's template supports it, or "
    "use thinking_token_budget",
    "chat_template": "set prompt.chat.chat_template in the job file, for all rows",
    "continue_final_message": "a final assistant message is continued, see prompt.chat.continue_final_message",
    "add_generation_prompt": "it is always true for completions",
}
OF_LINE = ("custom_id", "method", "url", "body")
# In addition to IGNORED, UNSUPPORTED and model.
_FIELDS: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset(
        (*SAME_NAME, "logprobs", "messages", "max_completion_tokens", "top_logprobs", "response_format"),
    ),
    "text": frozenset((*SAME_NAME, "logprobs", "prompt")),
    "embedding": frozenset(("input", "dimensions", ENCODING_FORMAT)),
}
_ENCODINGS = ("float", "base64")


def heading(line: Mapping[str, Any]) -> Heading:
    """Return the properties of a line that all lines must agree on. Raises NoRequest for a missing custom_id, an
    unsupported endpoint, or an invalid number of dimensions."""
    custom_id, url, body = id_of(line), line.get("url"), line.get("body")
    if _path(url) in OTHER_ENDPOINTS:
        raise NoRequest(f"url {shortened(url)} is not supported; expected {_EXPECTED_URL}")
    body = body if isinstance(body, dict) else {}
    model = body.get("model")
    ignored = tuple(name for name in IGNORED if body.get(name) is not None)
    n = body.get("n")
    samples = isinstance(n, int | float) and n > 1
    dimensions = body.get("dimensions") if _endpoint(url) == "embedding" else None
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise NoRequest(f"body.dimensions: expected an integer of at least 1, got {shortened(dimensions)}")
    model = model if isinstance(model, str) else None
    of_prompt = _endpoint(url) != "embedding" and body.get("prompt_logprobs") is not None
    return Heading(custom_id, _endpoint(url), model, ignored, samples, dimensions, of_prompt)


def request(line: Mapping[str, Any], endpoint: Endpoint) -> BatchRequest:
    """Parse the request of a line. endpoint: that of the whole input. Raises Refused."""
    return BatchRequest(line.get(CUSTOM_ID), *_read(line, endpoint))


def _endpoint(url: object) -> Endpoint | None:
    return ENDPOINTS.get(f"/v1/{_path(url)}")


def _path(url: object) -> str | None:
    """Return the endpoint's path, such as `chat/completions`; None for another url."""
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    return found and found[1]


def _read(line: Mapping[str, Any], endpoint: Endpoint) -> tuple[str, dict[str, Any]]:
    for name in line:
        if name not in OF_LINE:
            raise Refused(f"{shortened(name)}: unknown field of a line; expected {', '.join(OF_LINE)}")
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    if method != "POST":
        raise Refused(f"method: expected POST, got {shortened(method)}")
    if _endpoint(url) is None:
        raise Refused(f"url: expected {_EXPECTED_URL}, got {shortened(url)}")
    if not isinstance(body, dict):
        raise Refused(f"body: expected an object, got {'nothing' if body is None else shortened(body)}")
    _check_fields(body, endpoint)
    return _prompt(body, endpoint), _parameters(body, endpoint)


def _check_fields(body: Mapping[str, Any], endpoint: Endpoint) -> None:
    for name, value in body.items():
        if value is None:
            continue
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        if name in UNSUPPORTED[endpoint]:
            check_unsupported(f"body.{name}", value, UNSUPPORTED[endpoint][name], hint)
        elif name not in _FIELDS[endpoint] and name not in IGNORED and name != "model":
            raise Refused(f"body.{name[:80]}: unknown field for {_url(endpoint)}{hint}")
    if "model" in body and not isinstance(body["model"], str):
        raise Refused(f"body.model: expected text, got {shortened(body['model'])}")


def _prompt(body: Mapping[str, Any], endpoint: Endpoint) -> str:
    if endpoint == "chat":
        chat, last = body.get("messages"), "continue_final_message"
        turn = chat[-1] if isinstance(chat, list) and chat else None
        if body.get(last) is False and isinstance(turn, dict) and turn.get("role") == "assistant":
            raise Refused(f"body.{last}: false, but the last message is an assistant's; {_HINTS[last]}")
        return chat_json(chat, "body.messages")
    key = "input" if endpoint == "embedding" else "prompt"
    prompt = body.get(key)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        advice = "; write one line per text" if isinstance(prompt, list) else ""
        if any(type(item) is int for item in (prompt if isinstance(prompt, list) else [prompt])):
            advice = "; token ids are not supported, write their text"
        raise Refused(f"body.{key}: expected one text, got {shortened(prompt)}{advice}")
    return prompt


def _parameters(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    if endpoint == "embedding":
        encoding = body.get(ENCODING_FORMAT)
        if encoding is not None and encoding not in _ENCODINGS:
            raise Refused(f"body.{ENCODING_FORMAT}: expected {' or '.join(_ENCODINGS)}, got {shortened(encoding)}")
        return {ENCODING_FORMAT: encoding}
    own = {name: parameter(name, body[name], f"body.{name}") for name in SAME_NAME if body.get(name) is not None}
    if endpoint == "chat":
        max_tokens = body.get("max_completion_tokens")
        if max_tokens is not None:  # the newer name takes precedence
            own["max_tokens"] = parameter("max_tokens", max_tokens, "body.max_completion_tokens")
        wanted, top = body.get("logprobs"), body.get("top_logprobs")
        if wanted is not None and type(wanted) is not bool:
            raise Refused(f"body.logprobs: expected true or false, got {shortened(wanted)}")
        if top is not None and not wanted and top != 0:
            raise Refused("body.top_logprobs: requires body.logprobs: true")
        if wanted:
            own["logprobs"] = parameter("logprobs", top or 0, "body.top_logprobs")
        form = body.get("response_format")
        if form is not None and form != {"type": "text"}:  # that has no effect, and leaves the job's format
            own["response_format"] = json.dumps(form)
    elif body.get("logprobs") is not None:
        own["logprobs"] = parameter("logprobs", body["logprobs"], "body.logprobs")
    if own.get("seed") == -1:
        del own["seed"]  # as in vLLM, -1 means a random seed: use the row's default
    elif "seed" in own:
        own["seed"] &= 2**63 - 1  # the API allows negative seeds
    return own


def _url(endpoint: Endpoint) -> str:
    return next(url for url, known in ENDPOINTS.items() if known == endpoint)
