"""Build a checked job from a job file, overlays and `--set` flags."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.environment import expanded
from pipeline.config.job import JobConfig
from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, merge, parse_value, read
from pipeline.config.keys import WORDS
from pipeline.config.mistakes import from_validation, section_at
from pipeline.config.sections.structured import with_schema_file
from pipeline.config.variables import Now, given_on
from pipeline.errors import ConfigError
from pipeline.machine.host import zone_time
from pipeline.presets import FOLDER, NAMES


def load_job(
    path: str | Path,
    sets: Iterable[str] = (),
    overlays: Iterable[str | Path] = (),
    limit: int | None = None,
    environ: Mapping[str, str] = os.environ,
    vars: Iterable[str] = (),
    presets: Iterable[str] = (),
    now: Now = zone_time,
) -> JobConfig:
    """Return the job in a file, merged with presets, then overlay files, then `key=value` settings.

    environ: values for `${NAME}` in paths. vars: `name=value` for the job's variables. now: returns the time in a zone.
    Raises JobFileError (a ConfigError) with every mistake found.
    """
    for name, given in (("sets", sets), ("overlays", overlays), ("vars", vars), ("presets", presets)):
        if isinstance(given, str | Mapping):
            raise ConfigError(f"load_job: {name} = {given!r:.80}: expected a list of texts, such as ['input.limit=20']")
    document = _spelled_out(read(path))
    for overlay in (*map(_preset, presets), *overlays):
        document = _spelled_out(merge(document, read(overlay)))
    for text in sets:
        document = _spelled_out(merge(document, _setting(text)))
    if limit is not None:
        document = merge(document, _document_of(("input", "limit"), limit, "--limit"))
    if document.data.get("name") is None:
        document = merge(document, _document_of(("name",), Path(path).stem, str(path)))
    return _job_of(document, environ, given_on(vars), now)


def job_from_flags(
    values: Mapping[str, tuple[Any, str]], sets: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> JobConfig:
    """Return the job described by flags. values: dotted key -> value and the flag to name in messages.

    Raises JobFileError with every mistake found.
    """
    document = Document({}, {(): "the command line"})
    for key, (value, flag) in values.items():
        document = _spelled_out(merge(document, _document_of(tuple(key.split(".")), value, flag)))
    for text in sets:
        document = _spelled_out(merge(document, _setting(text)))
    return _job_of(document, environ)


def _job_of(
    document: Document, environ: Mapping[str, str], given: Mapping[str, str] | None = None, now: Now = zone_time
) -> JobConfig:
    document = with_schema_file(expanded(document, environ, given or {}, now))
    try:
        job = JobConfig.model_validate(document.data)
    except ValidationError as error:
        raise JobFileError(from_validation(error, document, JobConfig)) from None
    job._document = document
    return job


def _spelled_out(document: Document) -> Document:
    """Return `document` with bare words expanded to sections, so that overlays can merge with their keys."""
    data, origins = dict(document.data), dict(document.origins)
    for section, key in WORDS.items():
        if isinstance(word := data.get(section), str):
            data[section] = {key: word}
            origins[section, key] = origins[section,]
    return Document(data, origins)


def _preset(name: str) -> Path:
    if name not in NAMES:
        raise JobFileError([Mistake(f"--preset {name}", "", "no such preset", f"Available: {', '.join(NAMES)}.")])
    return FOLDER / f"{name}.yaml"


def _setting(text: str) -> Document:
    """Parse one `--set a.b=c`. For keys of type text the value is everything after the `=`."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    location = "--set"
    if not equals or not all(path):
        shown = "--set" if "storage" in text else f"--set {text}"  # the value may be a secret
        raise JobFileError([Mistake(shown, "", "expected key=value", "Example: --set sampling.max_tokens=64")])
    if _holds_text(path) and value.strip() not in ("null", "~", ""):
        return _document_of(path, value, location)
    return _document_of(path, parse_value(value, location), location)


def _holds_text(path: tuple[str, ...]) -> bool:
    """Return whether the key at `path` is text, so that `{report}` or `no` must not be parsed as YAML."""
    section = section_at(JobConfig, path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return field is not None and field.annotation in (str, str | None)


def _document_of(path: tuple[str, ...], value: Any, location: str) -> Document:
    data: Any = value
    for step in reversed(path):
        data = {step: data}
    origins: dict[KeyPath, str] = {path[:length]: location for length in range(1, len(path) + 1)}
    return Document(data, origins)
