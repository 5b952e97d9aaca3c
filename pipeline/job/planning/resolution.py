"""Resolve a job: look up and check everything that its file leaves open, in one order for all commands.

`run`, `plan` and `generate` raise the first failure; `validate` and `doctor` collect all. A check is skipped if it
needs the result of a failed one, or a checkpoint that is not on this machine while downloads are off.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from pipeline.checkpoints.chat_template import ADVICE, has_template, read_template
from pipeline.checkpoints.locate import model_kind
from pipeline.config import FromColumn, JobConfig
from pipeline.config.contradictions import contradiction_of_lines, of_several_requests
from pipeline.config.requests import prompt_of, sampling_of
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.sections.task import TaskSection
from pipeline.data.columns import is_list, is_text
from pipeline.data.conditions import Condition
from pipeline.data.files.listing import would_find
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import RESULT_NAMES, ResultShape, output_schema, without_dropped_by
from pipeline.data.prompts import PromptSpec
from pipeline.data.requests.input_checks import Requests
from pipeline.data.row_texts import RowTexts
from pipeline.data.source import Source, open_source
from pipeline.data.units import UnitSpec
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.tasks import Embed
from pipeline.errors import ConfigError, PipelineError
from pipeline.job.actor.resolved_job import (
    ResolvedJob,
    ResolvedStep,
    prompt_spec,
    result_shape,
    sampling_columns,
    sampling_params,
    unit_spec,
)
from pipeline.job.actor.row_function import RowFunction
from pipeline.job.actor.task_of_job import classify_task, embed_task, plain_task
from pipeline.job.actor.tasks import EmbedTask, JobTask
from pipeline.job.planning.appended import Batches
from pipeline.job.planning.checkpoint_values import (
    SAMPLING_FILE,
    check_adapter,
    exceeded_limits,
    reasoning_markers,
    shown_values,
    stored_sampling,
    with_stored_sampling,
)
from pipeline.job.planning.locate import Fetched, Locate, Log, NotKnown, OnThisMachine
from pipeline.job.planning.reference_model import KEY as REFERENCE
from pipeline.job.planning.reference_model import check_own, check_same_tokens
from pipeline.job.planning.step_prompts import StepPrompt, max_new_tokens, resolved_steps, step_prompts
from pipeline.stores.filesystem import storage_for
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts

_NUMBERS = ("max_tokens", "min_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs",
            "thinking_token_budget")  # fmt: skip


def silent(text: str) -> None:
    pass


class Columns(Protocol):
    """Columns of an input: of a `Source`, or of an in-memory table."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def requests(self) -> Requests | None: ...
    @property
    def every_column(self) -> tuple[str, ...]: ...
    def check_columns(self, names: Iterable[str]) -> None: ...


Fact = Literal["store", "source", "spec", "texts", "model", "sampling", "task"]


class Resolution:
    """A job during its resolution. Each method is a check: it raises or yields the job's problems, and stores its
    results as facts. Reading a fact that no check has stored raises NotKnown.

    Facts are declared here, so that a misspelt one is an error of types, not a check that is silently skipped.
    """

    store: PartStore
    source: Source
    table: Columns  # columns of the input
    batches: Batches
    requests: Requests | None  # set if the input's lines are requests
    prompt: PromptSection
    task_section: TaskSection
    spec: PromptSpec
    texts: RowTexts | None  # texts of rows besides their prompts
    kept: tuple[str, ...]  # input columns in the output
    step_prompts: tuple[StepPrompt, ...]
    steps: tuple[ResolvedStep, ...]
    model: Path | None
    draft: Path | None
    adapters: Mapping[str, Path]
    reference: Path | None
    model_sampling: dict[str, dict[str, Any]]  # values of the checkpoint: "taken" and "not_taken"
    sampling: SamplingSection
    chat_template: str | None
    task: JobTask | None
    params: SamplingParams
    units: UnitSpec
    results: ResultShape
    schema: pa.Schema  # schema of the output

    def __init__(
        self,
        config: JobConfig,
        locate: Locate,
        log: Log = silent,
        retries: RetryCounts | None = None,
        append: bool = False,
        row_fn: RowFunction | None = None,
    ) -> None:
        """log: receives the values taken from the checkpoint and the request fields without effect. retries: counts
        retried requests to stores. append: accept input files that are new since the first run. row_fn: makes the
        requests of each row."""
        self.config, self._locate, self._log = config, locate, log
        self._retries, self._append, self._row_fn = retries, append, row_fn
        self.batches = Batches()
        self.prompt, self.task_section = config.prompt, config.task
        self.requests = self.reference = None

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            raise NotKnown(name) if name in Resolution.__annotations__ else AttributeError(name)

    def knows(self, fact: Fact) -> bool:
        return fact in vars(self)

    def failures(self, checks: "tuple[JobCheck, ...]") -> Iterator[PipelineError]:
        """Run `checks` and yield their failures, each with a key of the job file."""
        for check in checks:
            with suppress(NotKnown):
                try:
                    found = [*(check.run(self) or ())]
                except PipelineError as error:
                    found = [error]
                yield from (_keyed(check.key, error) for error in found)

    def checked(self, checks: "tuple[JobCheck, ...]") -> "Resolution":
        """Run `checks` and raise the first failure."""
        for error in self.failures(checks):
            raise error
        return self

    def resolved(self) -> ResolvedJob:
        """Return the results of all checks. Raises NotKnown if one is missing."""
        return ResolvedJob(
            config=self.config,
            prompt=self.prompt,
            sampling=self.sampling,
            task_section=self.task_section,
            model=self.model,
            draft=self.draft,
            adapters=self.adapters,
            reference=self.reference,
            chat_template=self.chat_template,
            task=self.task,
            params=self.params,
            units=self.units,
            results=self.results,
            steps=self.steps,
            row_fn=self._row_fn,
        )

    def _storage(self, path: str) -> dict[str, Any]:
        return storage_for(path, self.config.storage_options)

    def output_path(self) -> None:
        """Reject an output whose parts the next run would read as input. Urls that cannot be opened are left to the
        code that opens them."""
        given, output = self.config.input.path, self.config.output.path
        with suppress(ImportError, ValueError, TypeError, OSError):
            if would_find(given, self._storage(given), output, self._storage(output)):
                raise ConfigError(
                    f"output.path {shown_url(output)}: is inside input.path {shown_url(given)}, so the next run would "
                    "read its parts as input; choose a folder outside of it, or one whose name begins with _"
                )

    def appended_batches(self) -> None:
        output = self.config.output.path
        store = PartStore(output, self._storage(output), self._retries)
        self.batches = Batches.load(store, self._append)
        self.store = store

    def input_files(self) -> None:
        given, batches = self.config.input, self.batches
        source = open_source(
            given.path,
            self._storage(given.path),
            given.on_corrupt,
            self._retries,
            batches.is_later,
            given.format,
        )
        self.source, self.batches = batches.arranged(source)
        self.table = self.source
        if given.limit is not None and (self.batches.more or self.batches.later_files):
            raise ConfigError(
                "input.limit: files cannot be appended to an output of the first rows; remove input.limit or --append",
                key="input.limit",
            )

    def lines(self) -> None:
        """Apply the values of request lines, which override the job file's: their endpoint determines the prompt.
        Reject lines that contradict the job."""
        found, written = self.table.requests, self.config.data.get("prompt")
        if found is None:
            return
        wants_chats = isinstance(written, Mapping) and written.get("chat") not in (None, False)
        if wrong := contradiction_of_lines(self.config, found, wants_chats):
            del self.table  # its columns belong to a different job
            raise ConfigError(": ".join(wrong), key=wrong[0])
        self.requests, self.prompt = found, prompt_of(found.endpoint, self.prompt)
        if found.dimensions is not None:
            self.task_section = self.task_section.model_copy(update={"dimensions": found.dimensions})
        if found.ignored:
            self._log(f"these fields of the requests have no effect: {', '.join(found.ignored)}")

    def prompt_spec(self) -> None:
        if self.prompt.images and find_spec("PIL") is None:
            raise ConfigError("prompt.images: needs Pillow: pip install 'parquet-batch-inference[images]'")
        with _with_key(self._prompt_key):
            self.spec = prompt_spec(self.config, self.prompt).of_input(self.table.every_column)

    def row_texts(self) -> None:
        """Find the texts that rows have in addition to their prompts."""
        texts = self.task_section.row_texts()
        with _with_key(texts.key if texts else ""):
            self.texts = texts and texts.of_input(self.table.every_column)

    def columns(self) -> Iterator[PipelineError]:
        """Check that every column that the job names exists in each file and has a suitable type."""
        table, options = self.table, sampling_columns(self.config)
        given, quality = self.config.input.columns, self.config.quality.column
        images, all_columns = self.prompt.images, table.every_column
        kept = tuple(name for name in all_columns if name not in images) if given is None else tuple(given)
        reads: list[tuple[str, PromptSpec | RowTexts | Condition]] = []
        if self.knows("spec"):
            reads.append((self._prompt_key, self.spec))
        if self.knows("texts") and self.texts is not None:
            reads.append((self.texts.key, self.texts))
        if (when := self.config.input.condition) is not None:
            reads.append((when.key, when))
        named = [("input.columns", name) for name in given or ()]
        # a condition reports a column that no file has, with its place in the text
        named += [(k, name) for k, each in reads for name in each.columns if each is not when or name in all_columns]
        named += [(f"sampling.{option}", name) for option, name in options.items()]
        adapter = self.config.model.adapter
        if isinstance(adapter, FromColumn):
            named.append(("model.adapter", adapter.column))
        if self.config.quality.sample > 0 and quality is not None:
            named.append(("quality.column", quality))
        elsewhere = {name for _, name in named}
        named += [("input.columns", name) for name in kept if name not in elsewhere]  # the default: all
        failed, absent = [], set()
        for key, name in named:
            try:
                table.check_columns([name])
            except PipelineError as error:
                absent.add(name)
                failed.append(type(error)(f"{key}: {error}", key=key))
        for key, each in reads:
            if absent.isdisjoint(each.columns):
                try:
                    each.check(table.schema)
                except PipelineError as error:
                    failed.append(_keyed(key, error))
        for option, name in options.items():
            key = f"sampling.{option}"
            if name not in absent and (reason := _unfit(option, name, table.schema.field(name).type)):
                failed.append(ConfigError(f"{key}: {reason}", key=key))
        if isinstance(adapter, FromColumn) and adapter.column not in absent:
            kind = table.schema.field(adapter.column).type
            if not is_text(kind):
                reason = f"column {adapter.column!r} is {kind}, expected text: names from model.adapters"
                failed.append(ConfigError(f"model.adapter: {reason}", key="model.adapter"))
        if not failed:
            self.kept = kept
        yield from failed

    def row_function(self) -> Iterator[PipelineError]:
        """Check that the job can have a row function."""
        if self._row_fn is None:
            return
        if self.config.steps:
            yield ConfigError("steps: a job with row_fn makes all requests there; remove them, or row_fn", key="steps")
        for key, reason in of_several_requests(self.config, "row_fn"):
            yield ConfigError(f"{key}: {reason}")
        for field in self._row_fn.columns:
            if field.name in (*self.kept, *RESULT_NAMES):
                raise ConfigError(f"columns of row_fn: the output has a column {field.name!r}; choose another name")

    def prompts_of_steps(self) -> Iterator[PipelineError]:
        """Check what the prompts of steps refer to."""
        if not self.config.steps:
            self.step_prompts = ()
            return
        found = list(step_prompts(self.config, self.table.schema, self.table.every_column))
        prompts = [one for one in found if isinstance(one, StepPrompt)]
        self.table.check_columns(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
        if len(prompts) == len(found):
            self.step_prompts = tuple(prompts)
        yield from (one for one in found if isinstance(one, PipelineError))

    def resolve_steps(self) -> None:
        self.steps = tuple(resolved_steps(self.config, self.step_prompts, self.model)) if self.config.steps else ()

    @property
    def _prompt_key(self) -> str:
        return next(f"prompt.{k}" for k in ("template", "column", "messages") if getattr(self.prompt, k) is not None)

    def revision(self) -> None:
        model = self.config.model
        if model.revision is not None and model_kind(model.path) == "folder":
            raise ConfigError(f"model.revision: {model.path} is a folder; only a Hugging Face id has revisions")

    def checkpoint(self) -> None:
        model = self.config.model
        if self.config.server is not None:
            self.model = None
        else:
            self.model = self._locate.model("model.path", model.path, self.config.storage_options, model.revision)

    def limits(self) -> Iterator[PipelineError]:
        return iter(()) if self.model is None else exceeded_limits(self.config, self.model)

    def draft_checkpoint(self) -> None:
        named = self.config.speculation.model
        storage = self.config.storage_options
        self.draft = None if named is None else self._locate.model("speculation.model", named, storage, None)

    def adapter_checkpoints(self) -> Iterator[PipelineError]:
        """Find the adapters that rows may use, and check that they fit the checkpoint."""
        found, failed, unknown = {}, [], False
        for name, path in self.config.used_adapters.items():  # none with a server, which has the model
            key = f"model.adapters.{name}"
            try:
                found[name] = self._locate.adapter(key, path, self.config.storage_options)
                assert self.model is not None
                check_adapter(found[name], self.model)
            except NotKnown:
                unknown = True
            except PipelineError as error:
                failed.append(_keyed(key, error))
        if not failed and not unknown:
            self.adapters = found
        yield from failed

    def reference_checkpoint(self) -> None:
        """Find the model that rows of `quality.sample` are compared with."""
        config, named = self.config, self.config.quality.model
        if config.quality.sample == 0 or self.model is None:
            return
        if named is None:
            check_own(config, self.model)
            self.reference = self.model
        else:
            self.reference = self._locate.model(REFERENCE, named, config.storage_options, None)
            check_same_tokens(self.reference, self.model)
            for folder in self.adapters.values():
                check_adapter(folder, self.reference)

    def sampling_values(self) -> None:
        """Combine sampling values. The job's own take precedence, then the model's if requested, then the line
        API's."""
        sampling, is_wanted = self.config.sampling, self.config.sampling.generation_config == "model"
        self.model_sampling = {"taken": {}, "not_taken": {}}
        if self.knows("model") and self.model is not None:
            values = stored_sampling(self.model)
            used = {k: v for k, v in values.items() if is_wanted and k not in sampling.model_fields_set}
            self.model_sampling = {"taken": used, "not_taken": {k: v for k, v in values.items() if k not in used}}
            if is_wanted:
                self._log(f"sampling by the model's {SAMPLING_FILE}: {shown_values(used) or 'no values to use'}")
            if used:
                sampling = with_stored_sampling(sampling, used, self.model)
        if (lines := self.requests) is not None:
            sampling = sampling_of(lines.endpoint, sampling, lines.samples, lines.prompt_logprobs)
        self.sampling = sampling

    def reasoning(self) -> None:
        if self.sampling.reasoning is not None and self.model is not None:
            found = reasoning_markers(self.sampling, self.model)
            self.sampling = self.sampling.model_copy(update={"reasoning": found})

    def row_task(self) -> None:
        config, shown = self.config, shown_url(self.config.model.path)
        match config.task.type:
            case "embed" if self.model is None:
                length = config.task.dimensions or 0
                self.task = EmbedTask(Embed(dimensions=length), length)
            case "embed":
                assert self.model is not None
                self.task_section, self.task = embed_task(self.task_section, self.model, shown)
            case "classify":
                assert self.model is not None
                self.task = classify_task(config.task.activation, self.model, shown)
            case _:
                self.task = plain_task(config.task)

    def template(self) -> None:
        chat = self.prompt.chat
        if chat is not None and chat.chat_template is not None:
            with _with_key("prompt.chat.chat_template"):
                self.chat_template = read_template(chat.chat_template)
            return
        if chat is not None and self.model is not None and not has_template(self.model):
            raise ConfigError(
                f"prompt.chat: {shown_url(self.config.model.path)}: the checkpoint has no chat template "
                f"(chat_template.jinja, or `chat_template` in tokenizer_config.json). {ADVICE}"
            )
        self.chat_template = None

    def rows(self) -> None:
        self.params = sampling_params(self.sampling)
        read = dict.fromkeys(name for prompt in self.step_prompts for name in prompt.columns)
        if self._row_fn is not None:  # its rows have the kept columns, and these
            images = self.prompt.images
            read = dict.fromkeys(name for name in self.spec.columns if name not in (*self.kept, *images))
        tokens = max_new_tokens(self.config.steps)
        self.units = unit_spec(self.config, self.spec, self.texts, self.params, self.kept, tuple(read), tokens)

    def result_columns(self) -> None:
        """Determine the result columns. The task of a checkpoint that is not on this machine counts as having none."""
        task = self.task if self.knows("task") else None
        of_task = None if self.config.task.type == "generate" else () if task is None else task.fields
        columns = tuple(prompt.field for prompt in self.step_prompts)
        returned = () if self._row_fn is None else self._row_fn.columns
        self.results = result_shape(self.config, self.sampling, of_task, columns, returned)

    def output_columns(self) -> None:
        fields = [self.source.kept.field(name) for name in self.kept]
        self.schema = output_schema(pa.schema(fields), self.config.output.rename, self.results)
        accept = self.config.output.condition
        if accept is not None and self.knows("task"):  # else columns of the task are missing
            with _with_key(accept.key):
                accept.check(without_dropped_by(self.schema))


@dataclass(frozen=True)
class JobCheck:
    """A check of a job. key: the job file's key for failures that name no other."""

    key: str
    run: Callable[[Resolution], Iterator[PipelineError] | None]


# Checks without a model come first, so that a mistake in the input is found before a checkpoint is downloaded.
OF_ROWS = (
    JobCheck("input.path", Resolution.lines),
    JobCheck("prompt", Resolution.prompt_spec),
    JobCheck("prompt", Resolution.row_texts),
    JobCheck("input.columns", Resolution.columns),
    JobCheck("steps", Resolution.prompts_of_steps),
    JobCheck("input.columns", Resolution.row_function),
    JobCheck("model.revision", Resolution.revision),
    JobCheck("model.path", Resolution.checkpoint),
    JobCheck("model.path", Resolution.limits),
    JobCheck("speculation.model", Resolution.draft_checkpoint),
    JobCheck("model.adapters", Resolution.adapter_checkpoints),
    JobCheck("sampling.generation_config", Resolution.sampling_values),
    JobCheck("sampling.reasoning", Resolution.reasoning),
    JobCheck("task", Resolution.row_task),
    JobCheck("steps", Resolution.resolve_steps),
    JobCheck("prompt.chat", Resolution.template),
    JobCheck("sampling", Resolution.rows),
    JobCheck("task", Resolution.result_columns),
)
OF_PROMPTS = (
    JobCheck("input.path", Resolution.input_files),
    JobCheck("input.path", Resolution.lines),
    JobCheck("prompt", Resolution.prompt_spec),
    JobCheck("prompt.chat", Resolution.template),
)
OF_JOB = (
    JobCheck("output.path", Resolution.output_path),
    JobCheck("output.path", Resolution.appended_batches),
    JobCheck("input.path", Resolution.input_files),
    *OF_ROWS,
    JobCheck(REFERENCE, Resolution.reference_checkpoint),
    JobCheck("output.rename", Resolution.output_columns),
)


def resolve_job(
    config: JobConfig,
    *,
    log: Log = silent,
    retries: RetryCounts | None = None,
    append: bool = False,
    row_fn: RowFunction | None = None,
) -> Resolution:
    """Resolve a job for a run, downloading checkpoints. log: receives progress and the values taken from files.
    retries, append, row_fn: see `Resolution`. Raises the first failure."""
    return Resolution(config, Fetched(log, retries), log, retries, append, row_fn).checked(OF_JOB)


def resolve_rows(config: JobConfig, table: Columns, log: Log) -> ResolvedJob:
    """Resolve how a job processes the rows of `table`, independent of its input and output. Raises the first
    failure."""
    found = Resolution(config, Fetched(log, None), log)
    found.table = table
    return found.checked(OF_ROWS).resolved()


def resolve_prompts(config: JobConfig, model: Path) -> Resolution:
    """Resolve the location of a job's prompts and their rendering as chats, for the caller's model. Raises the first
    failure."""
    found = Resolution(config, OnThisMachine())
    found.model = model
    return found.checked(OF_PROMPTS)


def _keyed(key: str, error: PipelineError) -> PipelineError:
    error.key = error.key or key
    return error


@contextmanager
def _with_key(key: str) -> Iterator[None]:
    """Set `key` on errors raised inside."""
    try:
        yield
    except PipelineError as error:
        error.key = key
        raise


def _unfit(option: str, name: str, kind: pa.DataType) -> str:
    """Return why a column of this type cannot hold values of a sampling option, or ""."""
    if option in _NUMBERS and is_text(kind):
        return f"column {name!r} is text, expected numbers"
    if option == "structured_outputs.choice" and not (is_list(kind) and is_text(kind.value_type)):
        return f"column {name!r} is {kind}, expected lists of texts"
    is_form = option.startswith("structured_outputs.") and option != "structured_outputs.choice"
    return f"column {name!r} is {kind}, expected text" if is_form and not is_text(kind) else ""
