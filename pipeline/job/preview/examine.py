"""Looks at a job without running it: what is in its dataset and output, and whether its parts fit together.

Owns `pipeline validate`. Reads footers, a few rows and the tokenizer; loads no model and writes nothing. Every mistake
found is reported, with the line of the job file that leads to it.
"""

import os
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoints.locate import folder_here, model_kind, why_no_checkpoint
from pipeline.checkpoints.model_values import model_values
from pipeline.config import FromColumn, JobConfig, Mistake
from pipeline.data.columns import is_list, is_text
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import output_schema
from pipeline.data.requests.input_checks import Requests
from pipeline.data.row_texts import RowTexts
from pipeline.data.source import WINDOW_BYTES, Source, cut_windows, open_source
from pipeline.errors import ConfigError, EnvironmentFailed, ModelError, PipelineError, RowError
from pipeline.job.actor.control_tokens import author_texts
from pipeline.job.actor.task_of_job import OF_CHECKPOINT, task_of, with_stored_pooling
from pipeline.job.actor.tasks import JobTask
from pipeline.job.actor.tokenize import Tokenize, chat_of, chat_template
from pipeline.job.planning.checkpoint_limits import against_limits
from pipeline.job.planning.output_place import check_output_place
from pipeline.job.planning.reasoning_markers import with_reasoning_markers
from pipeline.job.planning.reference_model import KEY as REFERENCE_KEY
from pipeline.job.planning.reference_model import check_own, check_same_tokens
from pipeline.job.planning.sampling_defaults import taken, values_of, with_model_defaults
from pipeline.job.preview.prompt_preview import first_prompt, prompt_tokens
from pipeline.machine.host import wall_time
from pipeline.report.record.data_warnings import input_warnings
from pipeline.stores.filesystem import filesystem, is_url, storage_for
from pipeline.stores.redaction import shown_url

MODEL_FILES = ("config.json", "tokenizer.json")  # what every checkpoint has, beside its weights
_MODEL_KINDS = {
    "embedded": "embedded",
    "url": "folder in a store, copied to this machine once",
    "folder": "folder",
    "id": "no such folder here, so a Hugging Face id, looked up when the job runs",
    "missing": "missing",
}
_NUMBERS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty")  # fmt: skip


@dataclass
class Examined:
    """What a job is, as far as it can be told, and what is wrong with it."""

    job: str
    facts: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    requests: Requests | None = None  # where the input is one of requests
    failures: list[str] = field(default_factory=list)  # what could not be looked at, by no mistake of the job

    def to_json(self) -> dict[str, Any]:
        mistakes = [vars(mistake) for mistake in self.mistakes]
        return {"valid": not self.mistakes, "job": self.job, **self.facts, "mistakes": mistakes}


def examine(config: JobConfig) -> Examined:
    """Look at everything that can be seen before a model is loaded."""
    found = Examined(config.name)
    _Examination(config, found).run()
    return found


class _Examination:
    def __init__(self, config: JobConfig, found: Examined) -> None:
        self.config, self.found, self.facts = config, found, found.facts
        self.spec = config.prompt_spec()

    def run(self) -> None:
        self._model()
        self._sampling()
        self._reasoning()
        source = self._source()
        task = self._task()
        if source is None:
            return self._output()
        with self._noting("input.path"):
            kept = self._columns(source)
            if not self.found.mistakes:
                self._output_columns(source, kept, task)
                self._prompts(source, task)
        self._output()

    def _source(self) -> Source | None:
        """The input; None where it cannot be read, or asks for something else than the job."""
        with self._noting("input.path"):
            given = self.config.input
            storage = storage_for(given.path, self.config.storage)
            source = open_source(given.path, storage, given.on_corrupt, of_requests=given.has_requests)
            self._dataset(source)
            return source if self._requests(source) else None
        return None

    @contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        """What fails inside is a mistake of `key`, or a failure of what it names."""
        try:
            yield
        except PipelineError as error:
            self._mistake(key, error)

    def _mistake(self, key: str, error: PipelineError | str, hint: str = "") -> None:
        text, where = error.problem(key) if isinstance(error, PipelineError) else error, self.config.where(key)
        if isinstance(error, EnvironmentFailed):
            self.found.failures.append(f"{where}: {key}: {text}")
        else:
            self.found.mistakes.append(Mistake(where, key, text, hint))

    def _model(self) -> None:
        model = self.config.model
        self.facts["paths_below"] = os.getcwd()
        self.facts["model"] = self._checkpoint("model.path", model.path)
        if model.revision is not None:
            self.facts["model"]["revision"] = model.revision
            if model_kind(model.path) == "folder":
                self._mistake("model.revision", f"{model.path} is a folder; only a Hugging Face id has revisions")
        if (draft := self.config.speculation.model) is not None:
            self.facts["draft model"] = self._checkpoint("speculation.model", draft)
        if self.config.quality.sample > 0:
            self._reference(self.config.quality.model)
        self._limits()

    def _limits(self) -> None:
        """What the checkpoint rules out, where it is on this machine."""
        with self._noting("model.path"):
            folder = folder_here(self.config.model.path, self.config.model.revision)
            if folder is not None and (folder / "config.json").is_file():
                for key, refused in against_limits(self.config, folder):
                    self._mistake(key, refused)

    def _reference(self, named: str | None) -> None:
        """The model that rows are compared with, as far as the checkpoints are on this machine."""
        model, before = self.config.model, len(self.found.mistakes)
        if named is not None:
            self.facts["reference model"] = self._checkpoint(REFERENCE_KEY, named)
        if len(self.found.mistakes) > before:
            return
        with self._noting(REFERENCE_KEY):
            own, theirs = folder_here(model.path, model.revision), named and folder_here(named)
            if own is not None and named is None:
                check_own(self.config, own)
            elif own is not None and theirs:
                check_same_tokens(theirs, own)

    def _sampling(self) -> None:
        """Which of the model's own sampling values are taken, and which are not."""
        self.facts["model_sampling"] = {"taken": {}, "not_taken": {}}
        with self._noting("sampling.generation_config"):
            folder = folder_here(self.config.model.path, self.config.model.revision)
            if folder is not None:
                values = values_of(folder)
                used = taken(self.config, values)
                left = {name: value for name, value in values.items() if name not in used}
                self.facts["model_sampling"] = {"taken": used, "not_taken": left}
                self.config = with_model_defaults(self.config, folder)

    def _reasoning(self) -> None:
        """The markers of reasoning, where the tokenizer is on this machine."""
        with self._noting("sampling.reasoning"):
            folder = folder_here(self.config.model.path, self.config.model.revision)
            if folder is not None:
                self.config = with_reasoning_markers(self.config, folder)
                if (markers := self.config.sampling.reasoning) is not None:
                    self.facts["reasoning"] = vars(markers)

    def _task(self) -> JobTask | None:
        """What is asked in place of completions; None also where it follows from a checkpoint that is not here."""
        config = self.config
        if config.task.type == "generate":
            return None
        self.facts["task"] = {"type": config.task.type, **config.task.keys, "columns_known": False}
        folder = folder_here(config.model.path, config.model.revision)
        is_here = folder is not None and (folder / "config.json").is_file()
        task = None
        with self._noting("task.dimensions" if config.task.type == "embed" else "task"):
            if is_here or config.task.type not in OF_CHECKPOINT:
                folder = folder or Path()
                task = task_of(with_stored_pooling(config, folder), folder)
                self.facts["task"]["columns_known"] = True
        return task

    def _checkpoint(self, key: str, path: str) -> dict[str, str]:
        """What there is to tell of the checkpoint that `key` names."""
        kind, shown = model_kind(path), shown_url(path)
        if kind == "missing":
            self._mistake(key, f"{path}: {why_no_checkpoint(path)}")
        elif kind == "folder" and (reason := why_no_checkpoint(path)):
            self._mistake(key, f"{shown}: {reason}")
        elif kind in ("folder", "url"):
            with self._noting(key):
                for name in missing_model_files(path, storage_for(path, self.config.storage)):
                    self._mistake(key, f"{shown}: no {name} in this folder", "Give a checkpoint's folder.")
        return {"path": shown, "kind": _MODEL_KINDS[kind]}

    def _dataset(self, source: Source) -> None:
        run, limit = self.config.run, self.config.input.limit
        windows = cut_windows(source, run.window_rows, WINDOW_BYTES, limit)
        self.facts["input"] = {
            "path": source.root,
            "files": len(source.files),
            "bytes": source.num_bytes,
            "rows": source.num_rows,
            "rows_to_do": sum(window.num_rows for window in windows),
            "windows": len(windows),
            "skipped_files": [{"file": f.relative, "bytes": f.size, "reason": f.reason} for f in source.skipped],
            "columns": {f.name: str(f.type) for f in source.schema},
        }
        self.facts["warnings"] = [vars(warning) for warning in input_warnings(source.passed_over, source.unified_texts)]

    def _requests(self, source: Source) -> bool:
        """Of lines that are requests: for which endpoint they are, and so what the prompt and the defaults are. Whether
        they ask for what the job does."""
        found = source.requests
        if found is not None:
            try:
                self.config = self.config.of_lines(found)
            except ConfigError as error:
                self._mistake(str(error).partition(":")[0], error)
                return False
            self.found.requests = found
            self.spec = self.config.prompt_spec()
            self.facts["requests"] = {
                "endpoint": found.endpoint,
                "model": found.model,
                "ignored": list(found.ignored),
            }
        return True

    def _columns(self, source: Source) -> list[str]:
        """Every column that the job names is there, in each file, and of a kind that fits."""
        config, prompt = self.config, self.config.prompt
        given = config.input.columns
        kept = list(source.every_column if given is None else given)
        prompt_key = next(f"prompt.{k}" for k in ("template", "column", "messages") if getattr(prompt, k) is not None)
        wanted = [("input.columns", name) for name in given or ()]
        of_prompt: tuple[str, ...] = ()
        with self._noting(prompt_key):
            self.spec = self.spec.of_input(source.every_column)
            of_prompt = self.spec.columns
        wanted += [(prompt_key, name) for name in of_prompt]
        wanted += [(f"sampling.{option}", name) for option, name in config.sampling_columns().items()]
        texts = self._texts(source)
        wanted += [] if texts is None else [(texts.key, name) for name in texts.columns]
        if config.quality.sample > 0 and config.quality.column is not None:
            wanted.append(("quality.column", config.quality.column))
        asked_for = {name for _, name in wanted}
        wanted += [("input.columns", name) for name in kept if name not in asked_for]  # left out: all of them
        absent = set()
        for key, name in wanted:
            absent.add(name)
            with self._noting(key):
                source.check_columns([name])
                absent.remove(name)
        if of_prompt and not absent & set(of_prompt):
            with self._noting(prompt_key):
                self.spec.check(source.schema)
        if texts is not None and not absent & set(texts.columns):
            with self._noting(texts.key):
                texts.check(source.schema)
        for option, name in config.sampling_columns().items():
            if option in _NUMBERS and name not in absent and is_text(source.schema.field(name).type):
                self._mistake(f"sampling.{option}", f"column {name!r} is text, expected numbers")
            if option.startswith("structured_outputs.") and name not in absent:
                self._structured_column(f"sampling.{option}", name, source.schema.field(name).type)
        asked = [name for name in of_prompt if name != self.spec.refused]
        self.facts["columns"] = {"kept": kept, "prompt": asked, "sampling": config.sampling_columns()}
        return kept

    def _texts(self, source: Source) -> RowTexts | None:
        """The texts of the rows beside their prompts; None where there are none, or they name a column wrongly."""
        texts = self.config.unit_spec().texts
        if texts is not None:
            with self._noting(texts.key):
                return texts.of_input(source.every_column)
        return None

    def _structured_column(self, key: str, name: str, kind: Any) -> None:
        if key.endswith(".choice"):
            if not (is_list(kind) and is_text(kind.value_type)):
                self._mistake(key, f"column {name!r} is {kind}, expected lists of texts")
        elif not is_text(kind):
            self._mistake(key, f"column {name!r} is {kind}, expected text")

    def _output_columns(self, source: Source, kept: list[str], task: JobTask | None) -> None:
        import pyarrow as pa

        with self._noting("output.rename"):
            fields = [source.kept.field(name) for name in kept]
            config = self.config
            own = None if config.task.type == "generate" else () if task is None else task.fields
            schema: pa.Schema = output_schema(pa.schema(fields), config.output.rename, config.result_shape(own))
            self.facts["output_columns"] = {f.name: str(f.type) for f in schema}

    def _prompts(self, source: Source, task: JobTask | None) -> None:
        """What the model gets, where its tokenizer is on this machine."""
        config, tokenize, chat = self.config, None, self.config.prompt.chat
        key = "model.path" if chat is None else "prompt.chat" if chat.template is None else "prompt.chat.template"
        with self._noting(key):
            folder = folder_here(config.model.path, config.model.revision)
            if folder is not None:
                template = chat_template(config, folder)
                from pipeline.tokenization.tokenizer import Tokenizer

                tokenizer = Tokenizer.from_folder(str(folder), template)
                params, now = config.sampling_params(), wall_time()
                author = author_texts(config)
                tokenize = Tokenize(tokenizer, params, config.seed, chat_of(config, now), task=task, author=author)
            else:
                config.chat_template()
            self.facts["first_prompt"] = first_prompt(config, source, tokenize)
            if tokenize is None or folder is None:
                self.facts["prompt_tokens"] = None
            else:
                told = model_values(folder).get("max_position_embeddings")
                context = told if isinstance(told, int) else None  # what is wrong with it the engine says
                self.facts["prompt_tokens"], found = prompt_tokens(config, source, tokenize, context)
                self.facts["warnings"] += map(vars, found.warnings())
            first = self.facts["first_prompt"]
            if first and first["error"] == RowError.INVALID_LABELS and not isinstance(config.task.labels, FromColumn):
                self._mistake("task.labels", first["error_message"].removeprefix("task.labels: "))

    def _output(self) -> None:
        output = self.config.output
        facts: dict[str, Any] = {"path": shown_url(output.path)}
        with self._noting("output.path"):
            done = PartStore(output.path, storage_for(output.path, self.config.storage)).list()
            facts |= {"parts_there": done.num_units, "rows_there": done.num_rows}
            check_output_place(self.config)
        self.facts["output"] = facts


def missing_model_files(path: str, storage: Mapping[str, Any]) -> list[str]:
    """Which of MODEL_FILES are not in a folder or at an fsspec url. Raises ModelError, EnvironmentFailed."""
    if not is_url(path):
        return [name for name in MODEL_FILES if not (Path(os.path.expanduser(path)) / name).is_file()]
    shown = shown_url(path)
    try:
        fs, root = filesystem(path, storage)
        return [name for name in MODEL_FILES if not fs.exists(posixpath.join(root, name))]
    except PipelineError:
        raise
    except Exception as error:
        # each store's library has exceptions of its own, whose texts may repeat what is secret
        given = ", ".join(sorted(storage)) or "none given"
        raise ModelError(
            f"{shown}: cannot be opened ({type(error).__name__}); are the url, the rights to it and its storage "
            f"({given}) right?"
        ) from None
