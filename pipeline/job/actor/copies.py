"""Equal rows of a unit, which are computed once.

Two rows are equal if their prompts, parameters, adapters, other texts and the columns that steps read are, and both are
greedy. Equal rows of other units are computed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.prompts import MAX_BYTES, text_bytes
from pipeline.data.units import Unit
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.job.actor.steps import RowOfSteps

_COMPARED = ("_prompt", "_params", "_adapter", "_texts")  # columns of a unit


def first_equal_rows(
    unit: Unit, requests: Sequence[Request | EndpointRequest], extra_body: Mapping[str, Any]
) -> dict[object, object]:
    """Return the first equal row of each row that has an earlier one, both by row_id, the index in the unit.
    extra_body: fields that replace those of each request to a server."""
    prompts = unit.own("_prompt")
    if pc.call_function("count_distinct", [prompts]).as_py() == len(prompts):
        return {}
    columns: list[Any] = [unit.own(name).to_pylist() for name in _COMPARED]
    for column in unit.own("_inputs").flatten() if pa.types.is_struct(unit.own("_inputs").type) else ():
        columns.append(text_bytes(column.combine_chunks(), MAX_BYTES))
    values = list(zip(*columns))
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
    if isinstance(done, RowOfSteps):
        columns = {
            name: values and {**values, "num_cached_tokens": values["num_input_tokens"]}
            for name, values in done.columns.items()
        }
        done = replace(done, columns=columns)
    return replace(
        done,
        row_id=row_id,
        num_cached_tokens=done.num_prompt_tokens,
        queued_us=0,
        first_token_us=0,
        last_token_us=0,
        is_copy=True,
    )
