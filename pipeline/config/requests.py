"""Jobs whose input lines are requests (`input.format: openai`) with their own prompts and sampling.

Such a job file has no `prompt`, or one with only `chat`; its `sampling` applies to lines without a value of their own.
The endpoint of the lines is known once the input is read (`job/planning/resolution.py`); lines for embeddings need
`task: embed`.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.config.sections.prompt import SOURCES, PromptSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.values import FromColumn
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT, PROMPT_COLUMN, Endpoint

# Defaults of the API if neither a line nor the job file sets a value. There a chat may run to the context length; here
# max_tokens needs a limit, as rows reserve room for it.
DEFAULTS: Mapping[Endpoint, dict[str, Any]] = {
    "chat": {"temperature": 1.0, "max_tokens": 4096},
    "text": {"temperature": 1.0, "max_tokens": 16},
    "embedding": {},
}
FROM_LINES = (*SOURCES, "fill_null")  # keys of `prompt` that lines replace


def is_of_requests(raw: object) -> bool:
    """Return whether an unchecked job file reads requests."""
    section = raw.get("input") if isinstance(raw, dict) else None
    return isinstance(section, dict) and section.get("format") not in (None, "rows", "pdf")


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a job file of requests with the prompt source and the kept columns of its format filled in. A prompt that
    names another source stays unchanged, to be refused later."""
    task = raw.get("task")
    prompt, is_embed = raw.get("prompt") or {}, "embed" in (task, isinstance(task, dict) and task.get("type"))
    if isinstance(prompt, dict) and all(prompt.get(key) is None for key in SOURCES):
        if is_embed:
            prompt = {**prompt, "column": PROMPT_COLUMN["embedding"]}
        else:
            prompt = {**prompt, "messages": PROMPT_COLUMN["chat"], "chat": prompt.get("chat") or {}}
    kept = [CUSTOM_ID, ENCODING_FORMAT] if is_embed else [CUSTOM_ID]
    return {**raw, "input": {"columns": kept, **raw["input"]}, "prompt": prompt}


def prompt_of(endpoint: Endpoint, prompt: PromptSection) -> PromptSection:
    """Return `prompt` with the source that lines of this endpoint have."""
    column = PROMPT_COLUMN[endpoint]
    new: dict[str, Any] = (
        {"messages": column} if endpoint == "chat" else {"messages": None, "column": column, "chat": None}
    )
    return prompt.model_copy(update=new)


def sampling_of(endpoint: Endpoint, sampling: SamplingSection, samples: bool, prompt_logprobs: bool) -> SamplingSection:
    """Return the sampling for lines without own values, with the API's defaults for what the job file leaves open.
    samples, prompt_logprobs: whether some lines request several completions, or prompt log-probabilities; the output
    then needs columns for them."""
    missing = {name: value for name, value in DEFAULTS[endpoint].items() if name not in sampling.model_fields_set}
    if samples and sampling.n == 1:
        missing["n"] = FromColumn(column="n")
    if prompt_logprobs and sampling.prompt_logprobs is None:
        missing["prompt_logprobs"] = FromColumn(column="prompt_logprobs")
    return sampling.model_copy(update=missing)
