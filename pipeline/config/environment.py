"""Environment variables in the paths, urls, keys and headers of a job file: `${NAME}` and `${NAME:-default}`.

In the paths of input and output, `vars` of the job take precedence. Other values, such as prompts, are not expanded:
`${price}` in them is text. The command of a server keeps its references, since the output records it; they are filled
in when it starts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.config.jobfile import Document, KeyPath, Mistake, Value, dotted, merge
from pipeline.config.variables import Now, values_of

PATH_KEYS: tuple[tuple[str, ...], ...] = (
    ("input", "path"),
    ("output", "path"),
    ("model", "path"),
    ("server", "base_url"),
    ("server", "api_key"),
    ("server", "headers"),
    ("server", "serve"),
    ("speculation", "model"),
    ("quality", "model"),
    ("prompt", "template", "file"),
    ("prompt", "chat", "chat_template"),
    ("sampling", "structured_outputs", "json_file"),
)
VARIABLE_KEYS = (("input", "path"), ("output", "path"))
AS_WRITTEN = (("server", "serve"),)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^{}]*))?\}")


def expanded(
    document: Document, environ: Mapping[str, str], given: Mapping[str, str], now: Now
) -> tuple[Document, list[Mistake]]:
    """Return `document` with the variables of its paths expanded, and every mistake: variables that are not set and
    have no default, and those in `vars`. An empty variable counts as not set, as in a shell. given: values of the job's
    variables. now: returns the time in a zone.
    """
    declared, mistakes = values_of(document, given, now)
    wrong = {mistake.key.removeprefix("vars.") for mistake in mistakes}
    unused = {*declared}
    environ = {**environ, **declared}
    for key_path in PATH_KEYS:
        value = _value(document, key_path)
        references = [found for text in _texts(value) for found in _REFERENCE.findall(text)]
        if not any("${" in text for text in _texts(value)):
            continue
        names = {name for name, _, _ in references}
        if wrong & names:
            continue  # reported already
        if key_path in VARIABLE_KEYS:
            unused -= names
        elif names & declared.keys():
            problem = f"the variable {min(names & declared.keys())} is not allowed here"
            mistakes.append(
                Mistake(document.location(key_path), dotted(key_path), problem, "Only in input.path and output.path.")
            )
            continue
        line, key = document.location(key_path), dotted(key_path)
        missing = [name for name, default, _ in references if not default and not environ.get(name)]
        hint = "Set it, or give a default: ${NAME:-default}."
        mistakes += [Mistake(line, key, f"the environment variable {name} is not set", hint) for name in missing]
        if any("${" in _REFERENCE.sub("", text) for text in _texts(value)):
            mistakes.append(Mistake(line, key, "expected ${NAME} or ${NAME:-default}", "Close the brace."))
        if key_path in AS_WRITTEN:
            continue
        data: Value = _filled(value, environ)
        for step in reversed(key_path):
            data = {step: data}
        assert isinstance(data, dict)
        origins: dict[KeyPath, str] = {
            key_path[:n]: document.location(key_path[:n]) for n in range(1, len(key_path) + 1)
        }
        document = merge(document, Document(data, origins))
    for name in sorted(unused):
        line, hint = document.location(("vars", name)), f"Write ${{{name}}} in input.path or output.path."
        mistakes.append(Mistake(line, f"vars.{name}", "is not used", hint))
    return document, mistakes


def filled(texts: Iterable[str], environ: Mapping[str, str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the texts with their variables filled in, and the values of these."""
    found = [match for text in texts for match in _REFERENCE.finditer(text)]
    values = frozenset(environ.get(match[1]) or match[3] or "" for match in found)
    return tuple(_filled(text, environ) for text in texts), values


def _filled(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _REFERENCE.sub(lambda found: environ.get(found[1]) or found[3] or "", value)
    if isinstance(value, list):
        return [_filled(inner, environ) for inner in value]
    return {name: _filled(inner, environ) for name, inner in value.items()} if isinstance(value, dict) else value


def _texts(value: object) -> list[str]:
    """Return the texts in a value, a list or a mapping."""
    if isinstance(value, dict):
        value = list(value.values())
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _value(document: Document, key_path: tuple[str, ...]) -> object:
    value: object = document.data
    for step in key_path:
        value = value.get(step) if isinstance(value, dict) else None
    return value
