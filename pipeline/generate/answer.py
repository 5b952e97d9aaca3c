"""Answer to a prompt, as text and as a row, and the file that saves answers."""

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

from pipeline.engine.completion import Completion
from pipeline.errors import ConfigError, EnvironmentFailed, OutputError
from pipeline.formatting import printable
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import shown_url

_MAX_LINES = 6  # shown of a prompt
_MAX_WIDTH = 160


@dataclass(frozen=True)
class Answer:
    """Result of one prompt. row: the output row, the input's own keys followed by the result's."""

    prompt: str | None  # as rendered; a chat's messages as JSON; None if there was nothing to send
    source: str
    completion: Completion
    row: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return _plain(self.row)

    def to_text(self) -> str:
        """Return the quoted, truncated prompt and the whole completion, escaped for terminals."""
        done, source = self.completion, printable(self.source)
        prompt = [] if self.prompt is None else self.prompt.split("\n")
        quoted = [f"> {printable(line[:_MAX_WIDTH])}{'...' * (len(line) > _MAX_WIDTH)}" for line in prompt]
        if len(quoted) > _MAX_LINES:
            quoted[_MAX_LINES - 1 :] = [f"> ... {len(quoted) - _MAX_LINES + 1} more lines"]
        if done.error is not None:
            lines = [f"# {source} ({done.error})", *quoted, printable(done.error_message or "")]
        elif done.samples:
            lines = [f"# {source} ({len(done.samples)} samples, {done.num_generated_tokens:,} tokens)", *quoted]
            for index, sample in enumerate(done.samples):
                lines += [f"## sample {index} ({_summary(sample)})", *_lines(sample)]
        else:
            lines = [f"# {source} ({_summary(done)})", *quoted, *_lines(done)]
        return "\n".join([*lines, ""])


def _summary(done: Completion) -> str:
    thought = f", {done.num_reasoning_tokens:,} of them reasoning" if done.num_reasoning_tokens else ""
    return f"{done.finish_reason}, {done.num_tokens:,} tokens{thought}"


def _lines(done: Completion) -> list[str]:
    """Return the generated lines, with separated reasoning between two markers."""
    answer = [printable(line) for line in done.text.strip("\n").split("\n")]
    if done.reasoning is None:
        return answer
    return ["[reasoning]", *(printable(line) for line in done.reasoning.split("\n")), "[answer]", *answer]


class Saved:
    """Output file of the results, written atomically at the end."""

    def __init__(self, path: str, overwrite: bool) -> None:
        """Check the path before any work is done. Raises ConfigError, OutputError."""
        self.path, self._overwrite = Path(os.path.expanduser(path)), overwrite
        if is_url(path):
            raise OutputError(f"--output {shown_url(path)}: expected a local .jsonl or .parquet file")
        if self.path.suffix not in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigError(f"--output {path}: expected a file that ends in .jsonl or .parquet")
        if self.path.exists() and not overwrite:
            raise OutputError(f"--output {path}: already exists; choose another name, or add --overwrite")
        if self.path.is_dir():
            raise OutputError(f"--output {path}: is a folder; expected a file")
        if not self.path.parent.is_dir():
            raise OutputError(f"--output {path}: folder {self.path.parent} does not exist; create it first")

    def write(self, rows: list[Answer], schema: pa.Schema) -> None:
        """Write the file. Raises EnvironmentFailed on disk errors, OutputError if another process created the file."""
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
            raise OutputError(f"{self.path}: another process created it; nothing was replaced") from None
        except OSError as error:
            raise EnvironmentFailed(f"{self.path}: cannot write it: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _plain(value: Any) -> Any:
    """Return `value` for JSON: bytes as text with replacement characters, and null for non-finite numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
