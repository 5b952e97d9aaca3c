"""Turns pydantic's errors into mistakes with line, key, expected value and correction.

Messages never repeat values of storage options, which may be secrets.
"""

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config.jobfile import Document, KeyPath, Mistake, dotted
from pipeline.config.values import UNION_TAGS, VALUE, FromColumn
from pipeline.formatting import nearest

# Keys of other systems, refused with a hint.
_NOT_YET = "not supported yet"
_KNOWN_ELSEWHERE = {
    "pipeline_parallel_size": "pipeline parallelism is not supported; engine.tensor_parallel_size divides a model over "
    "several GPUs, and run.actors runs copies of it (docs/parallel.md)",
    "data_parallel_size": "run.actors sets how many copies of the model run",
    "quantization": "named model.quantization here; quantized checkpoints need no key",
    "trust_remote_code": "code from a checkpoint is never run",
    "max_new_tokens": "named sampling.max_tokens here",
    "best_of": f"{_NOT_YET}: sampling.n returns all completions of a row",
    "swap_space": "not needed: preempted sequences are computed again",
    **{
        f"guided_{kind}": f"named sampling.structured_outputs: {{{kind}: ...}} here"
        for kind in ("json", "choice", "regex", "grammar")
    },
    "response_format": "write sampling.structured_outputs: {json: SCHEMA}, or {json_object: true}",
    "logit_bias": _NOT_YET,
    "speculative_config": "named speculation here: {method, model, num_speculative_tokens}",
    "concurrency": "named run.actors here: how many copies of the model run",
    "batch_size": "not needed: batches are formed at each step; engine.max_num_seqs limits rows at once, "
    "output.rows_per_file rows of an output file",
    "url": "named server.base_url here",
    "model_source": "named model.path here",
    "reasoning_parser": "named sampling.reasoning here: auto, or {start, end}",
    "reasoning_config": "named sampling.reasoning here: auto, or {start, end}",
    "thinking_budget": "named sampling.thinking_token_budget here",
    "reasoning_effort": "write prompt.chat.chat_template_kwargs: {reasoning_effort: low} if the model's template has "
    "it, or sampling.thinking_token_budget",
    "enable_thinking": "write prompt.chat.chat_template_kwargs: {enable_thinking: false}",
    "model_revision": "named model.revision here",
    "input_path": "named input.path here",
    "output_path": "named output.path here",
}
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "`key: value` lines",
    "model_type": "`key: value` lines",
    "model_attributes_type": "`key: value` lines",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_FIRST_KEY: dict[KeyPath, str] = {("input",): "path", ("prompt",): "column", ("model",): "path", ("output",): "path"}


def from_validation(error: ValidationError, document: Document, root: type[BaseModel]) -> list[Mistake]:
    """Return every mistake of a failed validation."""
    return [_mistake(raw, document, root) for raw in error.errors(include_url=False)]


def in_order(mistakes: list[Mistake]) -> list[Mistake]:
    """Return the mistakes, ordered by line."""
    return sorted(mistakes, key=lambda mistake: (_line(mistake.location), mistake.key))


def _mistake(raw: Any, document: Document, root: type[BaseModel]) -> Mistake:
    path: KeyPath = tuple(part for part in raw["loc"] if part not in UNION_TAGS)
    location, key, kind = document.location(path), dotted(path), raw["type"]
    if kind == "extra_forbidden":
        return Mistake(location, key, *_unknown_key(path, root))
    if kind == "missing":
        return Mistake(location, key, "required, but missing", _example(path))
    problem, hint = _wrong_value(raw, path)
    return Mistake(location, key, problem, hint)


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> tuple[str, str]:
    name = str(path[-1])
    section = section_at(root, path[:-1])
    names = list(section.model_fields) if section else []
    if name in _KNOWN_ELSEWHERE:
        return "unknown key", _KNOWN_ELSEWHERE[name]
    # the same name in another section before a similar name in this one
    meant = " or ".join(f"`{home}`" for home in _homes(root, name))
    if not meant and (similar := nearest(name, names)):
        meant = f"`{similar}`"
    return "unknown key", f"Did you mean {meant}?" if meant else f"Known here: {', '.join(names)}."


def _homes(section: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the dotted keys of a section whose last part is `name`."""
    for key, field in section.model_fields.items():
        if key == name:
            yield key
        inner = model_of(field.annotation)
        if inner is not None and not issubclass(inner, FromColumn) and key != "steps":  # which repeat the job's keys
            yield from (f"{key}.{home}" for home in _homes(inner, name))


def _wrong_value(raw: Any, path: KeyPath) -> tuple[str, str]:
    kind, context = raw["type"], raw.get("ctx", {})
    got = _shown(raw["input"], path)
    if kind == "expected":
        return f"expected {context['expected']}; got {got}", ""
    if kind == "value_error":
        return str(context["error"]), ""
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        meant = nearest(str(raw["input"]), choices)
        return f"expected one of {', '.join(choices)}; got {got}", f"Did you mean `{meant}`?" if meant else ""
    if kind in _LIMITS and isinstance(raw["input"], float) and math.isnan(raw["input"]):
        return f"expected a finite number; got {got}", ""
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        return f"expected {words} {context[name]}; got {got}", ""
    if kind == "string_too_short":
        return "must not be empty", ""
    if kind == "string_pattern_mismatch" and path == ("engine", "device"):
        return f"expected auto, cpu, cuda or cuda:N; got {got}", ""
    if kind in _EXPECTED:
        hint = ""
        if kind == "model_type" and path in _FIRST_KEY and isinstance(raw["input"], str):
            hint = f"Write `{path[0]}: {{{_FIRST_KEY[path]}: {raw['input']}}}`."
        elif kind == "string_type" and isinstance(raw["input"], bool | int | float):
            hint = "Quote it to make it text."
        or_column = ", or {column: name}" if raw["loc"][-1] == VALUE else ""
        return f"expected {_EXPECTED[kind]}{or_column}; got {got}", hint
    return f"{raw['msg']}; got {got}", ""


def _shown(value: object, path: KeyPath) -> str:
    """Return a short form of a value for a message, without secrets."""
    if path[:1] == ("storage_options",):
        return "another kind of value"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "`key: value` lines"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _example(path: KeyPath) -> str:
    examples = {
        ("input",): "Write `input: {path: prompts.parquet}`.",
        ("prompt",): 'Write `prompt: {column: prompt}` or `prompt: {template: "Summarize: {text}"}`.',
        ("model",): "Write `model: demo`, a folder, or a Hugging Face id.",
        ("output",): "Write `output: {path: out/my-job}`.",
        ("input", "path"): "A .parquet, .jsonl, .csv or .arrow file, a folder of them, or a glob.",
        ("model", "path"): "A folder, a Hugging Face id, or `demo`.",
        ("output", "path"): "A folder for the results.",
    }
    return examples.get(tuple(str(step) for step in path), "")


def section_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section at a key; None if it is another kind of value or unknown."""
    model: type[BaseModel] | None = root
    for step in path:
        if isinstance(step, int):
            continue  # an item of a list of sections
        field = model.model_fields.get(str(step)) if model else None
        model = model_of(field.annotation) if field else None
    return model


def model_of(annotation: Any) -> type[BaseModel] | None:
    choices = [getattr(choice, "__origin__", choice) for choice in getattr(annotation, "__args__", (annotation,))]
    return next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _line(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return (file, int(line)) if line.isdigit() else (location, 0)
