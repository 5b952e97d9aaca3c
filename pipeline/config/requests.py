"""Jobs whose input is a file of requests (`input.format: openai`): the lines hold what job files hold otherwise.

A job file of one has no `prompt`, or one with `chat` alone; its `sampling` is for lines that do not give a value
themselves. Which endpoint the lines are for is known once the input is read (`job/planning/resolution.py`); those for
embeddings are of jobs with `task: embed`.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.config.sections.prompt import SOURCES, PromptSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.values import FromColumn
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT, PROMPT_COLUMN, Endpoint

# The API's values where neither a line nor the job file has one. A chat there continues to the model's end; here a row
# is given room for max_tokens, so that there is a bound.
DEFAULTS: Mapping[Endpoint, dict[str, Any]] = {
    "chat": {"temperature": 1.0, "max_tokens": 4096},
    "text": {"temperature": 1.0, "max_tokens": 16},
    "embedding": {},
}
FROM_LINES = (*SOURCES, "fill_null")  # of a prompt


def is_of_requests(raw: object) -> bool:
    """Whether a job file, before it is checked, is one of requests."""
    section = raw.get("input") if isinstance(raw, dict) else None
    return isinstance(section, dict) and section.get("format") not in (None, "rows")


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """A job file of requests with what its format says: the lines' chats or texts to embed, and of their columns
    custom_id. A prompt that names another source is left to be refused."""
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
    """Where the prompts of lines for this endpoint are."""
    column = PROMPT_COLUMN[endpoint]
    new: dict[str, Any] = (
        {"messages": column} if endpoint == "chat" else {"messages": None, "column": column, "chat": None}
    )
    return prompt.model_copy(update=new)


def sampling_of(endpoint: Endpoint, sampling: SamplingSection, samples: bool, prompt_logprobs: bool) -> SamplingSection:
    """The values for lines that give none, with the API's where the job file has none either. samples,
    prompt_logprobs: whether some lines request several completions, or those of their prompts, so that the output has
    room for them; the job's own values are for lines that give none."""
    missing = {name: value for name, value in DEFAULTS[endpoint].items() if name not in sampling.model_fields_set}
    if samples and sampling.n == 1:
        missing["n"] = FromColumn(column="n")
    if prompt_logprobs and sampling.prompt_logprobs is None:
        missing["prompt_logprobs"] = FromColumn(column="prompt_logprobs")
    return sampling.model_copy(update=missing)
