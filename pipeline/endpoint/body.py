"""Bodies of requests: prompt and sampling parameters in the fields of OpenAI's API.

Parameters outside of OpenAI's API (`top_k`, `min_p`, `ignore_eos` ...) have vLLM's names, which SGLang and llama.cpp
mostly share. They are sent only if they differ from their defaults, so a plain job runs on any server. Servers that
accept NEUTRAL receive it with each request.
"""

import json
from collections.abc import Sequence
from typing import Any

from pipeline.endpoint.spec import Route
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.sampling_params import SamplingParams

MAX_SEED = 2**31  # the largest seed that every server accepts
# Without these, vLLM and SGLang use the values of the model's generation_config.json, and llama.cpp its own.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_HI = {"role": "user", "content": "Hi"}
_EXTRA = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos",
          "thinking_token_budget")  # fmt: skip


def chat_body(messages: Sequence[dict[str, Any]], params: SamplingParams, options: dict[str, Any]) -> dict[str, Any]:
    """Return the body for /chat/completions. options: fields of the chat template that differ from their defaults."""
    return {"messages": list(messages), **options, **sampling_fields(params, "chat")}


def completion_body(prompt: str, params: SamplingParams) -> dict[str, Any]:
    """Return the body for /completions. The client replaces the text by tokens if the server accepts them."""
    return {"prompt": prompt, **sampling_fields(params, "completion")}


def embedding_body(text: str, dimensions: int) -> dict[str, Any]:
    """Return the body for /embeddings."""
    return {"input": text, "dimensions": dimensions, "encoding_format": "float"}


def probe_body(route: Route, params: SamplingParams, dimensions: int) -> dict[str, Any]:
    """Return the body of a server's first request."""
    if route == "embedding":
        return embedding_body("Hi", dimensions)
    return completion_body("Hi", params) if route == "completion" else chat_body([_HI], params, {})


def sampling_fields(params: SamplingParams, route: Route) -> dict[str, Any]:
    """Return the fields for sampling parameters."""
    default = SamplingParams()
    fields: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature}
    if params.temperature > 0:
        fields["top_p"] = params.top_p
        if params.seed is not None:
            fields["seed"] = params.seed % MAX_SEED
    for name in _EXTRA:
        if (value := getattr(params, name)) != getattr(default, name):
            fields[name] = value
    if params.n > 1:
        fields["n"] = params.n
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.logprobs is not None:
        # vLLM names tokens by their ids on request, and llama.cpp adds ids; other answers are refused by `answer.py`.
        fields["return_tokens_as_token_ids"] = True
        if route == "chat":
            fields |= {"logprobs": True, "top_logprobs": params.logprobs}
        else:
            fields["logprobs"] = params.logprobs
    if params.repetition_detection is not None:
        fields["repetition_detection"] = vars(params.repetition_detection)
    if params.structured_outputs is not None:
        fields |= _structured(params.structured_outputs)
    return fields


def _structured(wanted: StructuredOutputs) -> dict[str, Any]:
    if wanted.kind == "json":
        schema = {"name": "answer", "schema": json.loads(wanted.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if wanted.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {"structured_outputs": wanted.to_dict()}
