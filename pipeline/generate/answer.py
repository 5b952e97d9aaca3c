"""What became of a prompt, for people and for files, and the file that answers are saved to."""

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.params import Completion
from pipeline.errors import ConfigError, EnvironmentFailed, OutputError
from pipeline.formatting import printable
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import shown_url

_MAX_LINES = 6  # of a prompt
_MAX_WIDTH = 160


@dataclass(frozen=True)
class Answer:
    """What became of one prompt. `row` is what is written of it: the input's own keys, then the result's."""

    prompt: str | None  # as rendered; a chat's messages as JSON; None where there was none to send
    where: str
    completion: Completion
    row: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return _plain(self.row)

    def to_text(self) -> str:
        """For people: the prompt, quoted and cut, and the whole completion. Nothing of it commands a terminal."""
        done, where = self.completion, printable(self.where)
        prompt = [] if self.prompt is None else self.prompt.split("\n")
        quoted = [f"> {printable(line[:_MAX_WIDTH])}{'...' * (len(line) > _MAX_WIDTH)}" for line in prompt]
        if len(quoted) > _MAX_LINES:
            quoted[_MAX_LINES - 1 :] = [f"> ... {len(quoted) - _MAX_LINES + 1} more lines"]
        if done.error is not None:
            lines = [f"# {where} ({done.error})", *quoted, printable(done.error_message or "")]
        elif done.samples:
            lines = [f"# {where} ({len(done.samples)} samples, {done.num_generated_tokens:,} tokens)", *quoted]
            for index, sample in enumerate(done.samples):
                lines += [f"## sample {index} ({_end(sample)})", *_lines(sample)]
        else:
            lines = [f"# {where} ({_end(done)})", *quoted, *_lines(done)]
        return "\n".join([*lines, ""])


def _end(done: Completion) -> str:
    thought = f", {done.num_reasoning_tokens:,} of them reasoning" if done.num_reasoning_tokens else ""
    return f"{done.finish_reason}, {len(done.token_ids):,} tokens{thought}"


def _lines(done: Completion) -> list[str]:
    """What was generated; reasoning, where it is told apart, between two marks of its own."""
    answer = [printable(line) for line in done.text.strip("\n").split("\n")]
    if done.reasoning is None:
        return answer
    return ["[reasoning]", *(printable(line) for line in done.reasoning.split("\n")), "[answer]", *answer]


class Saved:
    """The file that results are saved to: there whole at the end, or not at all."""

    def __init__(self, path: str, overwrite: bool) -> None:
        """Raises ConfigError, OutputError before any work is done for it."""
        self.path, self._overwrite = Path(os.path.expanduser(path)), overwrite
        if is_url(path):
            raise OutputError(f"--output {shown_url(path)}: expected a local .jsonl or .parquet file")
        if self.path.suffix not in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigError(f"--output {path}: expected a file that ends in .jsonl or .parquet")
        if self.path.exists() and not overwrite:
            raise OutputError(f"--output {path}: is there already; choose another name, or add --overwrite")
        if self.path.is_dir():
            raise OutputError(f"--output {path}: is a folder, expected a file")
        if not self.path.parent.is_dir():
            raise OutputError(f"--output {path}: no folder {self.path.parent}; make it first")

    def write(self, rows: list[Answer], schema: pa.Schema) -> None:
        """Raises EnvironmentFailed when the disk does not take it, OutputError when another program made the file."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                if self.path.suffix == ".parquet":
                    table = pa.Table.from_pylist([dict(answer.row) for answer in rows], schema=schema)
                    pq.write_table(table, file, compression="zstd", write_page_checksum=True)
                else:
                    lines = (json.dumps(answer.to_json(), ensure_ascii=False) for answer in rows)
                    file.writelines(line.encode("utf-8", "replace") + b"\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            (os.replace if self._overwrite else os.link)(temporary, self.path)
        except FileExistsError:
            raise OutputError(f"{self.path}: was made by another program; nothing was replaced") from None
        except OSError as error:
            raise EnvironmentFailed(f"{self.path}: cannot be written: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _plain(value: Any) -> Any:
    """For JSON: bytes as the text they nearly are, no number for what is none."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
