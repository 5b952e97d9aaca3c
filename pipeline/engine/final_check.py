"""The final check of a completion: JSON that does not conform to its schema becomes an error."""

from pipeline.engine.completion import Completion
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.grammar.validity import invalid_reason
from pipeline.engine.samples import with_samples
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import RowError


def is_checked(params: SamplingParams) -> bool:
    """Return whether completions of these parameters are JSON."""
    return params.structured_outputs is not None and params.structured_outputs.kind in ("json", "json_object")


def checked(completion: Completion, params: SamplingParams) -> Completion:
    """Return the completion, or the error `grammar_error` if it ended with `stop` and does not conform to its schema.
    Each sample is checked; of a row that reasons, only the answer. About 80 us for an object of ten fields.

    Raises EnvironmentFailed if jsonschema is not installed.
    """
    wanted = params.structured_outputs
    if wanted is None or not is_checked(params):
        return completion
    found = [_checked(one, wanted) for one in completion.each]
    if all(after is before for after, before in zip(found, completion.each)):
        return completion
    return with_samples(found) if completion.samples else found[0]


def _checked(one: Completion, wanted: StructuredOutputs) -> Completion:
    has_text = one.finish_reason == "stop" and one.tool_calls is None
    reason = invalid_reason(wanted, one.text) if has_text else None
    if reason is None:
        return one
    return Completion(
        row_id=one.row_id,
        token_ids=[],
        text="",
        finish_reason="error",
        num_prompt_tokens=one.num_prompt_tokens,
        num_cached_tokens=one.num_cached_tokens,
        error=RowError.GRAMMAR_ERROR.value,
        error_message=f"sampling.structured_outputs.{wanted.kind}: the finished text {reason}",
        queued_us=one.queued_us,
        first_token_us=one.first_token_us,
        num_lost_prompt_tokens=one.num_prompt_tokens - one.num_cached_tokens,
        num_lost_generated_tokens=one.num_tokens,
    )
