"""Build a checked job from a job file, overlays and `--set` flags."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.environment import expanded
from pipeline.config.job import JobConfig
from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, dotted, merge, parse_value, read
from pipeline.config.keys import WORDS
from pipeline.config.mistakes import from_validation, in_order, section_at
from pipeline.config.sections.prompt import with_template_file
from pipeline.config.sections.structured import with_schema_file
from pipeline.config.variables import Now, given_on
from pipeline.errors import ConfigError
from pipeline.machine.host import zone_time
from pipeline.presets import FOLDER, NAMES


def load_job(
    source: str | Path | Document,
    sets: Iterable[str] = (),
    overlays: Iterable[str | Path] = (),
    limit: int | None = None,
    environ: Mapping[str, str] = os.environ,
    vars: Iterable[str] = (),
    presets: Iterable[str] = (),
    now: Now = zone_time,
) -> JobConfig:
    """Return the job in a file, merged with presets, then overlay files, then `key=value` settings.

    source: the file, or the values of flags (`of_flags`). environ: values for `${NAME}` in paths. vars: `name=value`
    for the job's variables. now: returns the time in a zone. Raises JobFileError (a ConfigError) with every mistake
    found.
    """
    for name, given in (("sets", sets), ("overlays", overlays), ("vars", vars), ("presets", presets)):
        if isinstance(given, str | Mapping):
            raise ConfigError(f"load_job: {name} = {given!r:.80}: expected a list of texts, such as ['input.limit=20']")
    if isinstance(source, Document):
        base, sources = source, []
    else:
        base, sources = Document({}, {(): str(source)}), [partial(read, source)]
    files = (*sources, *(partial(_preset, name) for name in presets), *(partial(read, o) for o in overlays))
    settings = (partial(_setting, text) for text in sets)
    document = _merged(base, (*files, *settings))
    if limit is not None:
        document = merge(document, _document_of(("input", "limit"), limit, "--limit"))
    if document.data.get("name") is None and not isinstance(source, Document):
        document = merge(document, _document_of(("name",), Path(source).stem, str(source)))
    folder = Path() if isinstance(source, Document) else Path(source).parent
    return _job_of(document, folder, environ, given_on(vars), now)


def of_flags(values: Mapping[str, tuple[Any, str]]) -> Document:
    """Return the job file that flags describe. values: dotted key -> value and the flag to name in messages."""
    flags = (partial(_document_of, tuple(key.split(".")), value, flag) for key, (value, flag) in values.items())
    return _merged(Document({}, {(): "the command line"}), flags)


def job_from_flags(values: Mapping[str, tuple[Any, str]], sets: Iterable[str] = ()) -> JobConfig:
    """Return the job that flags (as in `of_flags`) and `--set` describe. Raises JobFileError with every mistake
    found."""
    return load_job(of_flags(values), sets)


def _job_of(
    written: Document, folder: Path, environ: Mapping[str, str], given: Mapping[str, str], now: Now
) -> JobConfig:
    document, mistakes = expanded(written, environ, given, now)
    mistakes += _lone_surrogates(document, document.data, ())
    before, later = [mistake.key for mistake in mistakes], []
    for with_file in (with_schema_file, partial(with_template_file, folder=folder)):
        try:
            document = with_file(document)
        except JobFileError as error:
            later += error.mistakes
    try:
        job = JobConfig.model_validate(document.data)
    except ValidationError as error:
        wrong = [*before, *(mistake.key for mistake in later)]
        found = from_validation(error, document, JobConfig)
        later += [m for m in found if f"{m.key}.json_file" not in wrong and f"{m.key}.file" not in wrong]
    # values with mistakes are not final: they may break other rules, and match no prefix of storage_options
    mistakes += [m for m in later if m.key not in before and not (before and m.key.startswith("storage_options."))]
    if mistakes:
        raise JobFileError(in_order(mistakes))
    job._document, job._written = document, written
    return job


def _merged(document: Document, sources: Iterable[Callable[[], Document]]) -> Document:
    """Return `document` with each source merged into it. Raises JobFileError with the mistakes of all sources."""
    mistakes: list[Mistake] = []
    for source in sources:
        try:
            document = _spelled_out(merge(document, source()))
        except JobFileError as error:
            mistakes += error.mistakes
    if mistakes:
        raise JobFileError(mistakes)
    return document


def _lone_surrogates(document: Document, value: Any, path: KeyPath) -> Iterator[Mistake]:
    """Yield a mistake for each text that is not valid Unicode, which no tokenizer accepts."""
    if isinstance(value, dict | list):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _lone_surrogates(document, step, (*path, step))
            yield from _lone_surrogates(document, inner, (*path, step))
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield Mistake(document.location(path), dotted(path), "contains a lone surrogate (\\ud800 to \\udfff)")


def _spelled_out(document: Document) -> Document:
    """Return `document` with bare words expanded to sections, so that overlays can merge with their keys."""
    data, origins = dict(document.data), dict(document.origins)
    for section, key in WORDS.items():
        if isinstance(word := data.get(section), str):
            data[section] = {key: word}
            origins[section, key] = origins[section,]
    return Document(data, origins)


def _preset(name: str) -> Document:
    if name not in NAMES:
        raise JobFileError([Mistake(f"--preset {name}", "", "no such preset", f"Available: {', '.join(NAMES)}.")])
    return read(FOLDER / f"{name}.yaml")


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
