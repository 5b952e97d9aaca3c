"""Equal rows of a unit, which are computed once.

Two rows are equal if their prompts, parameters, adapters and other texts are, and both are greedy. Equal rows of other
units are computed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

from pipeline.data.units import Unit
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.request import Request

_COMPARED = ("_prompt", "_params", "_adapter", "_texts")  # columns of a unit


def first_equal_rows(
    unit: Unit, requests: Sequence[Request | EndpointRequest], extra_body: Mapping[str, Any]
) -> dict[object, object]:
    """Return the first equal row of each row that has an earlier one, both by row_id, the index in the unit.
    extra_body: fields that replace those of each request to a server."""
    prompts = unit.own("_prompt")
    if pc.call_function("count_distinct", [prompts]).as_py() == len(prompts):
        return {}
    values = list(zip(*(unit.own(name).to_pylist() for name in _COMPARED)))
    seen: dict[object, object] = {}
    found: dict[object, object] = {}
    for request in requests:
        temperature = extra_body.get("temperature", request.params.temperature)  # None: the server's
        is_compared = isinstance(request, Request) and request.quality is not None  # with a reference model
        if temperature == 0 and not is_compared:
            first = seen.setdefault(values[request.row_id], request.row_id)  # type: ignore[index]
            if first != request.row_id:
                found[request.row_id] = first
    return found


def copied(done: Completion, row_id: object) -> Completion:
    """Return the completion of an equal row. Nothing was computed for it: it has no times, and its whole prompt counts
    as cached."""
    return replace(
        done,
        row_id=row_id,
        num_cached_tokens=done.num_prompt_tokens,
        queued_us=0,
        first_token_us=0,
        last_token_us=0,
        is_copy=True,
    )
