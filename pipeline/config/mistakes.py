"""Turns pydantic's errors into mistakes with line, key, expected value and correction.

Messages never repeat values of storage options, which may be secrets.
"""

import math
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config.jobfile import Document, KeyPath, Mistake, dotted
from pipeline.config.sections.kubernetes import FORMER_KEYS
from pipeline.config.values import UNION_TAGS, VALUE
from pipeline.formatting import nearest

# Keys of other systems, refused with a hint.
_NOT_YET = "not supported yet"
_KNOWN_ELSEWHERE = {
    "tensor_parallel_size": "named engine.tensor_parallel_size here",
    "pipeline_parallel_size": "pipeline parallelism is not supported; engine.tensor_parallel_size divides a model over "
    "several GPUs, and run.actors runs copies of it (docs/parallel.md)",
    "data_parallel_size": "run.actors sets how many copies of the model run",
    "quantization": "named model.quantization here; quantized checkpoints need no key",
    "trust_remote_code": "code from a checkpoint is never run",
    "max_new_tokens": "named sampling.max_tokens here",
    "n": "named sampling.n here",
    "generation_config": "named sampling.generation_config here: none or model",
    "best_of": f"{_NOT_YET}: sampling.n returns all completions of a row",
    "swap_space": "not needed: preempted sequences are computed again",
    "prompt_logprobs": "named sampling.prompt_logprobs here",
    **{
        f"guided_{kind}": f"named sampling.structured_outputs: {{{kind}: ...}} here"
        for kind in ("json", "choice", "regex", "grammar")
    },
    "structured_outputs": "named sampling.structured_outputs here",
    "response_format": "write sampling.structured_outputs: {json: SCHEMA}, or {json_object: true}",
    "logit_bias": _NOT_YET,
    "hourly_price": "named cost.hourly_usd here",
    "speculative_config": "named speculation here: {method, model, num_speculative_tokens}",
    "speculation": "a section of its own: speculation: {method, model, num_speculative_tokens}",
    "draft": "named speculation.model here, with method: draft_model",
    "proposer": "named speculation.method here: auto, off, lookup or draft_model",
    "max_draft_tokens": "named speculation.num_speculative_tokens here",
    "concurrency": "named run.actors here: how many copies of the model run",
    "batch_size": "not needed: batches are formed at each step; engine.max_num_seqs limits rows at once, "
    "output.rows_per_file rows of an output file",
    "model_source": "named model.path here",
    "chat_template": "named prompt.chat.template here: a file",
    "chat_template_kwargs": "named prompt.chat.template_kwargs here",
    "args": "named template_kwargs here",
    "reasoning_parser": "named sampling.reasoning here: auto, or {start, end}",
    "reasoning_config": "named sampling.reasoning here: auto, or {start, end}",
    "thinking_budget": "named sampling.thinking_token_budget here",
    "reasoning_effort": "write prompt.chat.template_kwargs: {reasoning_effort: low} if the model's template has it, "
    "or sampling.thinking_token_budget",
    "enable_thinking": "write prompt.chat.template_kwargs: {enable_thinking: false}",
    "model_revision": "named model.revision here",
    "input_path": "named input.path here",
    "output_path": "named output.path here",
    **FORMER_KEYS,
}
# Keys of earlier versions, dotted, and their replacements.
FORMER: dict[str, str] = {
    "params": "named vars now",
    "choice": "write task: {type: choice, labels: [...]}",
    "score": "write task: {type: score, completion: ...}",
    "embed": "write task: {type: embed, ...}",
    "classify": "write task: {type: classify, ...}",
    "input.storage": "write storage_options: {s3: {...}}, by the prefix of the url",
    "model.storage": "write storage_options: {s3: {...}}, by the prefix of the url",
    "output.storage": "write storage_options: {s3: {...}}, by the prefix of the url",
    "model.trust": "code from a checkpoint is never run: remove it",
    "prompt.defaults": "named prompt.fill_null now",
    "prompt.max_bytes": "a constant now, 8 MiB; engine.max_model_len limits a prompt's tokens",
    "prompt.chat.add_generation_prompt": "follows from the task now: none for embed and classify, else one",
    "engine.block_size": "chosen for the device now; EngineConfig has it in Python",
    "engine.kernels": "chosen for the device now; EngineConfig has it in Python",
    "engine.enable_prefix_caching": "always on now; EngineConfig has it in Python",
    "engine.seed": "named sampling.seed now",
    "sampling.defaults": "named sampling.generation_config now: none or model",
    "run.unit_rows": "named output.rows_per_file now",
    "run.unit_tokens": "a constant now; output.rows_per_file limits the rows of a unit",
    "run.window_bytes": "a constant now; run.window_rows limits the rows of a window",
    "run.units_in_flight": "chosen from the batch limits now",
    "run.drain_s": "named run.drain_timeout now, such as 60 s",
    "run.step_timeout_s": "named run.stall_timeout now, such as 5 min",
    "run.load_timeout_s": "follows from run.stall_timeout now",
    "run.progress_timeout_s": "follows from run.stall_timeout now",
    "run.quality_sample": "named quality.sample now",
    "run.ray": "write run.ray_address: local to start Ray for every job",
    "run.metrics_address": "a flag now: pipeline run --metrics HOST:PORT",
    "targets.exit_code": "a flag now: pipeline run --target-exit-code CODE",
    "targets.notify": "named run.notify now",
    "targets.max_error_rate": "write run.max_error_rate, which stops the job",
    "targets.max_row_p95_s": "named targets.max_row_p95 now, such as 2 min",
    **{
        f"targets.{key}": "not a target now; the report shows the figure"
        for key in ("max_usd_per_1m_prompt", "min_kv_used", "max_row_p50_s", "max_row_p99_s", "max_first_token_p95_s")
    },
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
    if dotted(path) in FORMER:
        return "unknown key", FORMER[dotted(path)]
    if name in _KNOWN_ELSEWHERE:
        return "unknown key", _KNOWN_ELSEWHERE[name]
    homes = [
        f"{other}.{name}"
        for other, field in root.model_fields.items()
        if name in getattr(model_of(field.annotation), "model_fields", {})
    ]
    meant = " or ".join(
        f"`{home}`" for home in homes
    )  # the same name in another section before a similar name in this one
    if not meant and (similar := nearest(name, names)):
        meant = f"`{similar}`"
    return "unknown key", f"Did you mean {meant}?" if meant else f"Known here: {', '.join(names)}."


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
        ("input", "path"): "A Parquet or .jsonl file, a folder of them, or a glob.",
        ("model", "path"): "A folder, a Hugging Face id, or `demo`.",
        ("output", "path"): "A folder for the results.",
    }
    return examples.get(tuple(str(step) for step in path), "")


def section_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section at a key; None if it is another kind of value or unknown."""
    model: type[BaseModel] | None = root
    for step in path:
        field = model.model_fields.get(str(step)) if model else None
        model = model_of(field.annotation) if field else None
    return model


def model_of(annotation: Any) -> type[BaseModel] | None:
    choices = [getattr(choice, "__origin__", choice) for choice in getattr(annotation, "__args__", (annotation,))]
    return next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _line(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return (file, int(line)) if line.isdigit() else (location, 0)
