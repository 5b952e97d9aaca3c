"""What happens to a unit inside an engine actor: Tokenize, Generate (the supervisor's), Write. No Ray here.

Unit -> Tokenize -> requests, and completions of rows that failed before the engine
     -> Generate -> completions, in the order they finished
     -> Write    -> the part on disk, rows in the input's order, and a summary for the driver
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore, StoredPart
from pipeline.data.output.result_columns import output_schema
from pipeline.data.units import Unit
from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.errors import ConfigError, PipelineError, RowError
from pipeline.job.retry_failed import patched
from pipeline.report.row_stats import (
    MAX_EXAMPLES,
    MAX_MESSAGE,
    ErrorExample,
    LengthBucket,
    RowStats,
    Timing,
    latency_of,
    length_bucket,
)
from pipeline.tokenization.chat import ChatTemplateError


class Tokenizer(Protocol):
    """What Tokenize needs: `pipeline.tokenization.tokenizer.Tokenizer`, or a test's fake."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...
    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        system: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> list[int]: ...


@dataclass(frozen=True)
class Chat:
    """How a prompt becomes a chat. With `from_messages` the unit's prompts are messages as JSON. `now`: what a template
    that asks for the date is told."""

    from_messages: bool = False
    system: str | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None


@dataclass(frozen=True)
class UnitSummary:
    """What became of a unit; travels to the driver as JSON. With `failure_kind` not None nothing was written:
    it names a class of `pipeline.errors`, or is empty for a defect, whose traceback is then the message.
    `found`: its part was there before any work for it, and `totals` are of that."""

    window: int
    unit: int
    totals: PartTotals = field(default_factory=PartTotals)
    written: bool = False  # False: the part was there already
    row_stats: RowStats = field(default_factory=RowStats)
    write_us: int = 0
    renewed: PartTotals | None = None  # of `totals` what was computed now; None: all
    found: bool = False
    failure_kind: str | None = None
    failure_message: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "UnitSummary":
        raw = json.loads(text)
        totals = PartTotals(**raw["totals"])
        renewed = PartTotals(**raw["renewed"]) if raw["renewed"] is not None else None
        return cls(**{**raw, "totals": totals, "renewed": renewed, "row_stats": RowStats.from_json(raw["row_stats"])})


def row_seed(job_seed: int, source_file: str, source_row: int) -> int:
    """A row's 63-bit seed: it depends on nothing but the job's seed and where the row comes from."""
    key = f"{job_seed}\0{source_file}\0{source_row}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Tokenize:
    """Turns a unit's prompts into requests. A request's row_id is the row's index in the unit."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, seed: int, chat: Chat | None) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        self._chat = chat
        self._chat_lock = threading.Lock()  # the template is rendered by one process for all threads

    def __call__(self, unit: Unit) -> tuple[list[Request], list[Completion]]:
        """The requests to make, and the completions of rows that failed already."""
        failed: list[Completion] = []
        wanted: list[tuple[int, str, SamplingParams]] = []
        columns = [
            unit.own(name).to_pylist()
            for name in ("_prompt", "_error", "_error_message", "_params", "source_file", "source_row")
        ]
        for i, (prompt, error, message, own, file, row) in enumerate(zip(*columns, strict=True)):
            if error is not None:
                failed.append(failed_row(i, error, message or ""))
                continue
            try:
                values = json.loads(own) if own else {}
                params = replace(self._params, **{**values, "seed": row_seed(self._seed, file, row)})
            except (ConfigError, TypeError) as refused:
                failed.append(failed_row(i, RowError.INVALID_SAMPLING, str(refused)))
                continue
            wanted.append((i, prompt, params))
        if self._chat is None:
            encoded = self._tokenizer.encode_batch([prompt for _, prompt, _ in wanted])
            return [Request(i, ids, params) for (i, _, params), ids in zip(wanted, encoded, strict=True)], failed
        requests = []
        for i, prompt, params in wanted:
            try:
                requests.append(Request(i, self._encode_chat(prompt, self._chat), params))
            except ChatTemplateError as refused:
                failed.append(failed_row(i, RowError.INVALID_MESSAGES, str(refused)))
        return requests, failed

    def _encode_chat(self, prompt: str, chat: Chat) -> list[int]:
        messages = json.loads(prompt) if chat.from_messages else [{"role": "user", "content": prompt}]
        with self._chat_lock:
            return self._tokenizer.encode_chat(
                messages, chat.system, chat.add_generation_prompt, chat.template_kwargs, chat.now
            )


class Write:
    """Turns a unit's completions into its part. Thread-safe."""

    def __init__(
        self,
        store: PartStore,
        fingerprint: str,
        rename: Mapping[str, str],
        logprobs: bool,
        metadata: Mapping[str, str],
        kept_types: Mapping[str, pa.DataType] | None = None,
    ) -> None:
        """kept_types: of kept columns in a part; those that are not named stay as they are in a unit."""
        self._store = store
        self._fingerprint = fingerprint
        self._rename = dict(rename)
        self._logprobs = logprobs
        self._metadata = dict(metadata)
        self._kept_types = dict(kept_types or {})

    def __call__(self, unit: Unit, completions: list[Completion]) -> UnitSummary:
        """Commit the unit. `completions` holds each of its rows once, in any order."""
        started = time.monotonic_ns()
        table = self.table(unit, completions)
        written = self._store.write(self.name(unit), table, self._metadata)
        return UnitSummary(
            unit.window,
            unit.index,
            PartTotals.of_table(table),
            written,
            row_stats(unit, completions),
            (time.monotonic_ns() - started) // 1000,
        )

    def name(self, unit: Unit) -> PartName:
        """Of the unit's part."""
        return PartName(self._fingerprint, unit.window, unit.index, unit.of, unit.num_rows)

    def again(self, unit: Unit, completions: list[Completion], name: PartName, part: StoredPart) -> UnitSummary:
        """Put new results of some of its rows, which are `unit`, into a part that stands."""
        started = time.monotonic_ns()
        renewed = self.table(unit, completions)
        table = patched(part.table, renewed)
        self._store.rewrite(name, table, part.metadata, part.tag)
        return UnitSummary(
            unit.window,
            unit.index,
            PartTotals.of_table(table),
            True,
            row_stats(unit, completions),
            (time.monotonic_ns() - started) // 1000,
            PartTotals.of_table(renewed),
        )

    def table(self, unit: Unit, completions: list[Completion]) -> pa.Table:
        """The part's rows, in the order of the input."""
        by_row = {c.row_id: c for c in completions}
        if len(completions) != unit.num_rows or by_row.keys() != set(range(unit.num_rows)):
            raise PipelineError(
                f"window {unit.window}, unit {unit.index}: {len(completions)} completions of {len(by_row)} different "
                f"rows came back for {unit.num_rows} rows; nothing of it is written"
            )
        done = [by_row[i] for i in range(unit.num_rows)]
        kept = unit.kept()
        kept = kept.cast(pa.schema([f.with_type(self._kept_types.get(f.name, f.type)) for f in kept.schema]))
        columns: list[Any] = [
            [c.text if c.error is None else None for c in done],
            [c.finish_reason for c in done],
            [c.error for c in done],
            [c.error_message for c in done],
            [c.num_prompt_tokens for c in done],
            [c.num_cached_tokens for c in done],
            [len(c.token_ids) for c in done],
            unit.own("source_file"),
            unit.own("source_row"),
        ]
        if self._logprobs:
            columns.append([_logprobs(c) for c in done])
        schema = output_schema(kept.schema, self._rename, self._logprobs)
        results = [
            c if isinstance(c, pa.ChunkedArray) else pa.array(c, schema.field(kept.num_columns + i).type)
            for i, c in enumerate(columns)
        ]
        table = pa.Table.from_arrays([*kept.columns, *results], schema=schema)
        files, rows = unit.own("source_file").to_pylist(), unit.own("source_row").to_pylist()
        return table.take(pa.array(sorted(range(unit.num_rows), key=lambda i: (files[i], rows[i]))))


def failed_row(row_id: object, error: str, message: str, num_prompt_tokens: int = 0) -> Completion:
    """The completion of a row that never reached the engine."""
    return Completion(
        row_id=row_id,
        token_ids=[],
        text="",
        finish_reason="error",
        num_prompt_tokens=num_prompt_tokens,
        error=str(error),
        error_message=message,
    )


def _logprobs(completion: Completion) -> list[dict[str, Any]] | None:
    if completion.logprobs is None:
        return None
    return [
        {"token_id": t.token_id, "logprob": t.logprob, "top": [{"token_id": i, "logprob": p} for i, p in t.top]}
        for t in completion.logprobs
    ]


def row_stats(unit: Unit, completions: list[Completion]) -> RowStats:
    """What the unit's rows were like; of each error code the first rows by their place in the input."""
    completed = [c for c in completions if c.error is None]
    lengths: dict[int, LengthBucket] = {}
    for c in completed:
        bucket = length_bucket(c.num_prompt_tokens)
        row = LengthBucket(1, c.num_prompt_tokens, c.num_cached_tokens, len(c.token_ids))
        lengths[bucket] = lengths.get(bucket, LengthBucket()) + row
    timings = [Timing(c.queued_us, c.first_token_us, c.last_token_us, len(c.token_ids)) for c in completed]
    return RowStats(latency_of(timings), dict(sorted(lengths.items())), _examples(unit, completions))


def _examples(unit: Unit, completions: list[Completion]) -> dict[str, tuple[ErrorExample, ...]]:
    files, rows = unit.own("source_file"), unit.own("source_row")
    found: dict[str, list[ErrorExample]] = {}
    for c in completions:
        if c.error is not None:
            place = (files[c.row_id].as_py(), rows[c.row_id].as_py())  # type: ignore[index]
            found.setdefault(c.error, []).append(ErrorExample(*place, (c.error_message or "")[:MAX_MESSAGE]))
    by_place = {code: sorted(some, key=lambda e: (e.source_file, e.row)) for code, some in sorted(found.items())}
    return {code: tuple(some[:MAX_EXAMPLES]) for code, some in by_place.items()}
