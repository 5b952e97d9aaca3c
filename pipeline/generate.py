"""Generation without a job: a handful of prompts from a flag, a text or JSON Lines file, or standard input.

Owns reading such prompts, running them through an engine in this process (no Ray, no output folder) and handing
results back in the input's order. A row is rendered, tokenized and seeded as a job's row is. A Parquet input is
no business of this module: it is a job, with all its promises.
"""

import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import JobConfig, without_password
from pipeline.data.prompts import PromptSpec, template_columns
from pipeline.data.records import RESULT_NAMES, output_schema
from pipeline.data.source import open_source
from pipeline.data.units import UnitSpec, make_units
from pipeline.engine.params import Completion, Request
from pipeline.errors import ConfigError, EnvironmentFailed, InputError, OutputError
from pipeline.examine import printable
from pipeline.job.actors import chat_of
from pipeline.job.checkpoint import resolve_model
from pipeline.job.stages import Tokenize

MAX_BYTES = 64 * 2**20
SAY_EVERY_S = 5.0
STDIN = "-"
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PROMPT_KEYS = ("prompt", "text", "messages")
_MAX_SHOWN = 5  # malformed lines in one message
_MAX_LINES = 6  # of a prompt
_MAX_WIDTH = 160

Say = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """What became of one prompt. `row` is what is written of it: the input's own keys, then the result's."""

    prompt: str | None  # as rendered; a chat's messages as JSON; None where there was none to send
    where: str
    completion: Completion
    row: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(_plain(self.row), ensure_ascii=False)

    def to_text(self) -> str:
        """For people: the prompt, quoted and cut, and the whole completion. Nothing of it commands a terminal."""
        done = self.completion
        prompt = [] if self.prompt is None else self.prompt.split("\n")
        quoted = [f"> {printable(line[:_MAX_WIDTH])}{'...' * (len(line) > _MAX_WIDTH)}" for line in prompt]
        if len(quoted) > _MAX_LINES:
            quoted[_MAX_LINES - 1 :] = [f"> ... {len(quoted) - _MAX_LINES + 1} more lines"]
        if done.error is not None:
            lines = [f"# {self.where} ({done.error})", *quoted, printable(done.error_message or "")]
        else:
            head = f"# {self.where} ({done.finish_reason}, {len(done.token_ids):,} tokens)"
            lines = [head, *quoted, *map(printable, done.text.strip("\n").split("\n"))]
        return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Done:
    """What became of all prompts together."""

    prompts: int
    failed: int
    num_input_tokens: int
    num_generated_tokens: int
    seconds: float

    def to_text(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.prompts:,} prompt{'' if self.prompts == 1 else 's'}{failed}; {self.num_input_tokens:,} tokens in, "
            f"{self.num_generated_tokens:,} out, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Prompts:
    """Rows as read: their own columns, then `source_file` and `source_row`, and the key a prompt is made of."""

    table: pa.Table
    key: Mapping[str, tuple[str, str]]  # of a job file: `prompt.column` to its value and the flag it came from

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


def is_dataset(place: str) -> bool:
    """Whether an input is Parquet: a folder, a glob, a url, or a file that says so."""
    path = Path(place)
    if place == STDIN or path.suffix in (".txt", *_JSON_LINES):
        return False
    if "://" in place or path.is_dir() or path.suffix in (".parquet", ".pq"):
        return True
    if path.is_file():
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1"
    return any(c in place for c in "*?[")


def prompt_of_dataset(path: str, template: str | None) -> dict[str, tuple[str, str]]:
    """The key that makes a Parquet input's prompts: the template, else the column that is called like one."""
    if template is not None:
        return {"prompt.template": (template, "--prompt")}
    return _default_key(without_password(path), open_source(path).schema.names)


def read_prompts(place: str | None, template: str | None, limit: int | None = None) -> Prompts:
    """The prompts of a file, of standard input, or of `template` alone. Raises InputError, ConfigError."""
    if place is None and template is not None and not _names_columns(template):
        return Prompts(_table("--prompt", [(0, {"prompt": template})]), {"prompt.column": ("prompt", "--prompt")})
    if place is None and sys.stdin.isatty():
        raise ConfigError(
            "no prompts: give --prompt TEXT, --input FILE, or pipe them in, one a line"
            if template is None
            else "--prompt names columns: give --input FILE, or pipe rows in, one a line"
        )
    name, raw = _read(place or STDIN)
    rows = _objects(name, raw) if _is_json_lines(name, raw) else _lines(raw)
    if not rows:
        raise InputError(f"{name}: holds no prompts")
    table = _table(name, rows[:limit])
    names = table.schema.names[:-2]
    return Prompts(
        table, _default_key(name, names) if template is None else {"prompt.template": (template, "--prompt")}
    )


def complete(
    config: JobConfig, prompts: Prompts, saved: "Saved | None", show: Callable[[Answer], None], say: Say
) -> Done:
    """Run all prompts. Each answer is shown as its turn comes or, where there is a file, saved in the end.

    A prompt that fails is counted and does not stop the others.
    """
    schema = _schema(prompts, say) if saved is not None else None
    began, kept = time.monotonic(), []
    count: Counter[str] = Counter()
    for answer in answers(config, prompts, say):
        done = answer.completion
        count.update(failed=done.error is not None, read=done.num_prompt_tokens, generated=len(done.token_ids))
        if saved is None:
            show(answer)
        else:
            kept.append(answer)
    if saved is not None and schema is not None:
        saved.write(kept, schema)
        say(f"wrote {saved.path}")
    seconds = round(time.monotonic() - began, 3)
    told = Done(prompts.num_rows, count["failed"], count["read"], count["generated"], seconds)
    say(told.to_text())
    return told


def answers(config: JobConfig, prompts: Prompts, say: Say) -> Iterator[Answer]:
    """Each prompt's answer, in the input's order, as soon as it and those before it are finished.

    A prompt that fails is an answer with an error. Raises ModelError, ConfigError before the first one.
    """
    prompt, params = config.prompt, config.sampling_params()
    spec = PromptSpec(prompt.column, prompt.template, prompt.messages, prompt.max_bytes)
    inputs = prompts.table.select(list(range(prompts.table.num_columns - 2)))
    spec.check(inputs.schema)
    for option, column in config.sampling_columns().items():
        if column not in inputs.schema.names:
            raise ConfigError(f"sampling.{option}: the input has no column {column!r}")
    run = config.run
    units = make_units(
        prompts.table,
        UnitSpec(spec, (), config.sampling_columns(), params.max_tokens, run.unit_tokens, run.unit_rows),
        window=0,
    )
    say(f"loading {without_password(config.model.path)}")
    folder = resolve_model(config.model.path, config.model.storage, say)
    from pipeline.engine.engine import Engine

    with Engine(config.engine_config(str(folder)), say) as engine:
        tokenize = Tokenize(engine.tokenizer, params, config.seed, chat_of(config))
        rendered: dict[int, str | None] = {}
        requests: list[Request] = []
        done: dict[int, Completion] = {}
        for unit in units:
            lines = unit.own("source_row").to_pylist()
            rendered |= zip(lines, unit.own("_prompt").to_pylist())
            asked, failed = tokenize(unit)
            requests += [replace(r, row_id=lines[r.row_id]) for r in asked]  # type: ignore[index]
            done |= {lines[c.row_id]: c for c in failed}  # type: ignore[index]
        requests.sort(key=lambda request: request.row_id)  # type: ignore[arg-type,return-value]
        finished = engine.stream(requests)
        told = _Told(say, prompts.num_rows)
        for values in prompts.table.to_pylist():
            line = values["source_row"]
            while line not in done:
                completion = next(finished)
                done[completion.row_id] = completion  # type: ignore[index]
                told(completion)
            yield _answer(rendered[line], values, done.pop(line))


class _Told:
    """A line every few seconds: how many are done, and how fast."""

    def __init__(self, say: Say, total: int) -> None:
        self._say, self._total = say, total
        self._began = self._said = time.monotonic()
        self._done = self._tokens = 0

    def __call__(self, completion: Completion) -> None:
        now = time.monotonic()
        self._done += 1
        self._tokens += len(completion.token_ids)
        if now >= self._said + SAY_EVERY_S:
            self._said = now
            rate = self._tokens / (now - self._began)
            self._say(f"{self._done:,} of {self._total:,} prompts, {rate:,.0f} tok/s out")


def _schema(prompts: Prompts, say: Say) -> pa.Schema:
    """The columns of a saved result. Keys of the input that have a result's name are left out, aloud."""
    names = prompts.table.schema.names[:-2]
    clashes = [name for name in names if name in RESULT_NAMES]
    if clashes:
        say(f"left out of the output, as results have these names: {', '.join(clashes)}")
    kept = pa.schema([prompts.table.schema.field(i) for i, name in enumerate(names) if name not in clashes])
    return output_schema(kept, {}, logprobs=False)


class Saved:
    """The file that results are saved to: there whole at the end, or not at all."""

    def __init__(self, path: str, overwrite: bool) -> None:
        """Raises ConfigError, OutputError before any work is done for it."""
        self.path, self._overwrite = Path(path).expanduser(), overwrite
        if "://" in path:
            raise OutputError(f"--output {without_password(path)}: expected a local .jsonl or .parquet file")
        if self.path.suffix not in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigError(f"--output {path}: expected a file that ends in .jsonl or .parquet")
        if self.path.exists() and not overwrite:
            raise OutputError(f"--output {path}: is there already; choose another name, or add --overwrite")
        if self.path.is_dir():
            raise OutputError(f"--output {path}: is a folder, expected a file")
        if not self.path.parent.is_dir():
            raise OutputError(f"--output {path}: no folder {self.path.parent}; make it first")

    def write(self, rows: list[Answer], schema: pa.Schema) -> None:
        """Raises EnvironmentFailed when the disk does not take it, OutputError when the file has come meanwhile."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                if self.path.suffix == ".parquet":
                    table = pa.Table.from_pylist([dict(answer.row) for answer in rows], schema=schema)
                    pq.write_table(table, file, compression="zstd", write_page_checksum=True)
                else:
                    file.writelines(answer.to_json().encode("utf-8", "replace") + b"\n" for answer in rows)
                file.flush()
                os.fsync(file.fileno())
            (os.replace if self._overwrite else os.link)(temporary, self.path)
        except FileExistsError:
            raise OutputError(f"{self.path}: has come into being meanwhile; nothing was replaced") from None
        except OSError as error:
            raise EnvironmentFailed(f"{self.path}: cannot be written: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _answer(prompt: str | None, values: dict[str, Any], completion: Completion) -> Answer:
    result = {
        "generated_text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "error_message": completion.error_message,
        "num_input_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_generated_tokens": len(completion.token_ids),
        "source_file": values["source_file"],
        "source_row": values["source_row"],
    }
    where = values["source_file"]
    if where != "--prompt":
        where += f" line {values['source_row'] + 1}"
    kept = {name: value for name, value in values.items() if name not in RESULT_NAMES}
    return Answer(prompt, where, completion, {**kept, **result})


def _names_columns(template: str) -> bool:
    try:
        return bool(template_columns(template))
    except ConfigError:
        return False


def _default_key(name: str, names: list[str]) -> dict[str, tuple[str, str]]:
    found = next((key for key in _PROMPT_KEYS if key in names), None)
    if found is None:
        there = ", ".join(names)
        raise ConfigError(
            f"{name}: no prompt, text or messages among its columns ({there}); say what to send: "
            f'--prompt "Summarize: {{{names[0] if names else "text"}}}"'
        )
    return {"prompt.messages" if found == "messages" else "prompt.column": (found, name)}


def _read(place: str) -> tuple[str, bytes]:
    name = "stdin" if place == STDIN else place
    try:
        if place == STDIN:
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(Path(place).expanduser(), "rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{name}: more than {MAX_BYTES >> 20} MiB of prompts: write them as Parquet and run a job")
    return name, raw.removeprefix(b"\xef\xbb\xbf")


def _is_json_lines(name: str, raw: bytes) -> bool:
    """By the file's name; of standard input, when every line begins like an object."""
    if name != "stdin":
        return Path(name).suffix in _JSON_LINES
    lines = [line.lstrip() for line in raw.split(b"\n") if line.strip()]
    return bool(lines) and all(line[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines)


def _lines(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """A prompt a line; blank lines hold none."""
    lines = (line.removesuffix(b"\r") for line in raw.split(b"\n"))
    return [(i, {"text": line.decode("utf-8", "surrogateescape")}) for i, line in enumerate(lines) if line.strip()]


def _objects(name: str, raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    rows, wrong = [], []
    for i, line in enumerate(raw.split(b"\n")):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong.append(f"{name}:{i + 1}: not JSON: {error}")
            continue
        if isinstance(value, dict) and value:
            rows.append((i, value))
        else:
            wrong.append(f'{name}:{i + 1}: expected an object such as {{"prompt": "..."}}')
    if wrong:
        more = f"\nand {len(wrong) - _MAX_SHOWN} more lines" if len(wrong) > _MAX_SHOWN else ""
        raise InputError("\n".join(wrong[:_MAX_SHOWN]) + more)
    return rows


def _table(name: str, rows: list[tuple[int, dict[str, Any]]]) -> pa.Table:
    """As `data.source.read_window` gives it: the rows' own columns, then where each comes from."""
    names = list(dict.fromkeys(key for _, row in rows for key in row))
    columns = [_column([row.get(key) for _, row in rows]) for key in names]
    where = [pa.array([name] * len(rows)), pa.array([i for i, _ in rows], pa.int64())]
    return pa.Table.from_arrays([*columns, *where], names=[*names, "source_file", "source_row"])


def _column(values: list[Any]) -> pa.Array:
    """Values of one type as Arrow has it; of several, or beyond Arrow's, the text they are in JSON."""
    if not all(value is None or isinstance(value, str) for value in values):
        with suppress(pa.ArrowException, UnicodeEncodeError, OverflowError):
            column = pa.array(values)
            pq.write_table(pa.table({"x": column[:0]}), pa.BufferOutputStream())  # Parquet has no empty struct
            return column
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    # bytes that were no UTF-8, and half surrogate pairs of JSON, stay what they are: the row's error says so
    column = pa.array([None if t is None else _bytes(t) for t in texts], pa.binary())
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return column


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """For JSON: bytes as the text they nearly are."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
