"""Inspect a job without running it: its dataset, its output, and whether its settings fit together.

Implements `pipeline validate`. Reads footers, a few rows and the tokenizer; loads no model and writes nothing. Reports
every mistake, with the line of the job file that causes it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoints.locate import model_kind
from pipeline.config import FromColumn, JobConfig, Mistake
from pipeline.config.identity import window_bytes
from pipeline.data.source import Source, cut_windows
from pipeline.errors import EnvironmentFailed, PipelineError, RowError
from pipeline.job.actor.control_tokens import author_texts
from pipeline.job.actor.tokenize import Tokenize, chat_of
from pipeline.job.planning.fingerprint import check_output
from pipeline.job.planning.locate import NotKnown, OnThisMachine
from pipeline.job.planning.plan import plan_of
from pipeline.job.planning.resolution import OF_JOB, Resolution
from pipeline.job.preview.prompt_preview import first_prompt, prompt_tokens
from pipeline.machine.host import wall_time
from pipeline.model.config_values import model_values
from pipeline.report.record.data_warnings import input_warnings
from pipeline.stores.redaction import shown_url

_MODEL_KINDS = {
    "embedded": "embedded",
    "url": "folder in a store, copied to this machine once",
    "folder": "folder",
    "id": "not a local folder, so a Hugging Face id, resolved when the job runs",
    "missing": "missing",
    "none": "known to the server",
}


@dataclass
class ValidationResult:
    """Facts of a job as far as they are known, and its mistakes."""

    job: str
    resolution: Resolution
    facts: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # checks that failed for reasons outside the job

    def to_json(self) -> dict[str, Any]:
        mistakes = [vars(mistake) for mistake in self.mistakes]
        return {"valid": not self.mistakes, "job": self.job, **self.facts, "mistakes": mistakes}

    def note(self, key: str, error: PipelineError) -> None:
        text, location = error.problem(key), self.resolution.config.location(key)
        if isinstance(error, EnvironmentFailed):
            self.failures.append(f"{location}: {key}: {text}")
        else:
            self.mistakes.append(Mistake(location, key, text))

    @contextmanager
    def noting(self, key: str) -> Iterator[None]:
        """Record errors raised inside as mistakes of `key`, or as failures of its target."""
        try:
            yield
        except PipelineError as error:
            self.note(error.key or key, error)


def validate_job(config: JobConfig) -> ValidationResult:
    """Check everything that needs no loaded model."""
    resolution = Resolution(config, OnThisMachine())
    found = ValidationResult(config.name, resolution)
    for error in resolution.failures(OF_JOB):
        found.note(error.key, error)
    found.facts = {"paths_below": os.getcwd(), **_checkpoints(resolution)}
    if resolution.knows("source"):
        found.facts |= _input(config, resolution.source)
    if (lines := resolution.requests) is not None:
        names = ("endpoint", "model")
        found.facts["requests"] = {name: getattr(lines, name) for name in names} | {"ignored": list(lines.ignored)}
    if config.task.type != "generate":
        known = resolution.knows("task")
        found.facts["task"] = {"type": config.task.type, **config.task.keys, "columns_known": known}
    if not found.mistakes and not found.failures:
        found.facts |= _columns(resolution)
        _prompts(found)
    _output(found)
    return found


def _checkpoints(found: Resolution) -> dict[str, Any]:
    config, named = found.config, found.config.quality.model
    facts: dict[str, Any] = {"model": _checkpoint(config.model.path)}
    if config.model.revision is not None:
        facts["model"]["revision"] = config.model.revision
    if config.speculation.model is not None:
        facts["draft model"] = _checkpoint(config.speculation.model)
    if used := config.used_adapters:
        facts["adapters"] = {name: _checkpoint(path) for name, path in used.items()}
    if config.quality.sample > 0 and named is not None:
        facts["reference model"] = _checkpoint(named)
    facts["model_sampling"] = found.model_sampling
    if found.knows("sampling") and not isinstance(markers := found.sampling.reasoning, str | None):
        facts["reasoning"] = vars(markers)
    return facts


def _checkpoint(path: str) -> dict[str, str]:
    return {"path": shown_url(path), "kind": _MODEL_KINDS[model_kind(path)]}


def _input(config: JobConfig, source: Source) -> dict[str, Any]:
    windows = cut_windows(source, config.run.window_rows, window_bytes(config), config.input.limit)
    facts = {
        "path": source.root,
        "files": len(source.files),
        "bytes": source.num_bytes,
        "rows": source.num_rows,
        "rows_to_do": sum(window.num_rows for window in windows),
        "windows": len(windows),
        "skipped_files": [{"file": f.relative, "bytes": f.size, "reason": f.reason} for f in source.skipped],
        "columns": {f.name: str(f.type) for f in source.schema},
    }
    warnings = [
        vars(warning)
        for warning in input_warnings(source.passed_over, source.unified_texts, source.large_compressed, source.empty)
    ]
    return {"input": facts, "warnings": warnings}


def _columns(found: Resolution) -> dict[str, Any]:
    spec, units = found.spec, found.units
    columns = {
        "kept": list(units.kept),
        "prompt": [name for name in spec.columns if name != spec.refused],
        "sampling": units.sampling_columns,
    }
    return {"columns": columns, "output_columns": {f.name: str(f.type) for f in found.schema}}


def _prompts(examined: ValidationResult) -> None:
    """Add the facts about prompts, if the tokenizer is on this machine."""
    found, facts, tokenize, context = examined.resolution, examined.facts, None, None
    config, chat = found.config, found.prompt.chat
    key = "model.path" if chat is None else "prompt.chat" if chat.chat_template is None else "prompt.chat.chat_template"
    with examined.noting(key):
        if found.knows("model") and found.model is not None:
            from pipeline.tokenization.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_folder(str(found.model), found.chat_template)
            chat, author = chat_of(found.prompt, config.task.type, wall_time()), author_texts(found.spec, found.prompt)
            tokenize = Tokenize(tokenizer, found.params, config.seed, chat, task=found.task, author=author)
            longest = model_values(found.model).get("max_position_embeddings")
            context = longest if isinstance(longest, int) else None  # the engine reports an invalid value
        first = facts["first_prompt"] = first_prompt(found.units, found.source, tokenize)
        facts["prompt_tokens"] = None
        if tokenize is not None:
            facts["prompt_tokens"], rows = prompt_tokens(config, found.units, found.source, tokenize, context)
            facts["warnings"] += map(vars, rows.warnings())
        if first and first["error"] == RowError.INVALID_LABELS and not isinstance(config.task.labels, FromColumn):
            problem_text = first["error_message"].removeprefix("task.labels: ")
            examined.mistakes.append(Mistake(config.location("task.labels"), "task.labels", problem_text))


def _output(examined: ValidationResult) -> None:
    """Add the facts about the output, and check that it belongs to this job, as far as the job's identity is known."""
    found = examined.resolution
    facts: dict[str, Any] = {"path": shown_url(found.config.output.path)}
    examined.facts["output"] = facts
    if not found.knows("store") or any(mistake.key == "output.path" for mistake in examined.mistakes):
        return
    with examined.noting("output.path"):
        with suppress(NotKnown):
            check_output(found.store, plan_of(found, "cpu").fingerprint)
        done = found.store.list()
        facts |= {"parts_there": done.num_units, "rows_there": done.num_rows}
