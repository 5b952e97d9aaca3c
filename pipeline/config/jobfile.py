"""Parser for job files: a small, safe subset of YAML that keeps the line of every key for messages.

Accepts plain mappings, lists and scalars. Refuses aliases and anchors (a few lines of them can expand to gigabytes),
tags (`!!python/...`), duplicate keys, and files that are too large or too deep for a job. Scalars follow YAML 1.2: only
`true` and `false` are booleans, so `stop: [No]` stays text; boolean keys also accept `off`, `on`, `yes` and `no`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pipeline.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024
MAX_NAMED_BYTES = 1 << 20  # of a file that a job file names, such as a schema
MAX_DEPTH = 16
MAX_VALUES = 20_000

Scalar = str | int | float | bool | None
Value = Scalar | list["Value"] | dict[str, "Value"]
KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)")
_INDENTATION = "Indent keys of one section equally, and keys inside them further to the right."
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True)
class Mistake:
    """A mistake in a job file. where: `file:line`, a flag, or a file. key: dotted, or empty."""

    location: str
    key: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.location}: {key}{self.problem}{hint}"


class JobFileError(ConfigError):
    """All mistakes of a job file."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in mistakes))


@dataclass(frozen=True)
class Document:
    """Values of a job file. origins: the source (`file:line` or a flag) of every key and list item, by path."""

    data: dict[str, Value]
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def location(self, path: KeyPath) -> str:
        """Return the source of `path`, or of its closest enclosing key in the file."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "job"

    def replaced(self, path: KeyPath, value: Value) -> "Document":
        """Return a copy with another value at `path`, which exists."""
        data: dict[str, Value] = dict(self.data)
        inner: Any = data
        for step in path[:-1]:
            inner[step] = inner[step].copy()
            inner = inner[step]
        inner[path[-1]] = value
        return Document(data, self.origins)


def of_each_prompt(document: Document, path: KeyPath) -> list[tuple[KeyPath, Value]]:
    """Return the values at `path` of the job and of each of its steps, with their whole paths."""
    steps = document.data.get("steps")
    found: list[tuple[KeyPath, Value]] = []
    for begin in [(), *(("steps", i) for i in range(len(steps) if isinstance(steps, list) else 0))]:
        value: Any = document.data
        for step in (*begin, *path):
            value = value[step] if isinstance(step, int) else value.get(step) if isinstance(value, dict) else None
        found.append(((*begin, *path), value))
    return found


def read(path: str | Path) -> Document:
    """Read and parse a file. Raises JobFileError, also if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) <= MAX_FILE_BYTES:
            return parse(raw.decode("utf-8"), str(path))
        problem = f"larger than {MAX_FILE_BYTES // 1024} KiB: not a job file"
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    raise JobFileError([Mistake(str(path), "", problem)])


def read_named(document: Document, key_path: KeyPath, path: str, folder: str | Path = "", hint: str = "") -> str:
    """Return the text of the file that a key names, relative to `folder`. Raises JobFileError."""
    try:
        with open(Path(folder, os.path.expanduser(path)), "rb") as file:
            raw = file.read(MAX_NAMED_BYTES + 1)
        if len(raw) <= MAX_NAMED_BYTES:
            return raw.decode("utf-8-sig")
        problem, hint = f"larger than {MAX_NAMED_BYTES} bytes", ""
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem, hint = f"not UTF-8 text (byte {error.start})", ""
    raise JobFileError([Mistake(document.location(key_path), dotted(key_path), f"{path}: {problem}", hint)])


def parse(text: str, name: str) -> Document:
    """Parse `text`. name: the file name for messages. Raises JobFileError."""
    builder = _Builder(name)
    try:
        data = builder.document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        builder.mistakes.append(_syntax_mistake(name, error))
        raise JobFileError(builder.mistakes) from None
    if builder.mistakes:
        raise JobFileError(builder.mistakes)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        hint = "`pipeline init` writes a job file with comments for a dataset."
        raise JobFileError([Mistake(f"{name}:1", "", "expected `key: value` lines", hint)])
    return Document(data, {(): name} | builder.origins)


def parse_value(text: str, name: str) -> Value:
    """Parse a value of the command line: a scalar, or a list or mapping in brackets. Raises JobFileError."""
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        return parse(f"value: {stripped}", name).data["value"]
    return _scalar(stripped)


def merge(under: Document, over: Document) -> Document:
    """Return `under` with `over` merged into it: mappings merge by key, other values are replaced."""
    data, origins = dict(under.data), dict(under.origins)
    _lay_over(data, origins, over.data, over.origins, ())
    return Document(data, origins)


def _lay_over(
    data: dict[str, Value],
    origins: dict[KeyPath, str],
    over: Mapping[str, Value],
    over_origins: Mapping[KeyPath, str],
    path: KeyPath,
) -> None:
    for key, value in over.items():
        here = (*path, key)
        old = data.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            data[key] = merged = dict(old)
            _lay_over(merged, origins, value, over_origins, here)
            continue
        data[key] = value
        for stale in [p for p in origins if p[: len(here)] == here]:
            del origins[stale]
        origins.update({p: origin for p, origin in over_origins.items() if p[: len(here)] == here})


class _Builder:
    """Builds values from YAML events and checks depth and size on the way, before anything large is built."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mistakes: list[Mistake] = []
        self.origins: dict[KeyPath, str] = {}
        self.num_values = 0

    def document(self, events: Iterator[yaml.Event]) -> Value:
        value: Value = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._refuse(event, (), "a second document: a job file holds one")
                value = self._value(next(events), events, (), 0)
        return value

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath, depth: int) -> Value:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self._refuse(event, path, f"more than {MAX_VALUES} values: not a job file")
        if depth > MAX_DEPTH:
            self._refuse(event, path, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            hint = "Write the value out, or quote text that begins with & or *."
            self._refuse(event, path, "anchors and aliases (& and *) are not supported", hint)
        if tag := getattr(event, "tag", None):
            hint = "Quote text that begins with an exclamation mark."
            self._refuse(event, path, f"tags such as {tag!r} are not supported", hint)
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value) if event.style is None else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(events, path, depth)
        return self._mapping(events, path, depth)

    def _list(self, events: Iterator[yaml.Event], path: KeyPath, depth: int) -> list[Value]:
        items: list[Value] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self.origins[here] = self._location(event)
            items.append(self._value(event, events, here, depth + 1))
        return items

    def _mapping(self, events: Iterator[yaml.Event], path: KeyPath, depth: int) -> dict[str, Value]:
        mapping: dict[str, Value] = {}
        while not isinstance(key_event := next(events), yaml.MappingEndEvent):
            if not isinstance(key_event, yaml.ScalarEvent) or key_event.anchor or key_event.tag:
                self._refuse(key_event, path, "a key must be plain text")
            key = key_event.value
            here = (*path, key)
            if key in mapping:
                first = self.origins[here]
                twice = f"written twice (first at {first})"
                self.mistakes.append(Mistake(self._location(key_event), dotted(here), twice, "Keep one of the two."))
            self.origins[here] = self._location(key_event)
            mapping[key] = self._value(next(events), events, here, depth + 1)
        return mapping

    def _location(self, event: yaml.Event) -> str:
        return f"{self.name}:{event.start_mark.line + 1}"

    def _refuse(self, event: yaml.Event, path: KeyPath, problem: str, hint: str = "") -> NoReturn:
        raise JobFileError([Mistake(self._location(event), dotted(path), problem, hint)])


def dotted(path: KeyPath) -> str:
    """Return the dotted form of a path: `("stop", 1)` is `stop[1]`, `("a", "b")` is `a.b`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def path_of(key: str) -> KeyPath:
    """Return the path of a dotted form: the inverse of `dotted`."""
    path: list[str | int] = []
    for step in key.split("."):
        found = re.fullmatch(r"(\w+)\[([0-9]+)\]", step)
        path += [step] if found is None else [found[1], int(found[2])]
    return tuple(path)


def _scalar(text: str) -> Scalar:
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= 40:
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            bare = text.replace("_", "").lower()
            return float(bare.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _syntax_mistake(name: str, error: yaml.YAMLError) -> Mistake:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
    location = f"{name}:{mark.line + 1}" if mark else name
    hint = ""
    if "mapping values are not allowed" in problem:
        hint = f"Quote text that contains `: `. {_INDENTATION}"
    elif "<block end>" in problem:
        hint = _INDENTATION
    elif "cannot start any token" in problem:
        hint = "Indent with spaces, and quote text that begins with % @ ` or a tab."
    return Mistake(location, "", f"not valid YAML: {problem}", hint)
