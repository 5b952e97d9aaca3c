"""Answers of vLLM 0.32 and llama.cpp 0.6, as they were received."""

import pytest

from pipeline.endpoint.answer import completion_of
from pipeline.endpoint.body import completion_body
from pipeline.endpoint.errors import Reply
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.sampling_params import SamplingParams


def _request(**options: object) -> EndpointRequest:
    params = SamplingParams(max_tokens=8, temperature=0.0, **options)
    return EndpointRequest(0, completion_body("Hi", params), params)


def test_a_prompt_that_fills_vllms_context_is_too_long() -> None:
    message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    done = completion_of(Reply(400, {}, {"error": {"message": message}}), _request())
    assert done.error == "prompt_too_long"


@pytest.mark.parametrize(
    ("wanted", "text", "is_valid"),
    [
        ({"choice": ["yes", "no"]}, "yes", True),
        ({"choice": ["yes", "no"]}, "On July 7", False),
        ({"regex": "[a-z]+"}, "yes", True),
        ({"regex": "[a-z]+"}, "On July 7", False),
    ],
)
def test_a_text_of_a_server_that_ignores_structured_outputs_is_an_error(wanted, text, is_valid) -> None:
    answer = {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    request = _request(structured_outputs=StructuredOutputs.from_config(wanted))
    done = completion_of(Reply(200, {}, answer), request)
    assert (done.error, done.text) == ((None, text) if is_valid else ("grammar_error", ""))


def test_llama_cpps_log_probabilities_have_ids() -> None:
    tops = [{"id": 446, "token": "Summarize", "logprob": -0.09}, {"id": 3, "token": "", "logprob": -2.44}]
    choice = {"index": 0, "text": "Summarize", "finish_reason": "length"}
    answer = {"choices": [choice | {"logprobs": {"content": [{**tops[0], "top_logprobs": tops}]}}]}
    done = completion_of(Reply(200, {}, answer), _request(logprobs=2))
    assert done.token_ids == [446]
    assert done.logprobs is not None
    assert [one[0] for one in done.logprobs[0].top] == [446, 3]
